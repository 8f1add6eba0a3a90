"""What lies beside a build for an app: the manifest, the tokenizer, and a loop that needs nothing of this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needle_export import appfiles, demo, pipeline
from needle_export.checkpoint.files import file_sha256
from needle_export.checkpoint.sample import write_sample
from needle_export.checkpoint.text import load_tokenizer
from needle_export.companions import load_tools
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.errors import BadInput, UsageError, VerificationFailed
from needle_export.generate.assistant import Assistant
from needle_export.report.manifest import MANIFEST_NAME, load_manifest
from needle_export.report.schema import REPORT_NAME, load_report
from needle_export.targets import find_target
from needle_export.targets.coreml.target import CoremlTarget
from tests.support import fake_coreml
from tests.support.containers import tokenizer_blob
from tests.support.demo_builds import CONTEXT, LAYERS, WEIGHTS, DemoBuilds
from tests.support.geometries import SMALL

MODEL = demo.files()
QUERIES = ["turn on the kitchen lights", "set a pasta timer for ten minutes and lock the front door", "what's 2 + 2"]
QUIET = NullProgress()

TARGETS = ["onnx", "tflite", "coreml"]


@pytest.fixture(scope="module")
def builds(demos: DemoBuilds) -> dict[str, Path]:
    return {target: demos.get(target) for target in TARGETS}


def alone(dist: Path, code: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What a Python says that finds the build's folder, and can't import this package.

    Args:
        env: that brings the stand-in for coremltools' model class, which is made of this package: it can then.
    """
    begin = f"import sys\nsys.path.insert(0, {str(dist)!r})\n"
    begin += "" if env else "sys.modules['needle_export'] = None\n"
    done = subprocess.run([sys.executable, "-c", begin + code, *arguments], capture_output=True, text=True, check=False,
                          env=env)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_the_manifest_lists_what_lies_there(builds: dict[str, Path], target: str) -> None:
    dist = builds[target]
    manifest, report = load_manifest(dist), load_report(dist)
    (artifact,) = report.artifacts
    there = {p.relative_to(dist).as_posix() for p in dist.rglob("*") if p.is_file()}
    assert {f.name for f in manifest.files} == there - {MANIFEST_NAME, REPORT_NAME, pipeline.REFERENCE_NAME}
    for file in manifest.files:
        assert (file.bytes, file.sha256) == ((dist / file.name).stat().st_size, file_sha256(dist / file.name))
    model = {f.name for f in manifest.files if f.role == "model"}
    assert model == {f.name for f in artifact.files}
    assert {f.name for f in manifest.files if f.role == "tokenizer"} == {"tokenizer.model"}
    assert {f.name for f in manifest.files if f.role == "decoder"} == {"loop.py", "decoder.py"}
    assert (dist / "tokenizer.model").read_bytes() == MODEL.tokenizer.read_bytes()
    assert report.options["tokenizer"] == {"name": "tokenizer.model", "source": "beside"}
    assert (manifest.target, manifest.weights, manifest.context) == (target, WEIGHTS, CONTEXT)
    assert manifest.checkpoint.layers == LAYERS
    assert manifest.io == artifact.io and manifest.checkpoint == report.checkpoint
    assert manifest.checkpoint.sha256 == file_sha256(MODEL.checkpoint)
    # Beside the model, not of it.
    assert artifact.size.total_bytes == sum(f.bytes for f in manifest.files if f.role == "model")


def test_the_manifest_is_the_tokenizers_and_the_prompts(builds: dict[str, Path]) -> None:
    manifest, tokenizer = load_manifest(builds["onnx"]), load_tokenizer(MODEL.tokenizer)
    ids = manifest.special_ids
    assert (ids.pad, ids.eos, ids.bos, ids.unk) == (0, 1, 2, 3)
    assert len(ids.markers) == 16 and all(tokenizer.marker(text) == token for text, token in ids.markers.items())
    assert manifest.generation.stop == (tokenizer.marker("<|im_end|>"), tokenizer.eos_id)
    assert manifest.tokenizer is not None and manifest.tokenizer.pieces == tokenizer.vocab_size
    for field in ("add_dummy_prefix", "byte_fallback", "remove_extra_whitespaces"):
        assert getattr(manifest.tokenizer, field) == getattr(tokenizer.table, field)


