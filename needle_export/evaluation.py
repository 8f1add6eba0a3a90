"""Answers of published artifacts to queries whose right calls are known, counted into their reports."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from needle_export import __version__
from needle_export.assemble import check_files
from needle_export.bundle.rewrite import rewrite_report
from needle_export.checkpoint.files import file_sha256, map_file, naming
from needle_export.checkpoint.text import Tokenizer
from needle_export.companions import given_or_demos, load_tokenizer_of, load_tools, tokenizer_path
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import BadInput, UsageError
from needle_export.generate.assistant import Answer, Assistant
from needle_export.generate.examples import Example, read_examples, sample
from needle_export.generate.prefix import ForeseeingRunner, PrefixRunner
from needle_export.generate.prompt import render
from needle_export.loading import Loaded, load
from needle_export.measure.answers import Agreement, Tally, wilson
from needle_export.report.evaluation import (
    Evaluation,
    EvaluationData,
    Proportion,
    ReferenceAnswers,
    with_evaluation,
)
from needle_export.report.schema import Artifact, Report, load_report
from needle_export.targets import find_target

if TYPE_CHECKING:
    from needle_export.model.session import ReferenceSession

NO_REFERENCE = "not compared: no --checkpoint was given"

#: Assistants kept for their tools and instructions, each with its grammar.
_KEPT = 16


@dataclass(frozen=True)
class EvaluationOptions:
    """What is asked, and how.

    Attributes:
        data: a file of queries with their right calls; None takes the demo model's for builds of that.
        tools: a file of tools for lines that have none; None likewise, and none for builds of other models.
        limit: at most so many queries, a sample of the file; None asks all.
        constrained: whether only valid calls may be answered.
        max_new_tokens: at most so many tokens an answer.
        checkpoint: of the builds, for the float32 reference; None compares with none.
        lora: the adapter that the builds merged, which the reference needs too.
        tokenizer: of the builds; None takes the one beside each.
        threads: of runtimes and of the reference.
    """

    data: Path | None = None
    tools: Path | None = None
    limit: int | None = None
    constrained: bool = True
    max_new_tokens: int = 256
    checkpoint: str | None = None
    lora: str | None = None
    tokenizer: Path | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.lora is not None and self.checkpoint is None:
            raise UsageError("an adapter is merged into a checkpoint", where="--lora", fix="give --checkpoint too")


@dataclass(frozen=True)
class Evaluated:
    """An artifact with its evaluation, as its report has it now.

    Attributes:
        data: the file of the queries.
        tools: the file of tools for lines that have none; None where no line needed it.
    """

    folder: str
    target: str
    weights: str
    random: bool
    data: str
    tools: str | None
    evaluation: Evaluation


class _Remembering:
    """A tokenizer that encodes a text once: prompts are measured first, and asked of every artifact."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        if text not in self._known:
            self._known[text] = self._inner.encode(text)
        return self._known[text]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class _Questions:
    """The queries of a file, to be asked."""

    options: EvaluationOptions
    path: Path
    tools: Path | None
    examples: tuple[Example, ...]
    data: EvaluationData

    def check(self, tokenizer: _Remembering, context: int) -> None:
        """Refuse queries that leave no room for an answer, before anything has run."""
        for example in self.examples:
            count = 1 + len(tokenizer.encode(render(example.query, example.tools, example.system)))
            if count >= context:
                raise BadInput(
                    f"its prompt has {count:,} tokens, and the build's context is {context:,}",
                    where=f"{self.data.file}: line {example.line}",
                    fix="build with a larger --context, or leave the line out",
                )

    def ask(self, runner: Any, tokenizer: _Remembering, name: str, progress: Progress,
            foreseen: Sequence[Answer] = ()) -> list[Answer]:
        """Every query's answer; ``foreseen`` are taken for granted where they turn out so."""
        assistants: dict[tuple[int, str], Assistant] = {}
        answers = []
        with progress.stage(f"ask {name}", len(self.examples)) as task:
            for index, example in enumerate(self.examples):
                key = id(example.tools), example.system
                if key not in assistants:
                    if len(assistants) == _KEPT:
                        del assistants[next(iter(assistants))]
                    assistants[key] = self._assistant(runner, tokenizer, example)
                if foreseen:
                    runner.foresee(foreseen[index].tokens)
                answers.append(assistants[key].ask(example.query))
                task.advance()
        return answers

    def _assistant(self, runner: Any, tokenizer: _Remembering, example: Example) -> Assistant:
        with naming(f"{self.data.file}: line {example.line}"):
            return Assistant(
                runner, tokenizer, example.tools, system=example.system, constrained=self.options.constrained,
                max_new_tokens=self.options.max_new_tokens,
            )  # fmt: skip


