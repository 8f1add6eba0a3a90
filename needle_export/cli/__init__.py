"""The command line: one module a command, each of which parses, calls one function and prints.

Only this package prints. Commands are imported when they are named, and the libraries behind them when
they run, so that ``--help`` answers at once.
"""

from needle_export.cli.app import main

__all__ = ["main"]
