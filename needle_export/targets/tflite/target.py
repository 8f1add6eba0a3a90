"""The TFLite target: one file with a signature for decode and one for each prefill length."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from needle_export.config.rules import Rules
from needle_export.errors import BadInput, UsageError
from needle_export.measure.work import Phase, Work
from needle_export.targets.base import (
    Compiled,
    Facts,
    Floats,
    LeftOut,
    LintFinding,
    LoweringOptions,
    OtherRuntime,
    Programs,
    SignatureFacts,
    StoredWeight,
    Tokens,
    need,
)
from needle_export.targets.kernels import Kernel
from needle_export.targets.matrices import ReadMatrix
from needle_export.targets.ports import CONTRACT_KEY, DECODE, entry_name, listed, prefill_name
from needle_export.targets.quiet import quietly
from needle_export.targets.tflite import contract, session
from needle_export.targets.tflite.session import Loop

#: What a file's ops and types ask for, by scheme, and what is known of older runtimes.
_SCHEME_NOTES = {
    "fp16": "fp16 weights, float32 arithmetic: the runtime widens the matrices when it loads them, so memory is that of"
    " float32, and the tied embedding's three times that (its lookup and its product are widened apart)",
    "int8": "int8 weights with a scale a row, applied by a MUL behind the op, since tflite-runtime 2.14 reads one scale"
    " a tensor; inputs of their products are rounded to int8 row by row, at run time",
    "int4": "4-bit weights with a half-precision scale for 32 columns of a row, which LiteRT reads (2.3 was tried) and"
    " tflite-runtime 2.14 doesn't; inputs of their products are rounded to int8 row by row, at run time",
}

#: Schemes whose products round their inputs.
_INTEGERS = ("int8", "int4")


class TfliteTarget:
    """TFLite for LiteRT on CPU."""

    name = "tflite"
    status: Literal["verified-on-runtime"] = "verified-on-runtime"
    fixed_shapes = True
    runtime = "ai-edge-litert"

    def folds_into_matrices(self, weights: Rules) -> bool:
        """Only in float32: a scaled half isn't the checkpoint's, and int8 rows are rounded from the checkpoint's."""
        return weights.schemes == ("fp32",)

    def activations(self, weights: Rules) -> str | None:
        """XNNPACK's rounding of inputs, by row whether the matrix has a scale a row or one for 32 columns."""
        return "asymmetric" if set(_INTEGERS) & set(weights.schemes) else None

    def blocks(self, scheme: str, rows: int, columns: int) -> Any:
        """See :class:`targets.base.Target`."""
        from needle_export.targets.tflite.store import block_form

        return block_form(scheme, columns)

    def chunk_multiple(self, states: tuple[Any, ...], system: str | None) -> int:
        """Of one: rows are written one by one."""
        return 1

    def half(self, weights: Rules) -> bool:
        """Never: small vectors are float32 in every scheme."""
        return False

    def compile(
        self,
        programs: Programs,
        states: tuple[Any, ...],
        head_vocab: int,
        folder: Path,
        options: LoweringOptions,
    ) -> Compiled:
        """Write ``model.tflite``; see :class:`targets.base.Target`."""
        need("tflite", "litert_torch", "litert_converter")
        with quietly():
            from needle_export.targets.tflite.buffers import stored_weights
            from needle_export.targets.tflite.lower import exporter
        from needle_export.targets.tflite.analysis import count_ops, oldest_runtime, read_graph
        from needle_export.targets.tflite.prepare import prepare

        path = folder / contract.FILE_NAME
        with exporter(options.weights) as target:
            for rows in (1, *options.buckets):
                program = programs.program(rows, fold_diagonals="int4" not in options.weights.schemes)
                prepare(program, self.folds_into_matrices(options.weights))
                target.add(
                    entry_name(rows),
                    program,
                    rows,
                    contract.input_ports(states, rows),
                    contract.output_ports(states, head_vocab, rows),
                )
                del program
            for name in options.heads:
                program = programs.head_program(name)
                answers = contract.head_outputs(name, program.output_shape(name))
                target.add(name, program, 0, contract.head_inputs(states, program.inputs), answers)
            described = contract.contract_json(
                states, head_vocab, options.context, options.buckets, options.metadata
            )
            target.write(path, described)
            weights = stored_weights(path, target.store.stored)
        graphs = {g.name: g for g in read_graph(path)}
        notes = [
            f"needs a runtime with the ops of TensorFlow Lite {oldest_runtime(path)} or newer",
            "no custom op, nothing above four dimensions; groups of keys and values are never repeated",
        ]
        notes += [_SCHEME_NOTES[s] for s in options.weights.schemes if s in _SCHEME_NOTES]
        if "int4" in options.weights.schemes:
            notes += _stored_otherwise(weights, options.weights, path.stat().st_size)
        return Compiled(
            files=[contract.FILE_NAME],
            weights=weights,
            nodes={name: count_ops(graph) for name, graph in graphs.items()},
            notes=notes,
            io=describe(states, head_vocab, options),
            versions={n: version(n) for n in ("ai-edge-litert", "litert-converter", "litert-torch")},
        )

    def open(self, folder: Path, *, threads: int = 1, inner: bool = False) -> TfliteRunner:
        """Open an artifact in LiteRT."""
        return TfliteRunner(folder, threads=threads, inner=inner)

    def load_runtime(self) -> None:
        """LiteRT, and what reads the contract in a file."""
        need("tflite", "ai_edge_litert")
        from ai_edge_litert import interpreter  # noqa: F401 - the import is all that is wanted

        from needle_export.targets.tflite import analysis  # noqa: F401 - likewise

    def open_decode(self, folder: Path, *, threads: int = 1) -> TfliteRunner:
        """All of the file: the runtime opens it as a whole, and can't leave a signature out."""
        return TfliteRunner(folder, threads=threads)

    def examine(self, folder: Path) -> Facts:
        """XNNPACK's partitions of every signature, and the GPU lint."""
        from needle_export.targets.tflite.analysis import partitions, read_graph
        from needle_export.targets.tflite.lint import lint

        path = folder / contract.FILE_NAME
        facts, seen = Facts(), set()
        for graph in read_graph(path):
            cut = partitions(path, graph.name)
            facts.signatures[graph.name] = SignatureFacts(
                ops=len(graph.ops),
                delegate="XNNPACK",
                partitions=cut.count,
                delegated=cut.delegated_ops,
                left=tuple(LeftOut(left.name, left.count, left.splits) for left in cut.left),
            )
            for found in lint(graph):
                finding = LintFinding(found.rule, found.op, found.count, found.why, found.source)
                if (found.rule, found.op) not in seen:
                    seen.add((found.rule, found.op))
                    facts.lint.append(finding)
        return facts

    def read_matrices(self, folder: Path) -> Iterator[ReadMatrix]:
        """Every matrix of ``model.tflite``, read through its graphs."""
        from needle_export.targets.tflite.readback import read_matrices

        return read_matrices(folder / contract.FILE_NAME)

    def work(self, folder: Path, position: int, prompts: tuple[int, ...] = ()) -> Work:
        """Read the work off the finished artifact; see :class:`targets.base.TellsWork`."""
        need("tflite", "ai_edge_litert")
        from needle_export.targets.tflite.work import read_work

        return read_work(folder, position, prompts)

    def kernel(self, kernel: Kernel, folder: Path) -> tuple[Callable[[], object], Phase]:
        """A small graph to time; see :class:`targets.base.TimesKernels`."""
        need("tflite", "ai_edge_litert")
        from needle_export.targets.tflite.kernels import open_kernel

        return open_kernel(kernel, folder)

    def other_runtimes(self, folder: Path) -> list[OtherRuntime]:
        """tflite-runtime 2.14, which many shipped apps still link; in a Python of its own."""
        from needle_export.targets.tflite.legacy import VERSION, LegacyRunner, find_legacy_python, why_not

        path = folder / contract.FILE_NAME
        if path.is_file() and (reason := why_not(path)):
            return [OtherRuntime("tflite-runtime", VERSION, None, reason)]
        python = find_legacy_python()
        if python is None:
            reason = "not tried: no Python with it was found (NEEDLE_EXPORT_TFLITE_PYTHON names one)"
            return [OtherRuntime("tflite-runtime", VERSION, None, reason)]
        opener: Callable[[], Any] = partial(LegacyRunner, path, python)
        return [OtherRuntime("tflite-runtime", VERSION, opener)]

    def decoder(self) -> Path:
        """What :class:`TfliteRunner` and the older runtime's process run; see :class:`targets.base.Target`."""
        return Path(session.__file__)


