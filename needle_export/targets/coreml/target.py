"""The Core ML target: one package with a function for decode and one for each prefill length."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from needle_export.config.rules import Rules
from needle_export.errors import Unsupported
from needle_export.graph.ops import op
from needle_export.graph.program import Program
from needle_export.measure.work import Work
from needle_export.targets.base import Compiled, Facts, LoweringOptions, OtherRuntime, Programs, need
from needle_export.targets.coreml import apple, contract, decoder
from needle_export.targets.coreml.evaluate import load_package
from needle_export.targets.coreml.session import EvaluatorRunner
from needle_export.targets.matrices import ReadMatrix
from needle_export.targets.ports import DECODE, entry_name, listed, prefill_name
from needle_export.targets.quiet import quietly

#: What a host may take over as it is; they lie beside this module.
HOST_FILES = ("host.py", "NeedleHost.swift", "NeedleModel.swift")

_EVALUATED = "verified by evaluating the saved package op by op on this machine, not by Core ML"
_NO_DEVICE = ": no Apple device took part in that"


class CoremlTarget:
    """Core ML, as an ML program."""

    name = "coreml"
    status: Literal["verified-by-evaluator"] = "verified-by-evaluator"
    fixed_shapes = True
    runtime = "evaluator"

    def folds_into_matrices(self, weights: Rules) -> bool:
        """Only in float32: a scaled half isn't the checkpoint's, and levels are rounded from the checkpoint's."""
        return weights.schemes == ("fp32",)

    def activations(self, weights: Rules) -> None:
        """Inputs of products are never rounded to integers."""
        return

    def blocks(self, scheme: str, rows: int, columns: int) -> Any:
        """See :class:`targets.base.Target`."""
        need("coreml", "coremltools")
        with quietly():
            from needle_export.targets.coreml.store import block_form
        return block_form(scheme, rows, columns)

    def chunk_multiple(self, states: tuple[Any, ...], system: str | None) -> int:
        """Of the positions whose keys share a row of a state: a chunk is one write of whole rows."""
        assert system is not None
        return max(layout.side for layout in contract.layouts(states, contract.stateful(system)))

    def half(self, weights: Rules) -> bool:
        """In all schemes but float32, as they compute in half precision."""
        return weights.base != "fp32"

    def compile(
        self,
        programs: Programs,
        states: tuple[Any, ...],
        head_vocab: int,
        folder: Path,
        options: LoweringOptions,
    ) -> Compiled:
        """Write ``model.mlpackage`` and the host's code; see :class:`targets.base.Target`."""
        need("coreml", "coremltools")
        with quietly():
            from needle_export.targets.coreml.lower import Exporter
            from needle_export.targets.coreml.store import WeightStore
        system = options.system
        assert system is not None
        stateful = contract.stateful(system)
        ring = contract.ring_rows(states)
        if ring % self.chunk_multiple(states, system):
            raise Unsupported(
                f"a window of {ring} positions doesn't fill whole rows of the key state",
                where="sliding_window",
                fix="build for --os ios17, which has no states",
            )
        store = WeightStore(options.weights, stateful)
        exporter = Exporter(store, system)
        ngrams: dict[str, Any] = {}
        for rows in (1, *options.buckets):
            program = programs.program(rows)
            ngrams = _ngrams(program)
            tables = len(ngrams.get("seeds", ()))
            exporter.add(
                entry_name(rows),
                program,
                rows,
                contract.input_ports(states, rows, tables, store.half, stateful),
                contract.state_ports(states, stateful) if stateful else (),
                contract.output_ports(states, head_vocab, rows, store.half, stateful),
            )
            del program
        known = contract.facts(states, head_vocab, options.context, options.buckets, ngrams, system, store.half)
        described = contract.contract_json(known, options.metadata)
        with quietly():
            written = exporter.write(folder / contract.FILE_NAME, described, options.metadata)
        packages = list(dict.fromkeys(written.values()))
        files = [f.relative_to(folder).as_posix() for p in packages for f in sorted(p.rglob("*")) if f.is_file()]
        # Counted in the files, not in what was asked for: a state's update is a write there, and a read if it is used.
        held = {p: load_package(p).describe()["functions"] for p in packages}
        found = {name: held[p][name if stateful else "main"] for name, p in written.items()}
        for name in HOST_FILES:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)
            files.append(name)
        return Compiled(
            files=files,
            weights=store.listed(),
            nodes={name: facts["op_types"] for name, facts in found.items()},
            notes=_notes(options, system, found[DECODE]["precisions"], len(packages)),
            io=_io(states, known, len(ngrams.get("seeds", ()))),
            versions={n: version(n) for n in ("coremltools",)},
        )

    def open(self, folder: Path, *, threads: int = 1, inner: bool = False) -> EvaluatorRunner:
        """Open an artifact in the evaluator, in float32."""
        return EvaluatorRunner(folder, threads=threads, inner=inner)

    def rounded(self, folder: Path) -> EvaluatorRunner:
        """The artifact with every op rounded to the type that it declares."""
        return EvaluatorRunner(folder, precision="declared")

    def examine(self, folder: Path) -> Facts:
        """Nothing beyond what compiling told: no delegate cuts a package here."""
        return Facts()

    def read_matrices(self, folder: Path) -> Iterator[ReadMatrix]:
        """Every matrix of the packages, read through their functions."""
        from needle_export.targets.coreml.readback import read_matrices

        return read_matrices(folder)

    def work(self, folder: Path, position: int, prompts: tuple[int, ...] = ()) -> Work:
        """Read the work off the finished artifact; see :class:`targets.base.TellsWork`."""
        need("coreml", "coremltools")
        from needle_export.targets.coreml.work import read_work

        return read_work(folder, position, prompts)

    def other_runtimes(self, folder: Path) -> list[OtherRuntime]:
        """Core ML itself, where macOS is present."""
        if what := self.missing():
            return [OtherRuntime("Core ML", "", None, f"not tried: {what}", native=True)]
        version = f"of macOS {apple.macos_version()}, compute units {apple.DEFAULT_UNITS}"
        return [OtherRuntime("Core ML", version, lambda: self.open_native(folder), native=True)]

    def decoder(self) -> Path:
        """For Core ML itself, on a Mac; see :class:`targets.base.Target`."""
        return Path(decoder.__file__)

    def missing(self) -> str:
        """Why Core ML can't be used on this machine, or empty; see :class:`targets.base.RunsNatively`."""
        return apple.missing()

    def open_native(self, folder: Path, *, compute_units: str = apple.DEFAULT_UNITS) -> apple.AppleRunner:
        """Open an artifact in Core ML; see :class:`targets.base.RunsNatively`."""
        return apple.AppleRunner(folder, compute_units=compute_units)

    def machine(self, compute_units: str) -> str:
        """This Mac and the compute units in words."""
        return apple.machine(compute_units)


