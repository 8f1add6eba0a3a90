"""Published folders are asked and their reports rewritten; what can be refused is, before anything runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from needle_export import companions, demo, evaluation
from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample
from needle_export.checkpoint.text import load_tokenizer
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, NeedleExportError, UsageError, VerificationFailed
from needle_export.evaluation import EvaluationOptions, evaluate
from needle_export.report.schema import REPORT_NAME, AdapterInfo, dump_report, load_report
from tests.support.reports import write_artifact
from tests.support.scripted import END, ByteTokenizer, ScriptedRunner, answer_of

TOOLS = [{"name": "lights", "description": "Switch lights", "parameters": {
    "type": "object", "properties": {"room": {"type": "string"}, "level": {"type": "integer"}}, "required": ["room"]}},
    {"name": "play", "parameters": {"type": "object", "properties": {}}}]
HALL = ("lights", {"room": "hall", "level": 3})

#: Query: the calls that are right, and what the model says.
SCRIPT = {
    "right": ([HALL], answer_of(HALL)),
    "other order of keys": ([("lights", {"level": 3, "room": "hall"})], answer_of(HALL)),
    "wrong room": ([HALL], answer_of(("lights", {"room": "attic"}))),
    "wrong tool": ([HALL], answer_of(("play", {}))),
    "rightly nothing": ([], answer_of()),
    "wrongly nothing": ([HALL], answer_of()),
    "nothing was right": ([], answer_of(("play", {}))),
    "two": ([HALL, ("play", {})], answer_of(HALL, ("play", {}))),
}
LOOSE = {
    "no calls": ([HALL], f"I can't{END}"),
    "cut": ([HALL], answer_of(("lights", {"room": "x" * 300}))),
}

Folder = Callable[..., Path]


def line(query: str, calls: list[tuple[str, dict[str, Any]]], **more: Any) -> str:
    return json.dumps({"query": query, "answers": [{"name": n, "arguments": a} for n, a in calls], **more})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "heldout.jsonl"
    path.write_text("\n".join(line(q, calls) for q, (calls, _) in SCRIPT.items()) + "\n")
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    return path


class Target:
    """What the commands ask of a target."""

    status, runtime = "verified-on-runtime", "onnxruntime"

    def __init__(self) -> None:
        self.runners: list[ScriptedRunner] = []
        self.script = {query: said for query, (_, said) in {**SCRIPT, **LOOSE}.items()}

    def open(self, folder: Path, *, threads: int = 1) -> ScriptedRunner:
        self.runners.append(ScriptedRunner(self.script))
        return self.runners[-1]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    made = Target()
    monkeypatch.setattr(evaluation, "find_target", lambda name: made)
    monkeypatch.setattr(evaluation, "version", lambda name: "9.9")
    monkeypatch.setattr(companions, "load_tokenizer", lambda path, most: ByteTokenizer())
    return made


@pytest.fixture
def build(tmp_path: Path) -> Folder:
    """Writes a published folder whose report says what is asked for."""

    def write(name: str = "dist", context: int = 2048, **checkpoint: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_artifact(folder)
        report = load_report(folder)
        report = dataclasses.replace(
            report,
            checkpoint=dataclasses.replace(
                report.checkpoint, geometry={"vocab_size": ByteTokenizer.vocab_size}, lora=(), **checkpoint),
            options={**report.options, "context": context, "layers": None},
            artifacts=(dataclasses.replace(report.artifacts[0], evaluations=()),))
        (folder / REPORT_NAME).write_bytes(dump_report(report))
        (folder / "tokenizer.model").write_bytes(b"bytes")
        return folder

    return write


def asked(folders: list[Path], data: Path, **changes: Any) -> tuple[evaluation.Evaluated, ...]:
    options = EvaluationOptions(data, **{"tools": data.with_name("tools.json"), **changes})
    return evaluate(folders, options, NullProgress())


def test_everything_is_counted_and_goes_into_the_report(target: Target, build: Folder, data: Path) -> None:
    dist = build()
    before = load_report(dist)
    (found,) = asked([dist], data)
    e = found.evaluation
    assert (e.exact_calls.count, e.exact_calls.of) == (4, 8)
    assert (e.tool_names.count, e.invalid.count, e.cut.count) == (5, 0, 0)
    assert e.nothing_precision is not None and (e.nothing_precision.count, e.nothing_precision.of) == (1, 2)
    assert e.nothing_recall is not None and (e.nothing_recall.count, e.nothing_recall.of) == (1, 2)
    assert (e.data.file, e.data.lines, e.data.queries) == ("heldout.jsonl", 8, 8)
    assert e.data.sha256 == hashlib.sha256(data.read_bytes()).hexdigest()
    assert e.data.tools_sha256 == hashlib.sha256(data.with_name("tools.json").read_bytes()).hexdigest()
    assert (e.constrained, e.max_new_tokens, e.runtime) == (True, 256, "onnxruntime 9.9")
    assert e.reference is None and "no --checkpoint" in e.reference_why
    after = load_report(dist)
    assert after.artifacts[0].evaluations == (e,)
    emptied = dataclasses.replace(after.artifacts[0], evaluations=())
    assert dataclasses.replace(after, artifacts=(emptied,)) == before


def test_without_the_grammar_answers_may_be_none_or_endless(target: Target, build: Folder, data: Path) -> None:
    data.write_text("\n".join(line(q, calls) for q, (calls, _) in {**SCRIPT, **LOOSE}.items()))
    (found,) = asked([build()], data, constrained=False, max_new_tokens=200)
    e = found.evaluation
    assert (e.exact_calls.count, e.invalid.count, e.cut.count, e.data.queries) == (4, 1, 1, 10)


def test_a_new_evaluation_takes_the_place_of_the_same(target: Target, build: Folder, data: Path) -> None:
    dist = build()
    asked([dist], data)
    asked([dist], data, limit=5)
    asked([dist], data, constrained=False)
    first = load_report(dist).artifacts[0].evaluations
    assert [(e.data.queries, e.constrained) for e in first] == [(8, True), (5, True), (8, False)]
    target.script["right"] = answer_of()
    asked([dist], data)
    second = load_report(dist).artifacts[0].evaluations
    assert second[1:] == first[1:] and second[0].exact_calls.count == first[0].exact_calls.count - 1


def test_several_folders_and_lines_with_tools_of_their_own(target: Target, build: Folder, data: Path) -> None:
    data.write_text("\n".join(line(q, calls, tools=TOOLS) for q, (calls, _) in SCRIPT.items()))
    found = asked([build("a"), build("b")], data)
    assert [Path(f.folder).name for f in found] == ["a", "b"] and len(target.runners) == 2
    assert {f.evaluation.data.tools_sha256 for f in found} == {None}  # the file had no part in it
    assert found[0].evaluation == found[1].evaluation


@pytest.mark.parametrize(("spoil", "kind", "sentence"), [
    (lambda dist, data: data.write_text("{"), BadInput, "heldout.jsonl: line 1: it isn't JSON"),
    (lambda dist, data: data.unlink(), BadInput, "there is no such file"),
    (lambda dist, data: data.with_name("tools.json").write_text("["), BadInput, "this isn't JSON"),
    (lambda dist, data: data.with_name("tools.json").write_text("[{}]"), BadInput, "tools.json"),
    (lambda dist, data: (dist / "tokenizer.model").unlink(), BadInput, "no tokenizer lies beside this build"),
    (lambda dist, data: (dist / "model.onnx").write_bytes(b"x"), VerificationFailed, "not the file that the report"),
    (lambda dist, data: data.write_text(line("x" * 2000, [])), BadInput,
     "heldout.jsonl: line 1: its prompt has 2,253 tokens"),
])
def test_what_is_refused_is_refused_before_anything_runs(
    spoil: Callable[[Path, Path], Any], kind: type[NeedleExportError], sentence: str, target: Target, build: Folder,
    data: Path,
) -> None:
    fine, dist = build("fine"), build()
    before = (dist / REPORT_NAME).read_bytes(), (fine / REPORT_NAME).read_bytes()
    spoil(dist, data)
    with pytest.raises(kind) as caught:
        asked([fine, dist], data)
    assert sentence in caught.value.sentence
    assert not target.runners
    assert ((dist / REPORT_NAME).read_bytes(), (fine / REPORT_NAME).read_bytes()) == before


def test_a_tokenizer_of_another_model_is_refused(
    target: Target, build: Folder, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companions, "load_tokenizer", load_tokenizer)
    dist = build()
    shutil.copyfile(demo.files().tokenizer, dist / "tokenizer.model")
    report = load_report(dist)
    other = dataclasses.replace(report, checkpoint=dataclasses.replace(report.checkpoint, geometry={"vocab_size": 9}))
    (dist / REPORT_NAME).write_bytes(dump_report(other))
    with pytest.raises(BadInput, match="the tokenizer has 1024 pieces, and the model knows 9 tokens"):
        asked([dist], data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    write_sample(path, dataclasses.replace(SMALL, vocab_size=ByteTokenizer.vocab_size, max_seq_len=2048), 0)
    return path


def test_beside_the_float_reference(target: Target, build: Folder, data: Path, checkpoint: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds of one checkpoint: the reference answers once, whoever is asked first."""
    reference = ScriptedRunner({**target.script, "right": answer_of(("play", {}))})
    monkeypatch.setattr(evaluation._Reference, "session", reference)
    sha256 = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    folders = [build("a", sha256=sha256), build("b", sha256=sha256)]
    first, second = (f.evaluation for f in asked(folders, data, checkpoint=str(checkpoint)))
    assert first == second and first.reference is not None and not first.reference_why
    assert [p.count for p in vars(first.reference).values()] == [3, 7, 7]
    assert reference.asked == len(SCRIPT)


