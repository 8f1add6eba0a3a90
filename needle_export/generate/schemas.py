"""Tools as people write them, flat or OpenAI-style, as the prompt and the grammar need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from needle_export.errors import BadInput

_FORM = 'write {"name": "..", "description": "..", "parameters": {"type": "object", "properties": {..}}}'


@dataclass(frozen=True)
class Tool:
    """A tool that may be called.

    Attributes:
        name: that calls name it by.
        description: for the model; empty where there is none.
        parameters: JSON schema of its arguments, an object's.
        flat: the dictionary that the prompt shows, keys in the order in which they were written.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    flat: dict[str, Any]


def read_tools(value: Any) -> tuple[Tool, ...]:
    """Tools from a JSON value: a list of schemas or a single one, each flat or ``{"type":"function","function":{..}}``.

    A flat dictionary goes into the prompt as it is, keys that mean nothing here included (``triggers`` say), since
    that is what upstream's ``render_example`` does. Of OpenAI's form that is what ``function`` holds.

    Raises:
        BadInput: naming the tool and the field.
    """
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadInput("tools are a list of schemas or one schema", where="tools", fix=_FORM)
    tools: list[Tool] = []
    for number, entry in enumerate(value, 1):
        tool = _read(entry, f"tool {number}")
        if tool.name in (t.name for t in tools):
            raise BadInput("another tool has the same name", where=f"tool {tool.name!r}: name", fix="rename one")
        tools.append(tool)
    return tuple(tools)


def _read(entry: Any, where: str) -> Tool:
    if not isinstance(entry, dict):
        raise BadInput("it isn't a JSON object", where=where, fix=_FORM)
    flat, field = entry, ""
    if "function" in entry and "name" not in entry:
        flat, field = entry["function"], "function."
        if entry.get("type", "function") != "function":
            raise BadInput("the only type of tool is \"function\"", where=f"{where}: type")
        if not isinstance(flat, dict):
            raise BadInput("it isn't a JSON object", where=f"{where}: function", fix=_FORM)
    name = flat.get("name")
    if not isinstance(name, str) or not name:
        said = "it isn't a string" if "name" in flat and not isinstance(name, str) else "it is missing or empty"
        raise BadInput(said, where=f"{where}: {field}name", fix=_FORM)
    where = f"tool {name!r}"
    description = flat.get("description", "")
    if not isinstance(description, str):
        raise BadInput("it isn't a string", where=f"{where}: {field}description")
    parameters = flat.get("parameters", {})
    if not isinstance(parameters, dict):
        raise BadInput("it isn't a JSON object", where=f"{where}: {field}parameters", fix=_FORM)
    if parameters.get("type", "object") != "object":
        raise BadInput('arguments are an object, so its type is "object"', where=f"{where}: {field}parameters.type")
    return Tool(name, description, parameters, flat)