@dataclass
class _Build:
    """A published folder with what asking it needs."""

    folder: Path
    report: Report
    tokenizer: _Remembering
    context: int
    reference: _Reference | None


class _Reference:
    """The float32 reference of a build: the same rung, adapter and context."""

    def __init__(self, loaded: Loaded, context: int, threads: int) -> None:
        self.loaded, self.context, self.threads = loaded, context, threads
        self.answers: list[Answer] | None = None

    @cached_property
    def session(self) -> ReferenceSession:
        """The model, opened when it is asked first."""
        from needle_export.model.network import Needle
        from needle_export.model.session import ReferenceSession

        c = self.loaded[0]
        return ReferenceSession(Needle(c.geometry, c.tensors, c.permutations).eval(), self.context, self.threads)

    def ask(self, questions: _Questions, tokenizer: _Remembering, like: Sequence[Answer], progress: Progress) -> None:
        """Have all queries answered, if they weren't yet; its answers are mostly ``like`` these."""
        if self.answers is None:
            prefixed = PrefixRunner(self.session, self.session.max_chunk)
            runner = ForeseeingRunner(prefixed)
            self.answers = questions.ask(runner, tokenizer, "the float32 reference", progress, like)


def evaluate(folders: Sequence[Path], options: EvaluationOptions, progress: Progress) -> tuple[Evaluated, ...]:
    """Ask every artifact of published folders, and put what is counted into their reports.

    What can be refused is refused before anything runs. Each report is replaced in one step when its artifacts have
    answered; an earlier evaluation of the same data and mode gives way.

    Raises:
        BadInput: the data, the tools, a tokenizer or a report isn't one; the checkpoint isn't the build's.
        VerificationFailed: a folder's files aren't those of its report.
        UsageError: a build merged an adapter that isn't given, or an adapter is given that none merged; no data are
            given and there are none to take.
    """
    questions = _questions(folders, options)
    builds = _opened(folders, options, progress)
    for build in builds:
        questions.check(build.tokenizer, build.context)
    found = []
    for build in builds:
        artifacts = []
        for artifact in build.report.artifacts:
            evaluation = _evaluate(build, artifact, questions, progress)
            artifacts.append(replace(artifact, evaluations=with_evaluation(artifact.evaluations, evaluation)))
            random = build.report.checkpoint.random
            tools = None if questions.tools is None else str(questions.tools)
            found.append(Evaluated(str(build.folder), artifact.target, artifact.weights, random,
                                   str(questions.path), tools, evaluation))
        rewrite_report(build.folder, replace(build.report, artifacts=tuple(artifacts)))
    return tuple(found)


def _questions(folders: Sequence[Path], options: EvaluationOptions) -> _Questions:
    path = given_or_demos("--data", options.data, folders)
    data, tools = map_file(path).tobytes(), None
    with contextlib.suppress(UsageError):  # then lines have their own, or are refused
        tools = given_or_demos("--tools", options.tools, folders)
    known = None if tools is None else load_tools(tools)
    with naming(path.name):
        every = read_examples(data, known)
    examples = sample(every, options.limit)
    if all(example.own_tools for example in examples):
        tools = None  # they had no part in it
    told = EvaluationData(path.name, hashlib.sha256(data).hexdigest(), None if tools is None else file_sha256(tools),
                          len(every), len(examples))
    return _Questions(options, path, tools, examples, told)


def _opened(folders: Sequence[Path], options: EvaluationOptions, progress: Progress) -> list[_Build]:
    """Folders with their reports, tokenizers and references, each of these made once for all that share it."""
    tokenizers: dict[str, _Remembering] = {}
    references: dict[tuple[Any, ...], _Reference] = {}
    builds, merged = [], False
    for folder in folders:
        report = load_report(folder)
        merged = merged or bool(report.checkpoint.lora)
        for artifact in report.artifacts:
            check_files(folder, artifact)
        context = report.options.get("context")
        if type(context) is not int:
            raise BadInput("the report's options lack a whole number 'context'", where=str(folder), fix="build again")
        tokenizer = _tokenizer(folder, report, options.tokenizer, tokenizers)
        reference = _reference(folder, report, options, progress, references)
        builds.append(_Build(folder, report, tokenizer, context, reference))
    if options.lora is not None and not merged:
        raise UsageError("no build merged an adapter", where="--lora", fix="leave it out")
    return builds


