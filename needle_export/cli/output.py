"""Writing to stdout: whole, with colours only on a terminal, and calm when nobody reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

import click

from needle_export.cli.failures import ReaderGone

_MAX_WIDTH = 120
_PIPE_WIDTH = 100


def emit(text: str) -> None:
    """Prints text as it is.

    Raises:
        ReaderGone: when the reader has closed the pipe.
        OSError: when stdout can't take it, for want of space say.
    """
    if isinstance(getattr(sys.stdout, "errors", None), str) and hasattr(sys.stdout, "reconfigure"):
        # A terminal with a narrow encoding shows ? instead of a bar; that beats a failure.
        sys.stdout.reconfigure(errors="replace")
    try:
        click.echo(text, nl=False, color=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone from None
    except OSError:
        silence_stdout()
        raise


def save(path: Path, text: str) -> None:
    """Writes a text file that appears whole or not at all.

    Raises:
        UsageError: when the place can't be written.
    """
    from needle_export.checkpoint.files import atomic_write

    with atomic_write(path) as handle:
        handle.write(text.encode())


def use_color() -> bool:
    """Whether stdout is a terminal that may show colours."""
    return _is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def show_progress() -> bool:
    """Whether stderr is a terminal that can redraw its last line."""
    return _is_terminal(sys.stderr)


def page_width() -> int:
    """Columns for text views: the terminal's, within reason, or a fixed number for pipes and files."""
    return min(shutil.get_terminal_size().columns, _MAX_WIDTH) if _is_terminal(sys.stdout) else _PIPE_WIDTH


def _is_terminal(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM") != "dumb"


def silence_stdout() -> None:
    """Lets the interpreter's last flush go nowhere; it would fail again, with a traceback."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