def test_the_reference_is_the_builds(target: Target, build: Folder, data: Path, checkpoint: Path,
                                     tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"this is not the checkpoint that .*other was built from"):
        asked([build("other")], data, checkpoint=str(checkpoint))
    dist = build("dist", sha256=hashlib.sha256(checkpoint.read_bytes()).hexdigest())
    with pytest.raises(UsageError, match="--lora: no build merged an adapter"):
        asked([dist], data, checkpoint=str(checkpoint), lora="l.safetensors")
    with pytest.raises(UsageError, match="--lora: an adapter is merged into a checkpoint"):
        EvaluationOptions(data, lora="l.safetensors")
    report = load_report(dist)
    merged = dataclasses.replace(report.checkpoint, lora=(AdapterInfo("home.safetensors", "b" * 64),))
    (dist / REPORT_NAME).write_bytes(dump_report(dataclasses.replace(report, checkpoint=merged)))
    with pytest.raises(UsageError, match="the build merged an adapter, which its reference needs too"):
        asked([dist], data, checkpoint=str(checkpoint))
    assert not target.runners


def test_the_real_reference_answers_too(target: Target, build: Folder, data: Path, checkpoint: Path) -> None:
    """A random model within the grammar: whatever it calls, it isn't what was written down."""
    dist = build("dist", sha256=hashlib.sha256(checkpoint.read_bytes()).hexdigest())
    (found,) = asked([dist], data, checkpoint=str(checkpoint), limit=2, max_new_tokens=12)
    assert found.evaluation.reference is not None
    assert found.evaluation.reference.same_tokens.of == 2
