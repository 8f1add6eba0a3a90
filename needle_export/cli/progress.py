"""Progress bars on stderr, for people who wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Task as Shown
from rich.text import Text

from needle_export.config.progress import Task

DELAY_S = 2.0
"""What is over sooner shows nothing."""


class RichProgress:
    """Shows the running stages once the command has taken longer than the delay; gone at the end."""

    def __init__(self, console: Console | None = None, delay_s: float = DELAY_S) -> None:
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
            TimeElapsedColumn(), _Left(), console=console or Console(stderr=True), transient=True)
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._over = False

    def __enter__(self) -> RichProgress:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            self._bars.stop()

    def _show(self) -> None:
        # The timer may fire while the command ends; bars started after that would never stop.
        with self._lock:
            if not self._over:
                self._bars.start()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Task]:
        """A line with a bar while the context is open."""
        task = self._bars.add_task(name, total=total)
        try:
            yield _RichTask(self._bars, task)
        finally:
            self._bars.remove_task(task)


class _Left(TimeElapsedColumn):
    """How much of a stage is done and how long the rest will take, of those that are told."""

    def render(self, task: Shown) -> Text:
        """``120 of 500, 0:00:41 left``, or nothing."""
        if task.total is None:
            return Text("")
        done = f"{task.completed:.0f} of {task.total:.0f}"
        if task.time_remaining is None or task.finished:
            return Text(done)
        return Text(f"{done}, {timedelta(seconds=int(task.time_remaining))} left")


class _RichTask:
    def __init__(self, bars: Progress, task: TaskID) -> None:
        self._bars, self._task = bars, task

    def advance(self, n: int = 1) -> None:
        """Moves the bar."""
        self._bars.advance(self._task, n)
