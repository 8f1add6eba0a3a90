"""Frozen dataclasses to JSON and back, strictly: every key known, every key present, every type right.

The types that a field may have: int, float, str, bool, Any (free-form JSON), ``X | None``, ``Literal``,
``tuple[X, ...]``, ``dict[str, X]`` and dataclasses of these.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from needle_export.errors import BadInput

T = TypeVar("T")

_MAX_BYTES = 64 << 20


def encode(value: object, path: str = "") -> Any:
    """The JSON form of a value; keys of dictionaries are sorted, fields keep their order.

    Raises:
        ValueError: naming the key path, for a number that isn't finite or a type JSON doesn't have.
            Both are mistakes of the code that made the value.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name), _join(path, field.name))
                for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{path}: a key isn't a string")
        return {key: encode(value[key], _join(path, key)) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, str)):
        return value
    # numpy's scalars register with these, so that nobody has to convert what was measured.
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        if not math.isfinite(value):
            raise ValueError(f"{path}: {value} isn't a finite number; use None")
        return float(value)
    raise ValueError(f"{path}: {type(value).__name__} has no JSON form")


def to_json(value: object) -> str:
    """The JSON text of a value, the same for the same value, ending in a newline.

    Raises:
        ValueError: as ``encode``.
    """
    return json.dumps(encode(value), ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def decode(cls: type[T], raw: Any, path: str = "") -> T:
    """A dataclass from its JSON form.

    Raises:
        BadInput: naming the key path, for an unknown or missing key, a wrong type, or a value that the
            dataclass refuses.
    """
    if not isinstance(raw, dict):
        raise _wrong(path, "an object", raw)
    hints = get_type_hints(cls)
    for key in raw:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            raise BadInput("this key isn't part of a report", where=_join(path, key),
                           fix=f"did you mean {near[0]}?" if near else "")
    values = {}
    for name, hint in hints.items():
        if name not in raw:
            raise BadInput("the key is missing", where=_join(path, name))
        values[name] = _value(hint, raw[name], _join(path, name))
    try:
        return cls(**values)
    except ValueError as error:
        raise BadInput(str(error), where=path) from None


def read_file(file: Path, what: str) -> bytes:
    """What a file holds that is to be a report, or another thing by the name of ``what``, in a folder of a build.

    Raises:
        BadInput: there is none, it can't be read, or it is far larger than any.
    """
    try:
        with file.open("rb") as handle:
            data = handle.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(f"there is no such {what}", where=str(file),
                       fix="give the folder that a build has written") from None
    except OSError as error:
        raise BadInput(f"the {what} can't be read ({error.strerror})", where=str(file)) from None
    if len(data) > _MAX_BYTES:
        raise BadInput(f"this is far too large for a {what}", where=str(file))
    return data


def parse_json(text: str, where: str) -> Any:
    """JSON without its traps: no doubled keys, no NaN or Infinity, no bottomless nesting.

    Raises:
        BadInput: saying what is wrong and in which line.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            doubled = next(key for key in out if sum(k == key for k, _ in pairs) > 1)
            raise BadInput(f"the key {doubled[:60]!r} is there twice", where=where)
        return out

    def refuse(constant: str) -> Any:
        raise BadInput(f"{constant} isn't a number that JSON has", where=where)

    def finite(digits: str) -> float:
        value = float(digits)
        return value if math.isfinite(value) else refuse(digits[:40])

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except json.JSONDecodeError as error:
        raise BadInput(f"line {error.lineno} isn't valid JSON ({error.msg})", where=where) from None
    except (RecursionError, ValueError):
        raise BadInput("this isn't JSON that a report could be", where=where) from None


def _value(hint: Any, raw: Any, path: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return raw
    if origin in (Union, types.UnionType):
        inner = [arg for arg in args if arg is not types.NoneType]
        return None if raw is None else _value(inner[0], raw, path)
    if origin is Literal:
        if raw not in args or isinstance(raw, bool):
            raise _wrong(path, " or ".join(repr(arg) for arg in args), raw)
        return raw
    if origin is tuple:
        if not isinstance(raw, list):
            raise _wrong(path, "a list", raw)
        return tuple(_value(args[0], item, f"{path}[{index}]") for index, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            raise _wrong(path, "an object", raw)
        return {key: _value(args[1], item, _join(path, key)) for key, item in raw.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return decode(hint, raw, path)
    return _scalar(hint, raw, path)


def _scalar(hint: Any, raw: Any, path: str) -> Any:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    fits = type(raw) is hint or (hint is float and type(raw) is int)
    if not fits:
        raise _wrong(path, names[hint], raw)
    # Whole numbers of any length are valid JSON; a float can't hold them all.
    if hint is float and abs(raw) > 1e300:
        raise _wrong(path, "a number of sensible size", raw)
    return float(raw) if hint is float else raw


def _wrong(path: str, expected: str, raw: object) -> BadInput:
    shown = "null" if raw is None else json.dumps(raw)[:40] if not isinstance(raw, (dict, list)) else \
        "an object" if isinstance(raw, dict) else "a list"
    return BadInput(f"needs {expected}, not {shown}", where=path)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
