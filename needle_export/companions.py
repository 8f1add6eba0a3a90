"""What a published build is asked with: a tokenizer, tools that may be called, and requests with their right calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from needle_export import demo
from needle_export.checkpoint.files import file_sha256, map_file
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.errors import BadInput, UsageError
from needle_export.generate.schemas import Tool, read_tools
from needle_export.report.manifest import DUMP_NAME, TOKENIZER_NAME
from needle_export.report.schema import Report, load_report


def tokenizer_path(dist: Path, given: Path | None) -> Path:
    """The tokenizer's file: one that is given, or the one beside a build.

    Raises:
        BadInput: there is none beside it.
    """
    if given is not None:
        return given
    for name in (TOKENIZER_NAME, DUMP_NAME):
        if (dist / name).is_file():
            return dist / name
    raise BadInput("no tokenizer lies beside this build", where=str(dist),
                   fix="give --tokenizer FILE, or build it with that")


def load_tokenizer_of(report: Report, path: Path) -> Tokenizer:
    """The tokenizer in a file, which must not know more pieces than the build's model has tokens.

    Raises:
        BadInput: it can't be read, or isn't the model's.
    """
    return load_tokenizer(path, int(report.checkpoint.geometry["vocab_size"]))


def given_or_demos(option: Literal["--tools", "--data"], given: Path | None, folders: Iterable[Path]) -> Path:
    """The file of an option: one that is given, or the demo model's own where every build was made from it.

    Args:
        option: whose file it is: of the tools, or of requests with their right calls.
        folders: published builds.

    Raises:
        BadInput: a report can't be read.
        UsageError: none is given, and a build was made from another checkpoint.
    """
    if given is not None:
        return given
    reports = [(folder, load_report(folder)) for folder in folders]
    try:
        files = demo.files()
        sha256 = file_sha256(files.checkpoint)
    except BadInput as incomplete:
        raise UsageError(f"there is none to take: {incomplete.what}", where=option, fix=f"give {option} FILE") from None
    other = next((folder for folder, report in reports if report.checkpoint.sha256 != sha256), None)
    if other is not None:
        raise UsageError(f"{other} needs one, as it wasn't built from the model that comes along", where=option,
                         fix=f"give {option} FILE")
    return files.tools if option == "--tools" else files.heldout


def load_tools(path: Path) -> tuple[Tool, ...]:
    """Tools from a JSON file.

    Raises:
        BadInput: naming the file: it can't be read, it isn't JSON, or a tool isn't right.
    """
    data = map_file(path).tobytes()
    try:
        value: Any = json.loads(data.decode("utf-8-sig"), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise BadInput("this isn't UTF-8 text", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"this isn't JSON ({error})", where=str(path)) from None
    try:
        return read_tools(value)
    except BadInput as error:
        raise BadInput(error.what, where=f"{path}: {error.where}", fix=error.fix) from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
