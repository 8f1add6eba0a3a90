"""Which weights get which scheme: one for all, and rules by role or tensor, of which the last that matches wins."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from needle_export.errors import UsageError

#: The role of values that no checkpoint tensor stands behind.
_CONSTANT = "constant"


class Share(Protocol):
    """A share of a weight, and where it comes from; see ``graph.program.Part``."""

    @property
    def source(self) -> str:
        """The checkpoint tensor."""

    @property
    def role(self) -> str:
        """What it is for."""


@dataclass(frozen=True)
class Rule:
    """A scheme for some of the weights.

    Attributes:
        pattern: a role, or a checkpoint tensor's name, in which ``*`` stands for anything.
        scheme: one of ``WEIGHTS``.
    """

    pattern: str
    scheme: str

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Of ``PATTERN=SCHEME``.

        Raises:
            UsageError: it isn't that.
        """
        pattern, equals, scheme = (part.strip() for part in text.rpartition("="))
        if not (pattern and equals and scheme):
            raise UsageError(f"{text!r} isn't a rule", where="--rule", fix="write PATTERN=SCHEME, such as content=int8")
        return cls(pattern, scheme)

    def __str__(self) -> str:
        return f"{self.pattern}={self.scheme}"

    def matches(self, source: str, role: str) -> bool:
        """Whether a weight is meant."""
        return self.pattern == role or fnmatchcase(source, self.pattern)


@dataclass(frozen=True)
class Rules:
    """The schemes of one artifact.

    Attributes:
        base: of what no rule matches, and of small vectors' float type.
        rules: in order; the last that matches wins.
    """

    base: str
    rules: tuple[Rule, ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.base, *map(str, self.rules)])

    @property
    def schemes(self) -> tuple[str, ...]:
        """Every scheme that occurs, the base first."""
        return tuple(dict.fromkeys([self.base, *(r.scheme for r in self.rules)]))

    def scheme(self, source: str, role: str) -> str:
        """Of one checkpoint tensor."""
        return next((r.scheme for r in reversed(self.rules) if r.matches(source, role)), self.base)

    def of(self, shares: Iterable[Share]) -> str:
        """Of a weight made of these; the base where they differ, as in vectors that were joined for one op."""
        found = {self.scheme(s.source, s.role) for s in shares if s.role != _CONSTANT}
        return found.pop() if len(found) == 1 else self.base

    def of_matrix(self, shares: Sequence[Share]) -> str:
        """Of a matrix made of these.

        Raises:
            UsageError: they have several.
        """
        found = {s.source: self.scheme(s.source, s.role) for s in shares if s.role != _CONSTANT}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{source}={scheme}" for source, scheme in found.items())
            raise UsageError(f"these are stored as one matrix and have several schemes: {told}", where="--rule",
                             fix="give them one scheme, such as by their role")
        return next(iter(found.values()), self.base)

    def check(self, tensors: Iterable[tuple[str, str]]) -> None:
        """Hold the rules against the checkpoint's tensors, (name, role).

        Raises:
            UsageError: a rule matches none.
        """
        known = list(tensors)
        names = sorted({role for _, role in known}) + sorted({name for name, _ in known})
        for rule in self.rules:
            if not any(rule.matches(*tensor) for tensor in known):
                near = difflib.get_close_matches(rule.pattern, names, 1, 0.5)
                roles = ", ".join(sorted({role for _, role in known}))
                fix = f"did you mean {near[0]}?" if near else f"name a tensor, or one of the roles {roles}"
                raise UsageError(f"no weight of this checkpoint is {rule.pattern!r}", where="--rule", fix=fix)