def _tokenizer(folder: Path, report: Report, given: Path | None, known: dict[str, _Remembering]) -> _Remembering:
    path = tokenizer_path(folder, given)
    key = file_sha256(path)
    if key not in known:
        known[key] = _Remembering(load_tokenizer_of(report, path))
    return known[key]


def _reference(
    folder: Path, report: Report, options: EvaluationOptions, progress: Progress,
    known: dict[tuple[Any, ...], _Reference],
) -> _Reference | None:  # fmt: skip
    """The reference of a build; None where no checkpoint is given."""
    if options.checkpoint is None:
        return None
    told = report.checkpoint
    if told.lora and options.lora is None:
        raise UsageError("the build merged an adapter, which its reference needs too", where=str(folder),
                         fix=f"give --lora with {told.lora[0].path_name}")
    layers, context, keep = (report.options.get(k) for k in ("layers", "context", "keep_confidence"))
    key = told.sha256, told.lora, layers, context
    if key not in known:
        lora = options.lora if told.lora else None
        recipe = BuildOptions(options.checkpoint, Path("evaluate"), layers=layers, lora=lora, context=context or 0,
                              keep_confidence=bool(keep) and lora is not None)
        loaded = load(recipe, progress)
        if loaded[0].source.sha256 != told.sha256:
            raise BadInput(f"this is not the checkpoint that {folder} was built from", where=options.checkpoint,
                           fix="give the same file")
        if tuple(a.sha256 for a in loaded[1]) != tuple(a.sha256 for a in told.lora):
            raise BadInput(f"this is not the adapter that {folder} merged", where=str(options.lora),
                           fix="give the same file")
        known[key] = _Reference(loaded, recipe.context, options.threads)
    return known[key]


def _evaluate(build: _Build, artifact: Artifact, questions: _Questions, progress: Progress) -> Evaluation:
    target, options = find_target(artifact.target), questions.options
    runner = target.open(build.folder, threads=options.threads)
    name = f"{build.folder.name or build.folder} {artifact.target} {artifact.weights}"
    answers = questions.ask(PrefixRunner(runner, runner.max_chunk), build.tokenizer, name, progress)
    if build.reference is not None:
        build.reference.ask(questions, build.tokenizer, answers, progress)
    ours = target.status == "verified-by-evaluator"
    return describe(
        questions.examples,
        answers,
        None if build.reference is None else build.reference.answers,
        data=questions.data,
        constrained=options.constrained,
        max_new_tokens=options.max_new_tokens,
        runtime=f"evaluator of needle-export {__version__}" if ours else f"{target.runtime} {version(target.runtime)}",
    )


def describe(
    examples: Sequence[Example],
    answers: Sequence[Answer],
    reference: Sequence[Answer] | None,
    *,
    data: EvaluationData,
    constrained: bool,
    max_new_tokens: int,
    runtime: str,
) -> Evaluation:
    """What answers come to, for the report.

    Args:
        answers: to the examples, one each.
        reference: of the float32 reference likewise; None where it wasn't asked.
    """
    tally, own, beside = Tally(), Tally(), Agreement()
    for example, answer in zip(examples, answers, strict=True):
        tally.add(example.answers, answer)
    if reference is not None:
        for example, answer, theirs in zip(examples, answers, reference, strict=True):
            own.add(example.answers, theirs)
            beside.add(answer, theirs)
    of = tally.queries
    return Evaluation(
        data=data, constrained=constrained, max_new_tokens=max_new_tokens, runtime=runtime,
        exact_calls=proportion(tally.exact, of), tool_names=proportion(tally.names, of),
        nothing_precision=proportion(tally.rightly_nothing, tally.nothing) if tally.nothing else None,
        nothing_recall=proportion(tally.rightly_nothing, tally.to_nothing) if tally.to_nothing else None,
        invalid=proportion(tally.invalid, of), cut=proportion(tally.cut, of),
        reference=None if reference is None else ReferenceAnswers(
            proportion(own.exact, of), proportion(beside.calls, of), proportion(beside.tokens, of)),
        reference_why=NO_REFERENCE if reference is None else "",
    )  # fmt: skip


def proportion(count: int, of: int) -> Proportion:
    """A share with its interval."""
    return Proportion(count, of, count / of, *wilson(count, of))
