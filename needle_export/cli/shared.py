"""What commands have in common: their help's shape, their options, the types of their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from needle_export.cli.failures import EXIT_CODES
from needle_export.cli.output import emit, page_width, show_progress, use_color
from needle_export.config.progress import NullProgress, Progress
from needle_export.config.rules import Rule
from needle_export.errors import UsageError
from needle_export.report.codec import to_json
from needle_export.report.render import render
from needle_export.report.schema import Report

if TYPE_CHECKING:
    from needle_export.inspection import Inspection

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A command whose help ends with examples and the exit codes."""

    def __init__(self, *args: Any, examples: tuple[str, ...] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a pipe that breaks inside it has nothing to do with whoever reads stdout."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ChildProcessError("a helper process ended early") from error

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Examples, one a line and never wrapped, then the exit codes."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}needle-export {example}\n")
        write_exit_codes(formatter)


def write_exit_codes(formatter: click.HelpFormatter) -> None:
    """The table of exit codes for a help page."""
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


def define(name: str, *examples: str) -> Callable[[Callable[..., Any]], Command]:
    """A command with its examples, each without the program's name; adds ``--debug``."""

    def decorate(function: Callable[..., Any]) -> Command:
        made = click.command(name, cls=Command, examples=examples)(function)
        made.params.append(click.Option(
            ["--debug"], is_flag=True, expose_value=False,
            help="Show the traceback of an error (or set NEEDLE_EXPORT_DEBUG=1)."))
        return made

    return decorate


def json_option(function: F) -> F:
    """``--json``, passed on as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True,
                        help="Print JSON on stdout, errors included; no progress.")(function)


def quiet_option(function: F) -> F:
    """``--quiet``."""
    return click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")(function)


@contextlib.contextmanager
def progress_of(*, silent: bool) -> Iterator[Progress]:
    """Progress on stderr when that is a terminal and nobody asked for silence."""
    if silent or not show_progress():
        yield NullProgress()
        return
    from needle_export.cli.progress import RichProgress

    with RichProgress() as progress:
        yield progress


def print_report(report: Report, *, as_json: bool) -> None:
    """A report for whoever reads stdout."""
    emit(render(report, "json" if as_json else "text", color=use_color(), width=page_width()))


def print_inspection(inspection: Inspection, *, as_json: bool) -> None:
    """What a file is, for whoever reads stdout."""
    if as_json:
        emit(to_json(inspection))
        return
    from needle_export.report.inspection_text import render_inspection

    emit(render_inspection(inspection, color=use_color(), width=page_width()))


def new_file(value: str) -> Path:
    """Argument type: a file to write, which may replace a file and nothing else."""
    path = Path(value)
    if path.is_dir():
        raise UsageError("this is a folder", where=value, fix="name a file in it")
    # Writing is a rename at the end, and that would do away with a device or a pipe.
    if path.exists() and not path.is_file():
        raise UsageError("this isn't a regular file", where=value, fix="name another file")
    return path


def artifact_folder(value: str) -> Path:
    """Argument type: a folder that a build has published; an interrupted exchange of it is finished first.

    Whether there is a report in it is for the reader of the report to say.
    """
    from needle_export.bundle.publish import recover

    path = Path(value)
    recover(path)
    return path


def integers(value: str) -> tuple[int, ...]:
    """Option type: whole numbers above 0, separated by commas, in the order given."""
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} isn't a list of whole numbers above 0, such as 64,256")
    return numbers


def names(value: str) -> tuple[str, ...]:
    """Option type: names separated by commas, in the order given; none of an empty text."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def rule(value: str) -> Rule:
    """Option type: ``PATTERN=SCHEME``."""
    return Rule.parse(value)


def bounds(value: str) -> tuple[tuple[str, float], ...]:
    """Option type: ``NAME=NUMBER`` with commas between; none of an empty text."""
    pairs = []
    for part in names(value):
        name, _, number = part.partition("=")
        try:
            pairs.append((name.strip(), float(number)))
        except ValueError:
            raise click.BadParameter(f"{part!r} isn't a bound, such as logits=5e-5") from None
    return tuple(pairs)


def head_widths(value: str) -> tuple[tuple[int, int], ...]:
    """Option type: pairs of head widths (qk, v) written ``qk/v``, separated by commas."""
    pairs = []
    for part in value.split(","):
        qk, _, v = part.strip().partition("/")
        if not (qk.isdecimal() and v.isdecimal()):
            raise click.BadParameter(f"{part!r} isn't a pair of widths, such as 48/64")
        pairs.append((int(qk), int(v)))
    return tuple(pairs)
