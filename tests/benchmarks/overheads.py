"""What artifacts take besides weights, measured on builds, as facts for ``needle_export/measure/overheads.json``.

    python -m tests.benchmarks.overheads [--target onnx,tflite,coreml] [--ops] [--quick]

Graphs, host code and constants grow with blocks, engram sites and prefill lengths and hardly with anything else. A few
artifacts of two to four blocks are lowered for every kind of graph, without being verified, at the published widths
and at a toy's, with random weights and small tables; what ``measure.inventory`` counts is taken off, and the rest is
solved for its parts. The numbers are exact sizes: how busy the machine is doesn't matter. About ten minutes on a
quiet machine; with ``--target`` the other targets' facts stay as they are.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from needle_export.checkpoint.geometry import PUBLISHED, SMALL, Geometry
from needle_export.checkpoint.sample import write_sample
from needle_export.config.options import BuildOptions
from needle_export.measure.inventory import Stores, inventory
from needle_export.measure.predict import FACTS, stores_of
from tests.support.lowered import PROMPT, Lowered, lowered

#: A scheme that stands for each kind of graph.
KINDS = {
    "onnx": {"fp32": "fp32", "fp16": "fp16", "integers": "int4", "codes": "cq4"},
    "tflite": {"fp32": "fp32", "fp16": "fp16", "int8": "int8", "int4": "int4"},
    "coreml": {"fp32": "fp32", "fp16": "fp16", "integers": "int4", "codes": "cq4"},
}

#: What else changes graphs, each against the first kind: options by name.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "onnx": {"opset 23": {"opset": 23}, "opset 21": {"opset": 21}, "cache fp16": {"cache": "fp16"},
             "cache int8": {"cache": "int8"}},
    "tflite": {"head": {"heads": ("confidence",)}},
    "coreml": {"ios17": {"os": "ios17"}},
}

#: Blocks and the blocks with engram sites, of each build.
DEPTHS = ((2, (1,)), (4, (1,)), (4, (1, 3)))

WIDE = dataclasses.replace(PUBLISHED, vocab_size=512, engram_slots=512)
NARROW = dataclasses.replace(SMALL, sliding_window=1024, max_seq_len=8192)


def main() -> None:
    """Measure and write the facts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=",".join(KINDS))
    parser.add_argument("--ops", action="store_true", help="counts of ops only")
    parser.add_argument("--quick", action="store_true",
                        help="fewer builds: kinds after a target's first differ by a constant and in proportion to it")
    options = parser.parse_args()
    targets = options.target.split(",")
    facts = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
    facts["widths"] = [NARROW.d_model, WIDE.d_model]
    command = f"python -m tests.benchmarks.overheads{' --quick' if options.quick else ''}"
    with TemporaryDirectory() as folder:
        for target in targets:
            facts[target] = facts.get(target, {}) | {"ops": _ops(Path(folder), target)}
            FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            if options.ops:
                continue
            kinds: dict[str, dict[str, float]] = {}
            for kind, weights in KINDS[target].items():
                first = next(iter(kinds.values()), None)
                if first is None or not options.quick:
                    kinds[kind] = _whole(Path(folder), target, weights, first)
                else:
                    kinds[kind] = _alike(Path(folder), target, weights, first)
            changes = {name: _change(Path(folder), target, options) for name, options in CHANGES[target].items()}
            facts[target] |= {"measured_by": command, "kinds": kinds, "changes": changes}
            FACTS.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _whole(folder: Path, target: str, weights: str, first: dict[str, float] | None) -> dict[str, float]:
    """The parts of one kind of graph's overhead, bytes; those by width are of a channel of d_model.

    Args:
        first: of the target's first kind. Where lowering takes long, its parts by width stand for the others'.
    """
    options, fixed_shapes = {"weights": weights}, target != "onnx"
    two = {"buckets": (64, 128)} if fixed_shapes else {}
    shallow, deep, sited = (_rest(folder, target, WIDE, at, options | two) for at in DEPTHS)
    layer, site = (deep - shallow) / 2, sited - deep
    fixed = shallow - 2 * layer - site
    parts = {"layer": layer, "site": site}
    if first is None or not fixed_shapes:
        thin = [_rest(folder, target, NARROW, at, options | two) for at in DEPTHS[:2]]
        width = WIDE.d_model - NARROW.d_model
        parts["layer_width"] = (layer - (thin[1] - thin[0]) / 2) / width
        parts["fixed_width"] = (shallow - thin[0]) / width - 2 * parts["layer_width"]
    else:
        parts |= {name: first[name] for name in ("layer_width", "fixed_width")}
    if fixed_shapes:
        one = {"buckets": (64,)}
        less = [_rest(folder, target, WIDE, at, options | one) for at in DEPTHS[:2]]
        parts["prefill_layer"] = layer - (less[1] - less[0]) / 2
        parts["prefill"] = shallow - less[0] - 2 * parts["prefill_layer"]
        fixed -= 2 * parts["prefill"]
        parts["layer"] -= 2 * parts["prefill_layer"]
    return {"fixed": fixed, **parts}