def _ngrams(program: Program) -> dict[str, Any]:
    """What the host needs for hashing, off the op that it replaces."""
    found = program.nodes(op("ngram_rows"))
    if not found:
        return {}
    node = found[0]
    seeds = program.weights[node.args[3].name].value.tolist()
    return {"seeds": [int(s) for s in seeds], "orders": list(node.args[4]), "slots": int(node.args[5])}


def _notes(
    options: LoweringOptions, system: str, precisions: dict[str, int], packages: int
) -> list[str]:
    counts = ", ".join(f"{count:,} in {kind}" for kind, count in precisions.items())
    notes = [
        f"for {system.replace('ios', 'iOS ')} and later; {_EVALUATED}{'' if apple.available() else _NO_DEVICE}",
        f"ops of decode by the type that they compute in: {counts}",
        "n-gram rows, slots and masks are computed by the host: host.py and the Swift files beside the package do it",
    ]
    if not contract.stateful(system):
        notes.append("without states, which begin with iOS 18: caches are inputs, and the host writes new rows")
        if packages > 1:
            notes.append(f"{packages} packages, since one has one function before iOS 18; each holds all weights")
    elif options.weights.base == "fp32":
        notes.append("states are in half precision, which is all that Core ML has; float32 holds for everything else")
    return notes


def _io(states: tuple[Any, ...], known: dict[str, Any], tables: int) -> dict[str, Any]:
    """The contract for the report: of decode, and what a host must know."""
    half, stateful = known["real"] == "float16", known["stateful"]
    return {
        "signatures": [DECODE, *(prefill_name(b) for b in known["buckets"])],
        **known,
        "inputs": listed(contract.input_ports(states, 1, tables, half, stateful)),
        "outputs": listed(contract.output_ports(states, known["vocab"], 1, half, stateful)),
    }
