"""Reports and published folders to test with, without building anything."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from needle_export.checkpoint.dimensions import SMALL
from needle_export.checkpoint.layout import parameter_count
from needle_export.report.elsewhere import EstimateParts, ImportedLatency, LatencyEstimate, PrefillEstimate
from needle_export.report.evaluation import Evaluation, EvaluationData, Proportion, ReferenceAnswers
from needle_export.report.measured import DecodeLatency, Latency, Loaded, Memory, PrefillLatency
from needle_export.report.schema import (
    REPORT_NAME,
    SCHEMA,
    AdapterInfo,
    Artifact,
    CheckpointInfo,
    FileInfo,
    Fusion,
    KeptFloat,
    LeftToRuntime,
    LeftUnfused,
    LintNote,
    Nodes,
    PlanInfo,
    Report,
    RuntimeCheck,
    Signature,
    StateBytes,
    Tool,
    dump_report,
)
from needle_export.report.sizes import Size, TensorBytes

FILES = {"model.onnx": b"graph" * 20, "model.onnx.data": bytes(range(256)) * 8}


def make_size(total: int, by_role: Mapping[str, int], compressed: int | None = None) -> Size:
    """Of files of ``total`` bytes, nine tenths of them when packed; a tensor for each role, in three blocks."""
    tensors = (TensorBytes(f"stack/{role}/kernel", role, count, (count // 2, count // 4, count // 4))
               for role, count in by_role.items())
    return Size(total, total * 9 // 10 if compressed is None else compressed, dict(by_role),
                total - sum(by_role.values()), tuple(tensors))


def make_share(count: int, of: int) -> Proportion:
    """A share, with an interval of one hundredth to both sides."""
    share = count / of
    return Proportion(count, of, share, max(0.0, share - 0.01), min(1.0, share + 0.01))


def make_evaluation(exact: int = 180, queries: int = 200, **changes: Any) -> Evaluation:
    """Answers to all queries of a file, a tenth of which call for nothing."""
    made = Evaluation(
        data=EvaluationData("heldout.jsonl", "f" * 64, "c" * 64, queries, queries), constrained=True,
        max_new_tokens=256, runtime="onnxruntime 1.32.0", exact_calls=make_share(exact, queries),
        tool_names=make_share(exact + 10, queries), nothing_precision=make_share(18, 24),
        nothing_recall=make_share(18, 20), invalid=make_share(0, queries), cut=make_share(3, queries),
        reference=ReferenceAnswers(make_share(exact + 2, queries), make_share(queries - 5, queries),
                                   make_share(queries - 10, queries)),
        reference_why="")
    return dataclasses.replace(made, **changes)


def make_artifact(files: Mapping[str, bytes] = FILES, **changes: Any) -> Artifact:
    """An artifact with something in every field."""
    total = sum(len(data) for data in files.values())
    routing, content = total // 4, total // 2
    artifact = Artifact(
        target="onnx", weights="fp32", status="verified-on-runtime",
        files=tuple(FileInfo(name, len(data), hashlib.sha256(data).hexdigest())
                    for name, data in files.items()),
        size=make_size(total, {"routing": routing, "content": content}),
        fusion={"rms_norm": Fusion(12, 12),
                "attention": Fusion(3, 2, (LeftUnfused(1, "sdpa_1", "the mask isn't causal"),))},
        nodes=Nodes(40, 30, {"MatMul": 20, "Attention": 10}),
        parity={"max_abs": 1.25e-6, "tolerance": {"logits": 1e-4, "state": 1e-4, "ties": 0.0, "reason": "rounding"},
                "scheme": {"halves": [], "int8": [["embedding/embedding", -1]], "activations": "asymmetric"},
                "sensitivity": {"logits": 5e-5, "state": 2e-5},
                "sqnr_db": 121.5, "kl": 3e-9, "argmax_equal": 64, "steps": 64, "prompts": [5, 37],
                "state_max_abs": 2e-6},
        state_bytes=StateBytes(700, {"keys": 300, "values": 400}),
        latency=Latency(
            kind="measured", host="Imaginary 9000, 2 cores, Linux", threads=1,
            command="needle-export bench dist --threads 1", load_ms=12.5, first_ms=4.25,
            prefill=(PrefillLatency(64, 20.0, 3200.0), PrefillLatency(256, 80.0, 3200.0)),
            decode=DecodeLatency(2.5, 3.1, 400.0, 256), peak_rss_bytes=123_456_789),
        memory=Memory(
            host="Imaginary 9000, 2 cores, Linux", threads=1, command="needle-export bench dist --threads 1",
            decode=Loaded(49_000_000, 128_000_000, 42_000_000, 129_000_000),
            all=Loaded(49_000_000, 221_000_000, 81_000_000, 225_000_000), prompt_tokens=64),
        kept_float=(KeptFloat("stack/final_norm/scale", 384, "norms are never narrowed"),),
        notes=("opset 21 has no fused attention: 5 more nodes a layer",),
        io={"inputs": [{"name": "tokens", "dtype": "int64", "shape": [1, "T"]}]},
        versions={"onnx": "1.23.2", "onnxruntime": "1.32.0"},
        signatures={"decode": Signature(30, "XNNPACK", 3, 25, (LeftToRuntime("GATHER", 4, 2),
                                                             LeftToRuntime("FLOOR_MOD", 1, 0)))},
        runtimes=(RuntimeCheck("onnxruntime", "1.32.0", True, True, 1.25e-6, ""),
                  RuntimeCheck("olderruntime", "0.9", False, None, None, "knows no such op")),
        gpu_lint=(LintNote("unsupported op", "GATHER", 4, "the delegate has no such op", "a public list"),),
        estimates=(LatencyEstimate(
            kind="estimated", device="till", name="Till", basis="guess", position=256, decode_ms=9.0,
            parts=EstimateParts(5.0, 1.0, 0.5, 2.0, 0.5),
            prefill=(PrefillEstimate(64, 100.0, 640.0),)),),
        imported=(ImportedLatency(
            kind="imported", device="till", format="benchmark_model", file="till.txt", sha256="e" * 64,
            date="2026-11-30", phase="decode", tokens=1, ms=8.0, statistic="mean", runs=50, ms_min=7.5, ms_max=9.5,
            ms_std=0.2, first_ms=12.0, load_ms=30.0, threads=1),),
        evaluations=(make_evaluation(),),
    )
    return dataclasses.replace(artifact, **changes)


def make_report(*artifacts: Artifact, random: bool = False, **changes: Any) -> Report:
    """A report over the given artifacts, or over one with something in every field."""
    report = Report(
        schema=SCHEMA, tool=Tool("needle-export", "0.1.0"),
        checkpoint=CheckpointInfo(
            path_name="needle3.safetensors", sha256="a" * 64, format="safetensors", random=random,
            geometry=SMALL.as_dict(), layers=SMALL.num_layers, parent_layers=20,
            parameters=parameter_count(SMALL), lora=(AdapterInfo("home.safetensors", "b" * 64),),
            dropped_heads=("confidence",)),
        options={"target": "onnx", "layers": 3, "context": 1024, "weights": "fp32", "opset": 24,
                 "keep_confidence": False, "seed": 0},
        plan=PlanInfo("ios-balanced", "iphone-12", ({"metric": "size", "max": "35.5 MB"},)),
        artifacts=artifacts or (make_artifact(),),
    )
    return dataclasses.replace(report, **changes)


def write_artifact(folder: Path, files: Mapping[str, bytes] = FILES) -> Report:
    """Writes an artifact's files and its report into an existing folder."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    report = make_report(make_artifact(files))
    (folder / REPORT_NAME).write_bytes(dump_report(report))
    return report


def is_whole(folder: Path) -> bool:
    """Whether a folder holds one version, complete: every listed file with its hash, and no other."""
    from needle_export.report.schema import load_report

    report = load_report(folder)
    listed = {file.name: file.sha256 for artifact in report.artifacts for file in artifact.files}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return present == {*listed, REPORT_NAME} and all(
        hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha for name, sha in listed.items())
