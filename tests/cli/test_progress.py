"""Progress: for people at a terminal who have waited a while, and for nobody else."""

from __future__ import annotations

import io
import os
import re
import sys
import time

import pytest
from rich.console import Console

from needle_export.cli import output, shared
from needle_export.cli.progress import DELAY_S, RichProgress
from needle_export.config.progress import NullProgress


def terminal() -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=True, width=100, color_system=None), file


def test_what_is_over_soon_shows_nothing() -> None:
    console, file = terminal()
    with RichProgress(console, delay_s=10) as progress, progress.stage("trace", 3) as task:
        task.advance()
    assert file.getvalue() == ""
    assert DELAY_S == 2.0


def test_what_takes_longer_shows_its_stage_and_goes_away() -> None:
    console, file = terminal()
    with RichProgress(console, delay_s=0.01) as progress:
        with progress.stage("trace [bold]", 4) as task:
            task.advance(3)
            deadline = time.monotonic() + 10
            while "trace [bold]" not in file.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
        with progress.stage("no total") as task:
            task.advance()
    assert "trace [bold]" in file.getvalue()
    after = file.getvalue().rsplit("\x1b[2K", 1)[1]
    assert not re.sub(r"\x1b\[\?25h|\r", "", after), "the last line is wiped"


def test_bars_never_start_after_the_end() -> None:
    console, file = terminal()
    progress = RichProgress(console, delay_s=10)
    with progress:
        pass
    progress._show()
    assert file.getvalue() == ""


@pytest.mark.parametrize(("silent", "is_terminal", "kind"), [
    (False, True, RichProgress), (True, True, NullProgress), (False, False, NullProgress)])
def test_who_sees_it(monkeypatch: pytest.MonkeyPatch, silent: bool, is_terminal: bool, kind: type) -> None:
    monkeypatch.setattr(shared, "show_progress", lambda: is_terminal)
    with shared.progress_of(silent=silent) as progress:
        assert isinstance(progress, kind)


def test_a_dumb_terminal_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert output.show_progress()
    assert output.use_color()
    monkeypatch.setattr(output.shutil, "get_terminal_size", lambda: os.terminal_size((300, 50)))
    assert output.page_width() == 120
    monkeypatch.setenv("TERM", "dumb")
    assert not output.show_progress()
    assert not output.use_color()
    assert output.page_width() == 100


def test_null_progress_does_nothing() -> None:
    with NullProgress().stage("x", 1) as task:
        task.advance()
