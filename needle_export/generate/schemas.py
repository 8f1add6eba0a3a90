"""Tools as people write them, flat or OpenAI-style, as the prompt and the grammar need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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
    that is what upstream's ``render_example`` does.

    Raises:
        BadInput: naming the tool and the field.
    """
    raise NotImplementedError