class TfliteRunner:
    """A decoding session in LiteRT.

    Args:
        folder: of the artifact.
        threads: of XNNPACK and of the runtime's own kernels.
        inner: keep the stream after each block (slower; for finding a faulty layer).

    Raises:
        BadInput: the file isn't an artifact of ours or can't be loaded.
        Unsupported: ai-edge-litert isn't installed.
    """

    def __init__(self, folder: Path, *, threads: int = 1, inner: bool = False) -> None:
        need("tflite", "ai_edge_litert")
        from ai_edge_litert.interpreter import Interpreter

        from needle_export.targets.tflite.analysis import metadata

        path = folder / contract.FILE_NAME
        if not path.is_file():
            raise BadInput("this file of the artifact is missing", where=str(path), fix="build it again")
        described = metadata(path, CONTRACT_KEY)
        try:
            facts = json.loads(described or "")
            with quietly():
                self.interpreter = Interpreter(
                    str(path), num_threads=threads, experimental_preserve_all_tensors=inner
                )
            self.loop = Loop(self.interpreter, facts)
        except (KeyError, ValueError, RuntimeError) as fault:
            text = (str(fault).strip().splitlines() or ["no reason given"])[0]
            if described is None:
                text = "it doesn't carry this tool's contract"
            raise BadInput(
                f"LiteRT can't load it ({text[:200]})", where=str(path), fix="build it again"
            ) from fault
        self.context, self.inner = self.loop.context, inner
        self.max_chunk = max(self.loop.buckets, default=1)
        self._call = (0, 1, 1)

    def reset(self) -> None:
        """Forget the sequence."""
        self.loop.reset()

    def save(self) -> Any:
        """A copy of position and state, for :meth:`restore`."""
        return self.loop.save()

    def restore(self, saved: Any) -> None:
        """Go back to a sequence that was saved here."""
        self.loop.restore(saved)

    def feed(self, tokens: Tokens) -> Floats:
        """Append tokens [T]; logits [T, V]."""
        if self.loop.position + len(tokens) > self.context:
            raise UsageError(
                f"{self.loop.position + len(tokens)} tokens don't fit in a context of {self.context}",
                fix="build with a larger --context",
            )
        if self.inner and len(tokens) > 1:
            # In one call, however little of the bucket that fills: streams are those of one call.
            bucket = next(b for b in self.loop.buckets if b >= len(tokens))
            self._call = (1 + self.loop.buckets.index(bucket), len(tokens), bucket)
            return self.loop.chunk(tokens, bucket)
        self._call = (0, 1, 1)
        return self.loop.feed(tokens)

    def state(self) -> dict[str, NDArray[Any]]:
        """State by name in the reference's layout."""
        from needle_export.targets.tflite.state import reference_state

        return reference_state(self.loop)

    def streams(self) -> dict[int, Floats]:
        """The stream after each block of the last call, [T, n, C], for a runner opened with ``inner``."""
        from needle_export.targets.tflite.streams import read_streams

        return read_streams(self.interpreter, *self._call) if self.inner else {}