@pytest.mark.parametrize("target", TARGETS)
def test_a_host_finds_in_it_what_the_files_say_themselves(builds: dict[str, Path], target: str) -> None:
    """The contract that rides in the files, which verification goes by, and the manifest's are the same."""
    io, dist = load_manifest(builds[target]).io, builds[target]
    if target == "onnx":
        import onnx

        held = {p.key: p.value for p in onnx.load(str(dist / "decode.onnx"), load_external_data=False).metadata_props}
        assert json.loads(held["needle.state"]) == io["state"]
        assert (int(held["needle.context"]), int(held["needle.max_chunk"])) == (io["context"], io["max_chunk"])
        return
    if target == "tflite":
        from needle_export.targets.tflite.analysis import metadata

        contract = json.loads(metadata(dist / "model.tflite", "needle.contract") or "")
    else:
        from needle_export.targets.coreml.evaluate import load_package

        contract = json.loads(load_package(dist / "model.mlpackage").metadata["needle.contract"])
    own = {key: value for key, value in contract.items() if not key.startswith("needle.")}
    assert own and all(io[key] == value for key, value in own.items()), own.keys()


@pytest.mark.parametrize("target", TARGETS)
def test_the_loop_answers_as_this_package_does(builds: dict[str, Path], target: str, tmp_path: Path) -> None:
    dist = builds[target]
    env = {"PATH": "/usr/bin:/bin", **fake_coreml.site(tmp_path)} if target == "coreml" else None
    code = (
        "import json\nfrom pathlib import Path\nimport loop\n"
        "model = loop.Model(Path(sys.argv[1]))\n"
        "tools = loop.flat(json.loads(Path(sys.argv[2]).read_text('utf-8')))\n"
        "found = []\n"
        "for query in sys.argv[3:]:\n"
        "    prompt = model.prompt(query, tools, ' Be brief. ' if query == sys.argv[3] else '')\n"
        "    tokens = list(model.decode(prompt))\n"
        "    found.append([prompt, tokens, model.calls(model.tokenizer.decode(tokens))])\n"
        "print(json.dumps(found))\n"
    )
    queries = QUERIES if target != "coreml" else QUERIES[:1]
    found = json.loads(alone(dist, code, str(dist), str(MODEL.tools), *queries, env=env))
    tools, tokenizer = load_tools(MODEL.tools), load_tokenizer(MODEL.tokenizer)
    # Core ML's stand-in rounds every op to its type, as the loop's runtime does.
    runner: Any = CoremlTarget().rounded(dist) if target == "coreml" else find_target(target).open(dist)
    called = 0
    for number, (query, (prompt, tokens, calls)) in enumerate(zip(queries, found, strict=True)):
        asked = Assistant(runner, tokenizer, tools, system="" if number else "Be brief.", constrained=False)
        answer = asked.ask(query)
        assert len(prompt) == answer.prompt_tokens and tuple(tokens) == answer.tokens
        assert calls == (None if answer.calls is None else [vars(call) for call in answer.calls])
        called += len(calls or ())
    assert called, "no request was answered with a call, so nothing was compared"


def test_the_loop_is_a_program(builds: dict[str, Path]) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, builds["onnx"] / "loop.py", *arguments], capture_output=True, text=True,
                              check=False)  # fmt: skip

    done = run("--tools", str(MODEL.tools), QUERIES[0])
    assert done.returncode == 0 and done.stdout.startswith("<tool_call>["), done.stderr
    absent = run("--tools", "nowhere.json", QUERIES[0])
    assert absent.returncode == 1 and "nowhere.json" in absent.stderr and "Traceback" not in absent.stderr


def test_the_loop_is_cut_where_the_context_ends(builds: dict[str, Path]) -> None:
    code = (
        "from pathlib import Path\nimport loop\n"
        "model = loop.Model(Path(sys.argv[1]))\n"
        "model.manifest['generation']['stop'] = []\n"
        f"print(len(list(model.decode([2] * {CONTEXT - 12}))))\n"
        f"try:\n    list(model.decode([2] * {CONTEXT}))\n"
        "except ValueError as fault:\n    print(fault)\n"
    )
    assert alone(builds["onnx"], code, str(builds["onnx"])).splitlines() == [
        "13", f"the prompt has {CONTEXT} tokens, and the context holds {CONTEXT}"]  # fmt: skip


@pytest.mark.parametrize("name", ["loop.py", "tokenizer.model", MANIFEST_NAME])
@pytest.mark.parametrize("change", ["missing", "changed"])
def test_verify_looks_at_it(builds: dict[str, Path], tmp_path: Path, name: str, change: str) -> None:
    import shutil

    dist = tmp_path / "dist"
    shutil.copytree(builds["onnx"], dist)
    if change == "missing":
        (dist / name).unlink()
    elif name == MANIFEST_NAME:
        (dist / name).write_text("{}")
    else:
        (dist / name).write_bytes((dist / name).read_bytes() + b"\n")
    with pytest.raises((VerificationFailed, BadInput)) as refusal:
        pipeline.verify(dist, checkpoint=None, progress=QUIET)
    assert name in refusal.value.sentence


def small(folder: Path, **changes: Any) -> BuildOptions:
    write_sample(folder / "s.safetensors", SMALL, 0)
    return BuildOptions(str(folder / "s.safetensors"), folder / "dist", context=32, bench=False, **changes)


