"""The ONNX target: two graphs over one file of weights, for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from needle_export.config.options import OWN_OPS_SCHEMES
from needle_export.config.rules import Rules
from needle_export.measure.work import Phase, Work
from needle_export.targets.base import (
    Compiled,
    Facts,
    LoweringOptions,
    OtherRuntime,
    Programs,
    StoredWeight,
    WeightShare,
    need,
)
from needle_export.targets.kernels import Kernel
from needle_export.targets.matrices import ReadMatrix
from needle_export.targets.onnx import decoder
from needle_export.targets.onnx.contract import (
    CHUNK_KEY,
    CONTEXT_KEY,
    DATA_NAME,
    STATE_KEY,
    describe,
    ports,
    state_json,
)
from needle_export.targets.onnx.decoder import FILES
from needle_export.targets.onnx.session import OnnxRunner
from needle_export.weights.scheme import Activations

#: The newest opset, which the default artifact is written in.
NEWEST = 24

#: Oldest ONNX Runtime that runs an opset's artifact (make test-slow proves it).
_OLDEST_RUNTIME = {21: "1.18.1", 23: "1.23.2", 24: "1.25.1"}

#: What an older opset does without.
_WITHOUT = {
    23: "standard ops only: caches are read through Attention, which copies keys and values into its own layout;"
    " convolutions, sums with norms and SiLU are several ops instead of one",
    21: "standard ops only: norms, rotation and attention are written out, and keys and values are transposed"
    " every step",
}


class OnnxTarget:
    """ONNX for ONNX Runtime on CPU."""

    name = "onnx"
    status: Literal["verified-on-runtime"] = "verified-on-runtime"
    fixed_shapes = False
    runtime = "onnxruntime"

    def folds_into_matrices(self, weights: Rules) -> bool:
        """Only in float32: a scaled half is not the checkpoint's half any more, and integers are of its own numbers."""
        return weights.schemes == ("fp32",)

    def activations(self, weights: Rules) -> Activations | None:
        """Products with integers round their inputs, run by run; all else is float32."""
        return "blocks" if set(weights.schemes) & set(OWN_OPS_SCHEMES) else None

    def blocks(self, scheme: str, rows: int, columns: int) -> Any:
        """See :class:`targets.base.Target`."""
        from needle_export.targets.onnx.integers import block_form

        return block_form(scheme, rows, columns)

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
        """Write ``decode.onnx``, ``prefill.onnx`` and ``weights.bin``; see :class:`targets.base.Target`."""
        import onnx
        import onnx_ir as ir

        assert options.opset is not None

        from needle_export.targets.onnx.lower import count_at_load, count_ops, lower
        from needle_export.targets.onnx.store import WeightFile, Weights

        metadata = {
            **options.metadata,
            STATE_KEY: state_json(states),
            CONTEXT_KEY: str(options.context),
            CHUNK_KEY: str(options.max_chunk),
        }
        nodes: dict[str, dict[str, int]] = {}
        at_load = newest = 0
        with WeightFile(folder / DATA_NAME) as store:
            for phase, rows in (("decode", 1), ("prefill", None)):
                inputs, outputs = ports(states, head_vocab, rows)
                common: dict[str, Any] = {
                    "name": f"needle_{phase}",
                    "weights": options.weights,
                    "data_name": DATA_NAME,
                    "metadata": {**metadata, "needle.phase": phase},
                }
                fused = programs.program(rows)
                if phase == "decode" and options.opset != NEWEST:
                    nowhere = Weights(folder / DATA_NAME)
                    newest = sum(count_ops(lower(fused, inputs, outputs, nowhere, opset=NEWEST, **common)).values())
                model = lower(
                    fused,
                    inputs,
                    outputs,
                    store,
                    opset=options.opset,
                    **common,
                )
                store.flush()
                ir.save(model, folder / FILES[phase])
                nodes[phase] = count_ops(model)
                if phase == "decode":
                    at_load = count_at_load(model)
                onnx.checker.check_model(str(folder / FILES[phase]))
        notes = [f"opset {options.opset}: runs in ONNX Runtime {_OLDEST_RUNTIME[options.opset]} and newer"]
        if options.opset != NEWEST:
            count = sum(nodes["decode"].values())
            notes.append(f"{_WITHOUT[options.opset]}; decode has {count} nodes, with opset {NEWEST} {newest}")
        else:
            notes.append(
                "attention is FusedMatMul, Softmax, FusedMatMul over the rows in use, which is faster than the"
                " Attention op at every length measured"
            )
        if "fp16" in options.weights.schemes:
            notes.append(
                "fp16 weights, float32 arithmetic: the runtime widens the matrices when it loads them, so that memory"
                " is that of float32"
            )
        if at_load:
            notes.append(
                f"{at_load} nodes of the decode graph depend on weights alone: the runtime computes them when it loads"
                f" the model, and a step runs the other {sum(nodes['decode'].values()) - at_load}"
            )
        return Compiled(
            files=[*FILES.values(), DATA_NAME],
            weights=[
                StoredWeight(
                    s.name,
                    s.length,
                    s.dtype,
                    tuple(WeightShare(p.source, p.role, p.layer, p.elements) for p in s.parts),
                    s.kept_float,
                )
                for s in store.stored
            ],
            nodes=nodes,
            notes=notes,
            io=describe(states, head_vocab, options.context, options.max_chunk),
            versions={name: version(name) for name in ("onnx", "onnx-ir", "onnxruntime")},
        )

    def open(self, folder: Path, *, threads: int = 1, inner: bool = False) -> OnnxRunner:
        """Open an artifact in ONNX Runtime."""
        return OnnxRunner(folder, threads=threads, inner=inner)

    def load_runtime(self) -> None:
        """ONNX Runtime."""
        need("onnx", "onnxruntime")
        import onnxruntime  # noqa: F401 - the import is all that is wanted

    def open_decode(self, folder: Path, *, threads: int = 1) -> OnnxRunner:
        """``decode.onnx`` alone."""
        return OnnxRunner(folder, threads=threads, prefill=False)

    def examine(self, folder: Path) -> Facts:
        """Nothing beyond what compiling told."""
        return Facts()

    def read_matrices(self, folder: Path) -> Iterator[ReadMatrix]:
        """Every matrix of the two graphs, read through them."""
        from needle_export.targets.onnx.readback import read_matrices

        return read_matrices(folder)

    def work(self, folder: Path, position: int, prompts: tuple[int, ...] = ()) -> Work:
        """Read the work off the finished artifact; see :class:`targets.base.TellsWork`."""
        need("onnx", "onnx")
        from needle_export.targets.onnx.work import read_work

        return read_work(folder, position, prompts)

    def kernel(self, kernel: Kernel, folder: Path) -> tuple[Callable[[], object], Phase]:
        """A small graph to time; see :class:`targets.base.TimesKernels`."""
        need("onnx", "onnxruntime")
        from needle_export.targets.onnx.kernels import open_kernel

        return open_kernel(kernel)

    def other_runtimes(self, folder: Path) -> list[OtherRuntime]:
        """None: opsets say what older versions run."""
        return []

    def decoder(self) -> Path:
        """What :class:`OnnxRunner` is built on; see :class:`targets.base.Target`."""
        return Path(decoder.__file__)
