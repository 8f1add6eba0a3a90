"""A published build that answers requests: its artifact in its runtime, its tokenizer, and tools from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from needle_export.assemble import check_files
from needle_export.companions import given_or_demos, load_tokenizer_of, load_tools, tokenizer_path
from needle_export.config.progress import Progress
from needle_export.errors import UsageError
from needle_export.generate.assistant import Answer, Assistant
from needle_export.generate.calls import Call
from needle_export.report.schema import load_report
from needle_export.targets import find_target


@dataclass(frozen=True)
class Answered:
    """A request and what became of it.

    Attributes:
        query: as it was asked.
        answer: of the model.
        valid: whether the answer is valid calls of the tools, none included.
        problem: why not, or empty.
        calls: that were made; none where there are no valid ones.
        tokens: generated.
        tokens_per_s: of decoding; None where no step was timed.
    """

    query: str
    answer: str
    valid: bool
    problem: str
    calls: tuple[Call, ...]
    finished: bool
    prompt_tokens: int
    tokens: int
    first_token_ms: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class Session:
    """What ``run`` tells: where it ran, under which rules, and every answer.

    Attributes:
        target, runtime, weights: of the artifact.
        random: whether the model's weights are, so that its answers mean nothing.
        evaluator: whether the runtime is an evaluator of ours, whose speed says nothing about a device.
        tools: the file of the tools that might be called.
        constrained: whether only valid calls could be answered.
        notes: what of the tools' schemas the grammar doesn't enforce.
    """

    target: str
    runtime: str
    weights: str
    random: bool
    evaluator: bool
    threads: int
    tools: str
    constrained: bool
    notes: tuple[str, ...]
    answers: tuple[Answered, ...]


def answer(
    dist: Path,
    queries: Sequence[str],
    tools: Path | None = None,
    *,
    tokenizer: Path | None = None,
    system: str = "",
    constrained: bool = True,
    max_new_tokens: int = 256,
    max_calls: int | None = None,
    threads: int = 1,
    progress: Progress,
) -> Session:
    """Ask a published build, in its runtime, one request after another.

    Args:
        tools: that may be called, a file; None takes the demo model's for builds of that.
        tokenizer: its file, or None for the one beside the build.
        max_calls: at most so many in an answer; None, any number.

    Raises:
        BadInput: the folder, the tokenizer or a schema isn't right.
        VerificationFailed: a file isn't the one that was published; its answers would be worth nothing.
        UsageError: a prompt leaves no room in the context, or no tools are given and there are none to take.
    """
    tools = given_or_demos("--tools", tools, [dist])
    known = load_tools(tools)
    report = load_report(dist)
    if len(report.artifacts) != 1:
        raise UsageError(f"the folder holds {len(report.artifacts)} artifacts", where=str(dist), fix="name one")
    artifact = report.artifacts[0]
    check_files(dist, artifact)
    words = load_tokenizer_of(report, tokenizer_path(dist, tokenizer))
    target = find_target(artifact.target)
    runner = target.open(dist, threads=threads)
    assistant = Assistant(runner, words, known, system=system, constrained=constrained, max_new_tokens=max_new_tokens,
                          max_calls=max_calls)
    answers = []
    with progress.stage("answer", len(queries)) as task:
        for query in queries:
            answers.append(_answered(query, assistant.ask(query)))
            task.advance()
    return Session(
        target=artifact.target, runtime=target.runtime, weights=artifact.weights, random=report.checkpoint.random,
        evaluator=target.status == "verified-by-evaluator", threads=threads, tools=str(tools),
        constrained=constrained, notes=assistant.automaton.notes, answers=tuple(answers),
    )  # fmt: skip


def _answered(query: str, found: Answer) -> Answered:
    valid = not found.problem
    calls = found.calls if valid and found.calls is not None else ()
    return Answered(
        query, found.text, valid, found.problem, calls, found.finished, found.prompt_tokens, len(found.tokens),
        found.first_token_s * 1e3, found.tokens_per_s,
    )  # fmt: skip
