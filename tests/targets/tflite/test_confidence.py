"""Probe heads in a TFLite file: fed by decode and by padded prefills, asked through a signature of their own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from needle_export.checkpoint.geometry import SMALL, Geometry
from needle_export.compile import Compiler
from needle_export.config.progress import NullProgress
from needle_export.config.rules import Rules
from needle_export.targets.ports import CONTRACT_KEY, entry_name
from needle_export.targets.tflite import contract
from needle_export.targets.tflite.analysis import count_ops, metadata, partitions, read_graph
from needle_export.targets.tflite.session import Loop
from tests.support.geometries import ALL_HEADS
from tests.support.models import tokens_for
from tests.support.programs import sample_checkpoint

pytest.importorskip("litert_converter")
interpreters = pytest.importorskip("ai_edge_litert.interpreter")

CONTEXT, BUCKET = 32, 8
#: The largest difference seen is 4e-7.
BAR = 1e-5

Built = tuple[Compiler, Path]


def build(folder: Path, geometry: Geometry, heads: tuple[str, ...], *, scheme: str = "fp32") -> Built:
    from needle_export.targets.tflite.lower import exporter
    from needle_export.targets.tflite.prepare import prepare

    compiler = Compiler(sample_checkpoint(folder, geometry), CONTEXT, NullProgress(), heads)
    compiler.fold_into_matrices = scheme == "fp32"
    states, vocab, path = compiler.states, geometry.head_vocab, folder / contract.FILE_NAME
    with exporter(Rules(scheme)) as target:
        for rows in (1, BUCKET):
            program = compiler.program(rows)
            prepare(program, scheme == "fp32")
            name = entry_name(rows)
            ports = contract.input_ports(states, rows), contract.output_ports(states, vocab, rows)
            target.add(name, program, rows, *ports)
        for head in heads:
            program = compiler.head_program(head)
            answers = contract.head_outputs(head, program.output_shape(head))
            target.add(head, program, 0, contract.head_inputs(states, program.inputs), answers)
        target.write(path, contract.contract_json(states, vocab, CONTEXT, (BUCKET,), {}))
    return compiler, path


def opened(path: Path) -> Loop:
    described = json.loads(metadata(path, CONTRACT_KEY) or "")
    return Loop(interpreters.Interpreter(str(path), num_threads=1), described)


def feed(loop: Loop, tokens: np.ndarray, calls: tuple[int, ...], seen: Callable[[int], None]) -> None:
    """Feed tokens in calls of these many (1: decode, else a bucket with padding behind) and look after each."""
    for count in calls:
        piece = tokens[loop.position : loop.position + count]
        if count == 1:
            loop.decode(int(piece[0]))
        else:
            loop.chunk(piece, BUCKET)
        seen(loop.position)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("confidence"), SMALL, ("confidence",))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Built:
    heads = ("confidence", "embedding", "router")
    return build(tmp_path_factory.mktemp("heads"), dataclasses.replace(SMALL, heads=ALL_HEADS), heads)


def expected(compiler: Compiler, head: str, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = compiler.net.head(head, torch.from_numpy(tokens)).numpy()
    return found


@pytest.mark.parametrize("calls", [(8, 5, 1, 1, 3, 1, 1), (1, 1, 1, 7, 8), (5, 1)], ids=str)
def test_it_follows_the_sequence(built: Built, calls: tuple[int, ...]) -> None:
    compiler, path = built
    tokens, loop, answers = tokens_for(SMALL, CONTEXT)[0], opened(path), []

    def look(position: int) -> None:
        answers.append(loop.confidence())
        assert answers[-1].shape == (1,)
        assert np.abs(answers[-1] - expected(compiler, "confidence", tokens[:position])).max() <= BAR

    feed(loop, tokens, calls, look)
    # It says something else each time, by far more than the bar.
    assert np.diff(np.sort(np.concatenate(answers))).min() > 10 * BAR
    loop.reset()
    answers.clear()
    feed(loop, tokens[::-1], (5, 1), lambda position: answers.append(loop.confidence()))
    assert np.abs(answers[-1] - expected(compiler, "confidence", tokens[::-1][:6].copy())).max() <= BAR


def test_asking_changes_nothing(built: Built) -> None:
    _, path = built
    tokens, asked, silent = tokens_for(SMALL, CONTEXT)[0], opened(path), opened(path)
    feed(asked, tokens, (5, 1, 1, 1), lambda _: asked.confidence())
    feed(silent, tokens, (5, 1, 1, 1), lambda _: None)
    assert np.array_equal(asked.confidence(), asked.confidence())
    assert np.array_equal(asked.decode(3), silent.decode(3))
    assert np.array_equal(asked.confidence(), silent.confidence())


def test_padding_would_show(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the count were ignored, or wrong, the answer would differ by more than rounding."""
    compiler, path = built
    tokens, loop = tokens_for(SMALL, CONTEXT)[0], opened(path)
    want = expected(compiler, "confidence", tokens[:5])
    loop.chunk(tokens[:5], BUCKET)
    assert np.abs(loop.confidence() - want).max() <= BAR
    real = loop.interpreter.get_signature_runner

    def counting_all(name: str) -> Any:
        return lambda **given: real(name)(**{**given, "count": np.array([BUCKET], np.int32)})

    monkeypatch.setattr(loop.interpreter, "get_signature_runner", counting_all)
    loop.reset()
    loop.chunk(tokens[:5], BUCKET)
    monkeypatch.undo()
    assert np.abs(loop.confidence() - want).max() > 100 * BAR


