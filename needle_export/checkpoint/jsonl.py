"""Files of one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from needle_export.errors import BadInput


def read_objects(data: bytes, form: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number, from 1, and its object; empty lines are passed over.

    Args:
        data: the file, UTF-8, with or without a mark of it in front.
        form: what a line is to look like, for errors.

    Raises:
        BadInput: naming the line that isn't UTF-8, JSON or an object.
    """
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            yield number, _object(line, number, form)


def no_constant(name: str) -> NoReturn:
    """Refuses what Python takes for a number and JSON doesn't know, as ``parse_constant``."""
    raise ValueError(f"JSON has no {name}")


def _object(line: bytes, number: int, form: str) -> dict[str, Any]:
    where = f"line {number}"
    try:
        found = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError:
        raise BadInput("it isn't UTF-8", where=where, fix=form) from None
    except (ValueError, RecursionError):
        raise BadInput("it isn't JSON", where=where, fix=form) from None
    if not isinstance(found, dict):
        raise BadInput("it isn't a JSON object", where=where, fix=form)
    return found