def _alike(folder: Path, target: str, weights: str, first: dict[str, float]) -> dict[str, float]:
    """As :func:`_whole`, from two builds: sites and prefills are taken to be what they are in the first kind."""
    options = {"weights": weights} | ({"buckets": (64, 128)} if target != "onnx" else {})
    shallow, deep = (_rest(folder, target, WIDE, at, options) for at in DEPTHS[:2])
    layer, whole = (deep - shallow) / 2, first["layer"] + 2 * first.get("prefill_layer", 0)
    parts = dict(first) | {"layer": first["layer"] * layer / whole}
    if "prefill_layer" in first:
        parts["prefill_layer"] = first["prefill_layer"] * layer / whole
    parts["fixed"] = shallow - 2 * layer - first["site"] - 2 * first.get("prefill", 0)
    return parts


def _ops(folder: Path, target: str) -> dict[str, dict[str, list[float]]]:
    """Ops of a call by kind of graph and phase: once, for every block, for every engram site."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind, weights in KINDS[target].items():
        asked = {"weights": weights} | ({"buckets": (PROMPT,)} if target != "onnx" else {})
        works = [_lowered(folder, target, NARROW, at, asked)[1].work for at in DEPTHS]
        found[kind] = {}
        for phase in ("decode", "prefill"):
            calls = [w.decode if phase == "decode" else w.prompts[0].calls[0] for w in works]
            shallow, deep, sited = (c.count for c in calls)
            layer, site = (deep - shallow) / 2, sited - deep
            found[kind][phase] = [shallow - 2 * layer - site, layer, site]
        print(target, kind, found[kind], file=sys.stderr, flush=True)
    return found


def _change(folder: Path, target: str, options: dict[str, Any]) -> dict[str, float]:
    """What a choice adds to an artifact of float32 with two prefill lengths, once and for every block."""
    two = {"buckets": (64, 128)} if target != "onnx" else {}
    rests = [[_rest(folder, target, WIDE, at, more | two) for at in DEPTHS[:2]] for more in ({}, options)]
    added = [more - base for base, more in zip(*rests, strict=True)]
    layer = (added[1] - added[0]) / 2
    return {"fixed": added[0] - 2 * layer, "layer": layer}


def _rest(folder: Path, target: str, base: Geometry, at: tuple[int, tuple[int, ...]], options: dict[str, Any]) -> int:
    """Bytes that no weight takes."""
    asked, made = _lowered(folder, target, base, at, options)
    stores: Stores = stores_of(asked, made.geometry)
    functions = 1 + len(asked.buckets or ())
    copies = functions if asked.os == "ios17" else 1
    counted = copies * sum(size for _, size in inventory(made.geometry, stores, asked.heads))
    print(target, base.d_model, at, options, made.total - counted, file=sys.stderr, flush=True)
    return made.total - counted


def _lowered(
    folder: Path, target: str, base: Geometry, at: tuple[int, tuple[int, ...]], options: dict[str, Any]
) -> tuple[BuildOptions, Lowered]:
    layers, sites = at
    path = folder / f"{base.d_model}-{layers}-{len(sites)}.safetensors"
    if not path.exists():
        write_sample(path, dataclasses.replace(base, num_layers=layers, engram_layers=sites,
                                               global_layers=(layers - 1,)), 0)
    asked = BuildOptions(str(path), folder / "out", target=target, **options)
    return asked, lowered(asked)


if __name__ == "__main__":
    main()
