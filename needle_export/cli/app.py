"""The program: finds the command, runs it, and turns whatever happens into a sentence and an exit code."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import click

from needle_export import __version__
from needle_export.cli.failures import ReaderGone, Terminated, describe
from needle_export.cli.output import emit, silence_stdout
from needle_export.cli.shared import Command, write_exit_codes

COMMANDS = {
    "inspect": "needle_export.cli.inspect",
    "sample": "needle_export.cli.sample",
    "plan": "needle_export.cli.plan",
    "build": "needle_export.cli.build",
    "verify": "needle_export.cli.verify",
    "bench": "needle_export.cli.bench",
    "calibrate": "needle_export.cli.calibrate",
    "import-latency": "needle_export.cli.import_latency",
    "evaluate": "needle_export.cli.evaluate",
    "eval": "needle_export.cli.eval",
    "run": "needle_export.cli.run",
    "web": "needle_export.cli.web",
    "report": "needle_export.cli.report",
    "compare": "needle_export.cli.compare",
    "check": "needle_export.cli.check",
    "diff": "needle_export.cli.diff",
    "demo": "needle_export.cli.demo",
    "schemes": "needle_export.cli.schemes",
    "cache": "needle_export.cli.cache",
    "devices": "needle_export.cli.devices",
    "train-demo": "needle_export.cli.train_demo",
}
"""Modules by command, in the order in which they are used; each has a ``command``."""


class Program(click.Group):
    """The root command: imports commands on demand, and ends every run itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which people use them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command: Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str],
                        ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it, with the nearest command named after a typing mistake."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The exit codes, below the commands."""
        write_exit_codes(formatter)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None,
             complete_var: str | None = None, standalone_mode: bool = True,
             windows_expand_args: bool = True, **extra: Any) -> Any:
        """Runs the program and exits; click's own ending has other codes and longer messages."""
        arguments = list(sys.argv[1:] if args is None else args)
        name = prog_name or "needle-export"
        self._main_shell_completion(extra, name, complete_var)
        sys.exit(_run(self, arguments, name, extra))


def _run(program: Program, arguments: list[str], name: str, extra: dict[str, Any]) -> int:
    debug = _has(arguments, "--debug") or os.environ.get("NEEDLE_EXPORT_DEBUG", "") not in ("", "0")
    with contextlib.nullcontext() if debug else _native_chatter_hidden():
        logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
        return _invoke(program, arguments, name, extra, debug=debug)


def _invoke(program: Program, arguments: list[str], name: str, extra: dict[str, Any], *, debug: bool) -> int:
    try:
        with _terminable(), program.make_context(name, arguments, **extra) as ctx:
            program.invoke(ctx)
        return 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as help_page:
        click.echo(help_page.format_message(), err=True)
        return 2
    except (ReaderGone, BrokenPipeError):
        # Commands turn other broken pipes into errors of their own, so this was a help page.
        silence_stdout()
        return 0
    except BaseException as error:
        return _report(error, debug=debug, as_json=_has(arguments, "--json"))


def _report(error: BaseException, *, debug: bool, as_json: bool) -> int:
    """Tells the user what went wrong; returns the exit code."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, click.Abort):  # click wraps interrupts at prompts
        error = KeyboardInterrupt()
    failure = describe(error)
    # A second interrupt while this is printed must not change the code.
    with contextlib.suppress(OSError, ReaderGone, KeyboardInterrupt):
        if debug:
            click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        click.echo(f"error: {failure.sentence}", err=True)
        if as_json:
            emit(failure.as_json())
    return failure.exit_code


def _has(arguments: Sequence[str], option: str) -> bool:
    """Whether an option was given, even if the line can't be parsed."""
    options = arguments[:arguments.index("--")] if "--" in arguments else arguments
    return option in options


@contextlib.contextmanager
def _native_chatter_hidden() -> Iterator[None]:
    """Sends what native libraries write to descriptor 2 nowhere; ours goes on reaching it, through a copy.

    Runtimes greet there and converters estimate, and nothing that they offer turns it off.
    """
    try:
        wanted = sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        wanted = False
    if not wanted:
        yield
        return
    before = sys.stderr
    before.flush()
    with os.fdopen(os.dup(2), "w", encoding=before.encoding, errors="backslashreplace", buffering=1) as copy:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        os.close(sink)
        sys.stderr = copy
        try:
            yield
        finally:
            sys.stderr = before
            os.dup2(copy.fileno(), 2)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Turns the first SIGTERM into an exception; a second one ends the process at once."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group("needle-export", cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="needle-export", message="%(prog)s %(version)s")
def program() -> None:
    """Turns Needle 3 checkpoints into verified, fused on-device models, and reports what they weigh and
    how fast they are.

    CHECKPOINT is always a file, hf:<owner>/<repo>[/<file>], or demo, a small model that comes along.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; ``args`` without the program's name, None for the process's."""
    program.main(args)