def test_without_a_tokenizer_the_build_says_so(tmp_path: Path) -> None:
    report = pipeline.build(small(tmp_path), QUIET)
    manifest = load_manifest(tmp_path / "dist")
    assert manifest.tokenizer is None and manifest.special_ids.markers == {} and manifest.special_ids.bos == 2
    assert manifest.generation.stop == (1,)
    assert report.options["tokenizer"] is None and appfiles.NO_TOKENIZER in report.artifacts[0].notes
    assert {f.role for f in manifest.files} == {"model", "decoder"}
    done = subprocess.run([sys.executable, tmp_path / "dist" / "loop.py", "--tools", str(MODEL.tools), "hello"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1 and "no SentencePiece model lies beside this build" in done.stderr


def test_a_tokenizer_that_is_given_wins_over_the_one_beside(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    given = tmp_path / "mine.model"
    given.write_bytes(small_model())
    report = pipeline.build(small(tmp_path, tokenizer=str(given)), QUIET)
    assert report.options["tokenizer"] == {"name": "mine.model", "source": "given"}
    assert (tmp_path / "dist" / "tokenizer.model").read_bytes() == given.read_bytes()
    # The next build, which is given none, doesn't leave it there.
    (tmp_path / "tokenizer.model").unlink()
    pipeline.build(small(tmp_path), QUIET)
    assert not (tmp_path / "dist" / "tokenizer.model").exists()


def small_model() -> bytes:
    from needle_export.checkpoint.sentencepiece_file import write_model
    from needle_export.checkpoint.tokenizer import parse_tokenizer

    return write_model(parse_tokenizer(tokenizer_blob(a_byte=False)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"damaged", "SentencePiece can't read it"),
        (MODEL.tokenizer.read_bytes(), "has 1024 pieces, and the model knows"),
        (None, "no such file"),
    ],
)
def test_a_wrong_tokenizer_is_refused_before_anything_is_built(tmp_path: Path, data: bytes | None, said: str) -> None:
    path = tmp_path / "mine.model"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(BadInput) as refusal:
        pipeline.build(small(tmp_path, tokenizer=str(path)), QUIET)
    assert said in refusal.value.sentence and "mine.model" in refusal.value.sentence
    assert not (tmp_path / "dist").exists()


def test_somebodys_own_tokenizer_in_the_folder_is_not_deleted(tmp_path: Path) -> None:
    options = small(tmp_path)
    pipeline.build(options, QUIET)
    own = tmp_path / "dist" / "tokenizer.model"
    own.write_bytes(small_model())
    with pytest.raises(UsageError, match=r"tokenizer\.model, which no build of this tool made"):
        pipeline.build(options, QUIET)
    assert own.read_bytes() == small_model()


def test_a_containers_tokenizer_lies_there_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from needle_export import loading

    blob = tokenizer_blob(a_byte=False)
    read = loading.read_checkpoint

    def with_tokenizer(path: Path) -> Any:
        import dataclasses

        return dataclasses.replace(read(path), tokenizer=blob)

    monkeypatch.setattr(loading, "read_checkpoint", with_tokenizer)
    pipeline.build(small(tmp_path), QUIET)
    dist = tmp_path / "dist"
    manifest = load_manifest(dist)
    assert manifest.tokenizer is not None
    assert (manifest.tokenizer.file, manifest.tokenizer.dump) == ("tokenizer.model", "tokenizer.bin")
    assert manifest.tokenizer.source == "container" and (dist / "tokenizer.bin").read_bytes() == blob
    assert load_tokenizer(dist / "tokenizer.model").table == load_tokenizer(blob).table
    np.testing.assert_equal(manifest.tokenizer.pieces, len(load_tokenizer(blob).table.pieces))
    pipeline.verify(dist, checkpoint=None, progress=QUIET)
    # The model knows more tokens than the tokenizer has pieces, and answers with some of them: no text, and no crash.
    code = (
        "from pathlib import Path\nimport loop\nmodel = loop.Model(Path(sys.argv[1]))\n"
        "tokens = list(model.decode(model.prompt('w7 w8', [])))\n"
        "print(max(tokens) >= model.manifest['tokenizer']['pieces'], len(model.answer('w7 w8', [])) > 0)\n"
    )
    assert alone(dist, code, str(dist)).split() == ["True", "True"]
    # A table that SentencePiece can't hold is there as it is: here one with a single byte.
    blob = tokenizer_blob()
    pipeline.build(small(tmp_path), QUIET)
    manifest = load_manifest(dist)
    assert manifest.tokenizer is not None and manifest.tokenizer.format == "dump"
    assert manifest.tokenizer.file == manifest.tokenizer.dump == "tokenizer.bin"
    assert not (dist / "tokenizer.model").exists()