def _stored_otherwise(weights: list[StoredWeight], rules: Rules, size: int) -> list[str]:
    """What was to be 4 bits wide and isn't, and why; floats are listed one by one elsewhere."""
    notes = []
    weights = [w for w in weights if rules.of(w.shares) == "int4"]
    rows = [w for w in weights if w.dtype == "int8"]
    if rows:
        names = ", ".join(sorted({re.sub(r"^layers\.\d+\.", "", w.name) for w in rows}))
        notes.append(f"8 bits and a scale a row where 32 columns don't divide a row: {len(rows)} matrices ({names})")
    kept = sum(w.bytes for w in weights if w.kept_float)
    notes.append(
        "taps, norms, diagonals and the MLP's Kronecker factors are half precision, which the runtime widens when it"
        f" loads the file, and a few biases float32: {kept:,} bytes, {100 * kept / size:.2f} % of the file"
    )
    return notes


def describe(states: tuple[Any, ...], vocab: int, options: LoweringOptions) -> dict[str, Any]:
    """The contract for the report: of decode, with T for the tokens of a prefill."""

    return {
        "signatures": [DECODE, *(prefill_name(b) for b in options.buckets), *options.heads],
        "context": options.context,
        "buckets": list(options.buckets),
        "vocab": vocab,
        "heads": list(options.heads),
        "state": [{**asdict(layout), "shape": list(layout.shape)} for layout in contract.layouts(states)],
        "inputs": listed(contract.input_ports(states, 1)),
        "outputs": listed(contract.output_ports(states, vocab, 1)),
    }
