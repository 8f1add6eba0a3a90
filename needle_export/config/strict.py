"""TOML files into frozen values: every key known, every type right, and one sentence where that isn't so."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic

from needle_export.errors import BadInput

M = TypeVar("M", bound="Strict")

_MAX_BYTES = 1 << 20


class Strict(pydantic.BaseModel):
    """A table of such a file: no unknown key, no conversion between types, no change afterwards."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


def read_toml(cls: type[M], path: Path) -> M:
    """A value from a TOML file.

    Raises:
        BadInput: naming the file and the key path: it can't be read, it isn't TOML, or a key or value isn't right; for
            an unknown key, the nearest valid one.
    """
    try:
        with path.open("rb") as handle:
            data = handle.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadInput("there is no such file", where=str(path)) from None
    except OSError as error:
        raise BadInput(f"the file can't be read ({error.strerror})", where=str(path)) from None
    if len(data) > _MAX_BYTES:
        raise BadInput("this is far too large for such a file", where=str(path))
    try:
        raw = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadInput("this isn't UTF-8 text", where=str(path)) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"this isn't valid TOML ({error})", where=str(path)) from None
    return validate(cls, raw, str(path))


def validate(cls: type[M], raw: dict[str, Any], where: str) -> M:
    """A value from a table that was read.

    Raises:
        BadInput: as :func:`read_toml`.
    """
    try:
        # By way of JSON, whose lists may become tuples where types are strict.
        return cls.model_validate_json(json.dumps(raw))
    except TypeError:
        raise BadInput("dates and times have no place here", where=where) from None
    except pydantic.ValidationError as error:
        # A misspelt key is missing too, and what it should be called says more than that.
        first = next((e for e in error.errors() if e["type"] == "extra_forbidden"), error.errors()[0])
        keys = [part for part in first["loc"] if not _is_branch(part)]
        raise BadInput(_sentence(first), where=f"{where}: {_path(keys)}" if keys else where,
                       fix=_fix(cls, first, list(first["loc"]))) from None


def _is_branch(part: object) -> bool:
    """Whether a part of a location names a member of a union, and nothing in the file."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool"))


def _path(keys: list[Any]) -> str:
    path = ""
    for key in keys:
        path += f"[{key + 1}]" if isinstance(key, int) else f".{key}" if path else str(key)
    return path


def _sentence(error: Any) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        return "there is no such key"
    if kind == "missing":
        return "the key is missing"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    said = str(error["msg"])
    return f"{said[:1].lower()}{said[1:]}"


def _fix(cls: type[Strict], error: Any, keys: list[Any]) -> str:
    if error["type"] != "extra_forbidden":
        return ""
    model: Any = cls
    for key in keys[:-1]:
        model = _inside(model, key)
    table = _model(model)
    names = list(table.model_fields) if table else []
    near = difflib.get_close_matches(str(keys[-1]), names, 1, 0.5)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}" if names else ""


def _inside(kind: Any, key: object) -> Any:
    """The type behind a key or an index."""
    model = _model(kind)
    if model is not None and isinstance(key, str) and key in model.model_fields:
        return model.model_fields[key].annotation
    return kind


def _model(kind: Any) -> type[Strict] | None:
    """The table that a type holds: itself, or the members of a list, a dictionary or an optional value."""
    if isinstance(kind, type) and issubclass(kind, Strict):
        return kind
    return next((m for arg in get_args(kind) if (m := _model(arg)) is not None), None)
