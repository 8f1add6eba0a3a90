"""Every way a command can end other than well, as one sentence and an exit code."""

from __future__ import annotations

import json
from dataclasses import dataclass

import click

from needle_export.errors import NeedleExportError

EXIT_CODES = {
    0: "done",
    1: "a budget or a check failed",
    2: "usage: an option or an argument can't be right",
    3: "bad input: a file is damaged, foreign, incomplete or missing; or no space is left",
    4: "verification failed: nothing was published",
    5: "not supported here: a runtime, a platform or a feature is absent",
    70: "internal error: a mistake of this program",
    130: "interrupted",
    143: "terminated",
}
"""What each exit code means; every command's help lists them."""

_OPTIONAL = {"onnx": "onnx", "onnx_ir": "onnx", "onnxruntime": "onnx", "coremltools": "coreml",
             "ai_edge_litert": "tflite"}


class Terminated(BaseException):
    """SIGTERM, as an exception, so that whatever is half done is cleaned up on the way out."""


class ReaderGone(Exception):
    """Whoever read our output has closed it, as ``head`` does."""


@dataclass(frozen=True)
class Failure:
    """An error as it is shown: what, where, what to do, and the exit code."""

    message: str
    where: str
    fix: str
    exit_code: int

    @property
    def sentence(self) -> str:
        """All of it on one line."""
        head = f"{self.where}: {self.message}" if self.where else self.message
        line = f"{head}; {self.fix}" if self.fix else head
        return " ".join("".join(c if c.isprintable() else " " for c in line).split())

    def as_json(self) -> str:
        """The form that ``--json`` prints on stdout, ending in a newline."""
        error = {"message": self.message, "where": self.where, "fix": self.fix, "exit_code": self.exit_code}
        return json.dumps({"error": error}, ensure_ascii=False, indent=1) + "\n"


def describe(error: BaseException) -> Failure:
    """What to tell the user about an exception of any kind."""
    match error:
        case NeedleExportError():
            return Failure(error.what, error.where, error.fix, error.exit_code)
        case click.UsageError():
            return Failure(_usage(error), "", f"see {error.ctx.command_path} --help" if error.ctx else "", 2)
        case click.ClickException():
            return Failure(error.format_message().rstrip("."), "", "", 2)
        case KeyboardInterrupt() | EOFError():
            return Failure("interrupted", "", "", 130)
        case Terminated():
            return Failure("terminated", "", "", 143)
        case MemoryError():
            return Failure("there isn't enough memory for this", "", "close other programs, or build a rung "
                           "with fewer --layers", 5)
        case ModuleNotFoundError() if (extra := _extra(error)) is not None:
            return Failure(f"{error.name} isn't installed", "",
                           f"install it with: pip install 'needle-export[{extra}]'", 5)
        case OSError() if error.strerror:
            return Failure(error.strerror.lower(), str(error.filename or ""), "", 3)
        case _:
            text = str(error).strip().split("\n")[0][:200]
            name = type(error).__name__
            return Failure(f"internal error: {name}: {text}" if text else f"internal error: {name}", "",
                           "please report it with what the same command prints with --debug", 70)


def _usage(error: click.UsageError) -> str:
    """Click's message as a clause."""
    if isinstance(error, click.NoSuchOption):
        near = " or ".join(error.possibilities or ())
        return f"there is no option {error.option_name!r}{f'; did you mean {near}?' if near else ''}"
    return error.format_message().rstrip(".")


def _extra(error: ModuleNotFoundError) -> str | None:
    return _OPTIONAL.get((error.name or "").partition(".")[0])