def test_logits_are_those_of_the_model(built: Built) -> None:
    compiler, path = built
    tokens, loop = tokens_for(SMALL, 20)[0], opened(path)
    with torch.inference_mode():
        want = compiler.net(torch.from_numpy(tokens)[None])[0].numpy()
    assert np.abs(loop.feed(tokens) - want).max() <= 1e-4


@pytest.mark.parametrize("head", ["confidence", "embedding", "router"])
def test_every_head_by_its_name(three: Built, head: str) -> None:
    compiler, path = three
    tokens, loop = tokens_for(SMALL, CONTEXT)[0], opened(path)

    def look(position: int) -> None:
        assert np.abs(loop.head(head) - expected(compiler, head, tokens[:position])).max() <= BAR

    feed(loop, tokens, (6, 1, 8, 1), look)


def test_what_is_not_there_is_refused(built: Built) -> None:
    loop = opened(built[1])
    with pytest.raises(ValueError, match="no router head; it has: confidence"):
        loop.head("router")
    with pytest.raises(ValueError, match="before the first token"):
        loop.confidence()


def test_the_contract_tells_a_host_what_to_do(built: Built) -> None:
    compiler, path = built
    described = json.loads(metadata(path, CONTRACT_KEY) or "")
    assert described["heads"] == ["confidence"]
    states = {s["name"]: s for s in described["state"] if s["kind"] == "replace"}
    assert {n: (s["rows"], s["index"], s["initial"]) for n, s in states.items()} == {
        "probe_confidence_max": ("probe_confidence_max_next", -1, -1e9),
        "probe_confidence_sum": ("probe_confidence_sum_next", -1, 0),
        "probe_confidence_pool": ("probe_confidence_pool_next", -1, 0),
    }
    assert all(s["initial"] == 0 for s in described["state"] if s["kind"] != "replace")
    interpreter = interpreters.Interpreter(str(path))
    signatures = interpreter.get_signature_list()
    assert "count" in signatures["prefill_8"]["inputs"]
    assert "count" not in signatures["decode"]["inputs"]
    assert sorted(signatures["confidence"]["inputs"]) == ["probe_confidence_pool", "probe_confidence_sum"]
    assert signatures["confidence"]["outputs"] == ["confidence"]
    for rows, name in ((1, "decode"), (BUCKET, "prefill_8")):
        ports = contract.input_ports(compiler.states, rows)
        assert sorted(signatures[name]["inputs"]) == sorted(p.name for p in ports)
        assert sorted(signatures[name]["outputs"]) == sorted(
            p.name for p in contract.output_ports(compiler.states, SMALL.head_vocab, rows)
        )


def test_what_it_costs(built: Built, tmp_path: Path) -> None:
    """A head adds no cut to a step, and no op that XNNPACK leaves, but for the mask of padding."""
    _, path = built
    _, plain = build(tmp_path, SMALL, ())
    graphs = {g.name: g for g in read_graph(path)}
    without = {g.name: g for g in read_graph(plain)}
    more = {n: len(graphs[n].ops) - len(without[n].ops) for n in without}
    # L - 2 = 1 mean (that before the last block is the logits' too), one join, and what any depth needs.
    assert more == {"decode": 1 + 1 + 13, "prefill_8": 1 + 1 + 17}
    for name, left in (("decode", 0), ("prefill_8", 2)):
        cut, before = partitions(path, name), partitions(plain, name)
        assert cut.count == before.count
        assert more[name] - (cut.delegated_ops - before.delegated_ops) == left
    assert partitions(path, "confidence").count == 1
    assert partitions(path, "confidence").left == ()
    assert all(len(t.shape) <= 4 for g in graphs.values() for t in g.tensors)
    assert not {"BROADCAST_TO", "GATHER_ND"} & {op for g in graphs.values() for op in count_ops(g)}
    assert "confidence" not in without
    assert json.loads(metadata(plain, CONTRACT_KEY) or "")["heads"] == []
    assert "count" not in interpreters.Interpreter(str(plain)).get_signature_list()["prefill_8"]["inputs"]


@pytest.mark.parametrize("scheme", ["fp16", "int8"])
def test_other_schemes_keep_the_head_in_float(tmp_path: Path, scheme: str) -> None:
    compiler, path = build(tmp_path, SMALL, ("confidence",), scheme=scheme)
    tokens, loop = tokens_for(SMALL, CONTEXT)[0], opened(path)
    feed(loop, tokens, (8, 5, 1, 1), lambda _: None)
    # The hidden states are another scheme's; the head itself adds nothing to that.
    assert np.abs(loop.confidence() - expected(compiler, "confidence", tokens[:15])).max() < 0.05
    states = {s.name: torch.from_numpy(loop.inputs[s.name].copy()) for s in compiler.states if s.head}
    with torch.inference_mode():
        want = compiler.net.answer("confidence", states).numpy()
    assert np.abs(loop.confidence() - want).max() <= BAR
