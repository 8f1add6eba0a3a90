"""What an artifact's answers are worth: counted over queries whose right calls are known, with the data they are of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from needle_export.report.units import plural, whole

_SHA256 = re.compile(r"[0-9a-f]{64}")

_HASH = 8


@dataclass(frozen=True)
class Proportion:
    """A share of what was counted.

    Attributes:
        count, of: the counts.
        share: the one over the other.
        low, high: ends of the 95 % interval of that share, after Wilson.
    """

    count: int
    of: int
    share: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.of or not self.of:
            raise ValueError(f"{self.count} of {self.of} is no share")
        if abs(self.share - self.count / self.of) > 1e-9:
            raise ValueError(f"{self.count} of {self.of} isn't {self.share}")
        if not 0 <= self.low <= self.share <= self.high <= 1:
            raise ValueError(f"{self.share} doesn't lie in the interval from {self.low} to {self.high}")


@dataclass(frozen=True)
class EvaluationData:
    """The queries that answers were counted over.

    Attributes:
        file: its name, without folder.
        sha256: of the file.
        tools_sha256: of the file with the tools of lines that have none; None where none was needed.
        lines: queries that the file holds.
        queries: of these, how many were asked: all, or a sample that is the same for the same number.
    """

    file: str
    sha256: str
    tools_sha256: str | None
    lines: int
    queries: int

    def __post_init__(self) -> None:
        for value in (self.sha256, self.tools_sha256):
            if value is not None and not _SHA256.fullmatch(value):
                raise ValueError(f"{value[:80]!r} isn't a SHA-256 in hex")
        if not 1 <= self.queries <= self.lines:
            raise ValueError(f"{self.queries} of {self.lines} queries can't be")


@dataclass(frozen=True)
class ReferenceAnswers:
    """An artifact's answers beside those of the float32 reference to the same queries.

    Attributes:
        exact_calls: of the reference itself.
        same_calls: both call the same.
        same_tokens: every token is the same.
    """

    exact_calls: Proportion
    same_calls: Proportion
    same_tokens: Proportion


@dataclass(frozen=True)
class Evaluation:
    """Answers of an artifact to a file of queries.

    Attributes:
        data: the queries.
        constrained: whether a grammar admitted valid calls only.
        max_new_tokens: where answers were cut.
        runtime: that the artifact ran in, with its version.
        exact_calls: the right calls in the right order, with equal arguments.
        tool_names: the right tools in the right order, whatever the arguments.
        nothing_precision: of answers that call nothing, those to queries that call for nothing; None of no such answer.
        nothing_recall: of queries that call for nothing, those answered so; None of no such query.
        invalid: answers that aren't valid calls of the tools.
        cut: answers that hadn't ended at a limit, which count as wrong.
        reference: beside the float32 reference; None where it wasn't asked.
        reference_why: why not; empty otherwise.
    """

    data: EvaluationData
    constrained: bool
    max_new_tokens: int
    runtime: str
    exact_calls: Proportion
    tool_names: Proportion
    nothing_precision: Proportion | None
    nothing_recall: Proportion | None
    invalid: Proportion
    cut: Proportion
    reference: ReferenceAnswers | None
    reference_why: str

    def __post_init__(self) -> None:
        if any(p.of != self.data.queries for p in (self.exact_calls, self.tool_names, self.invalid, self.cut)):
            raise ValueError(f"a count isn't of the {self.data.queries} queries")
        if (self.reference is None) != bool(self.reference_why):
            raise ValueError("there is either a reference, or a reason for having none")

    @property
    def key(self) -> Key:
        """What must be the same where two evaluations are compared."""
        d = self.data
        return (d.sha256, d.tools_sha256, d.queries, self.constrained, self.max_new_tokens)

    @property
    def of(self) -> str:
        """The key in words, but for the limit of tokens."""
        d = self.data
        count = plural(d.queries, "query").replace("querys", "queries")
        part = count if d.queries == d.lines else f"{whole(d.queries)} of {whole(d.lines)} queries"
        grammar = "with the grammar" if self.constrained else "WITHOUT the grammar"
        tools = f" with tools {d.tools_sha256[:_HASH]}" if d.tools_sha256 else ""
        return f"{d.file} {d.sha256[:_HASH]}{tools}, {part}, {grammar}"


Key = tuple[str, str | None, int, bool, int]
"""Hash of the data and of the tools' file, queries, whether constrained, most tokens of an answer."""


def with_evaluation(known: Sequence[Evaluation], new: Evaluation) -> tuple[Evaluation, ...]:
    """Evaluations with a new one, in the place of the one of the same data and mode, if there is such, or last."""
    if any(old.key == new.key for old in known):
        return tuple(new if old.key == new.key else old for old in known)
    return (*known, new)


def chosen(evaluations: Iterable[Evaluation], shared: Key | None = None) -> Evaluation | None:
    """The evaluation that an artifact's figures are of, or None.

    It is one with the grammar, as artifacts are used; of several the one of most queries, and of these the last. Only
    where a key is given, it is the one of that key, of whatever mode.
    """
    found = [e for e in evaluations if (e.constrained if shared is None else e.key == shared)]
    return max(reversed(found), key=lambda e: e.data.queries, default=None)


def shared_key(several: Sequence[Sequence[Evaluation]]) -> Key | None:
    """The key whose evaluations are compared: one that all have which have any with the grammar; None if none is.

    Args:
        several: the evaluations of each artifact.
    """
    keys = [{e.key for e in evaluations if e.constrained} for evaluations in several]
    keys = [found for found in keys if found]
    common = set.intersection(*keys) if keys else set()
    first = next((e for e in several if any(x.constrained for x in e)), ())
    best = chosen(e for e in first if e.key in common)
    return best.key if best else None
