"""Every failure a user can meet, as one sentence with a way out and an exit code.

Exit codes, shared by all commands:

====  =======================================================
0     done
1     a budget or a check failed
2     usage: an option or an argument can't be right
3     bad input: a file is damaged, foreign, incomplete or missing
4     verification failed: nothing was published
5     not supported here: a runtime, a platform or a feature is absent
70    internal error: a fault of this program
130   interrupted (143: terminated)
====  =======================================================
"""

from __future__ import annotations


class NeedleExportError(Exception):
    """Base of the tree: what went wrong, where, and what to do next.

    Args:
        what: one clause naming the fault.
        where: the file, tensor, header field or option at fault.
        fix: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(self.sentence)

    @property
    def sentence(self) -> str:
        """The whole message on one line: ``where: what; fix.``"""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}; {self.fix}" if self.fix else head


class CheckFailed(NeedleExportError):
    """A budget or a check said no (exit 1)."""

    exit_code = 1


class UsageError(NeedleExportError):
    """An option or a combination of options that can't be carried out (exit 2)."""

    exit_code = 2


class BadInput(NeedleExportError):
    """A file that can't be read as what it should be (exit 3)."""

    exit_code = 3


class VerificationFailed(NeedleExportError):
    """The artifact doesn't reproduce the reference (exit 4)."""

    exit_code = 4


class FusionFailed(VerificationFailed):
    """A promised fusion fired fewer times than the model has places for it (exit 4)."""


class Unsupported(NeedleExportError):
    """This machine, runtime or target can't do it (exit 5)."""

    exit_code = 5
