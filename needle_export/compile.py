"""One checkpoint on its way to fused programs, and the reference that they are held against."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.config.progress import Progress
from needle_export.errors import BadInput, Unsupported
from needle_export.graph.passes import Fired, Left, Pass, head_pipeline, pipeline
from needle_export.graph.program import Program
from needle_export.graph.promises import check, check_head, promises
from needle_export.graph.run import Stepper, round_floats
from needle_export.graph.spec import check_rewritten, check_traced
from needle_export.graph.trace import trace, trace_head
from needle_export.measure import parity
from needle_export.model import rows
from needle_export.model.dynamic import DynamicProducts, Quantized, plain_forms, quantize_parameters, quantizers
from needle_export.model.network import Needle
from needle_export.model.rounding import round_as_read, round_parameters
from needle_export.model.state import StateSpec, empty_state, state_bytes, state_specs, stored_states
from needle_export.model.step import Answer, Step, parameter_sources
from needle_export.report.schema import Fusion, LeftUnfused
from needle_export.targets.base import StoredWeight
from needle_export.weights import caches
from needle_export.weights.scheme import Activations, Scheme

if TYPE_CHECKING:
    from needle_export.codebooks import Codebooks

log = logging.getLogger(__name__)

#: Longest prefill chunk; a ring shortens it to its own length.
MAX_CHUNK = 128

#: Shortest ring that a chunk of variable length, from two tokens on, is traced for.
SHORTEST_RING = 3


def _none(*of: object) -> Any:
    return ""


class Compiler:
    """Holds the reference model, makes fused programs of it, and answers for both.

    Args:
        checkpoint: sliced and merged.
        context: positions that the caches hold.
        heads: probe heads that every step feeds; only for targets that offer them.

    Raises:
        UsageError: the checkpoint has no such head.
    """

    def __init__(
        self, checkpoint: Checkpoint, context: int, progress: Progress, heads: tuple[str, ...] = ()
    ) -> None:
        self.checkpoint = checkpoint
        self.context = context
        self.progress = progress
        self.heads = heads
        self.states: tuple[StateSpec, ...] = state_specs(checkpoint.geometry, context, heads)
        #: The same as the artifact keeps them.
        self.stored = self.states
        rings = [s.shape[0] for s in self.states if s.ring]
        self.ring_rows = min(rings, default=0)
        if 0 < self.ring_rows < SHORTEST_RING:
            raise Unsupported(
                f"a sliding window of {self.ring_rows} is too short to prefill into",
                where="sliding_window",
                fix="no model of the family has one; check the checkpoint's config",
            )
        self.max_chunk = max(2, min([context, MAX_CHUNK, *rings]))
        self.fold_into_matrices = False
        #: Whether weights in codebook form are programs' codes, with rotations around them, or plain numbers.
        self.rotate = True
        #: Which weights have which number format; None: all are floats.
        self.formats: Codebooks | None = None
        #: What the scheme does to the model with caches of float32, and what its own caches do on top.
        self.scheme_loss: dict[str, float] | None = None
        self.cache_loss: dict[str, float] | None = None
        #: What the model says as it was read, where the reference was changed since.
        self.original: NDArray[np.float32] | None = None
        self.scheme = Scheme()
        self._quantized: dict[int, list[Quantized]] = {}
        self._formed: dict[int, list[Any]] = {}
        self.sensitivity: parity.Sensitivity | None = None
        #: What products with weights are computed under; nothing but torch's own unless a scheme rounds inputs too.
        self.products: Callable[..., Any] = nullcontext
        #: The step with the numbers of the files, where those are no checkpoint tensor's; T is symbolic.
        self.stored_program: Program | None = None
        self.places: dict[str, list[tuple[str, int]]] = {}
        self.left: dict[str, list[Left]] = {}
        with progress.stage("load the reference"):
            self.net = Needle(checkpoint.geometry, checkpoint.tensors, checkpoint.permutations).eval()

    def use_formats(self, formats: Codebooks, fold: bool) -> None:
        """Make programs for these number formats.

        Args:
            fold: whether matrices may take constant factors.

        Raises:
            UsageError: a rule matches no tensor.
        """
        sources = parameter_sources(Step(self.net, self.context, self.heads)).values()
        formats.rules.check({(source, role) for source, role, _ in sources})
        self.formats, self.fold_into_matrices = formats, fold

    def use_caches(self, form: str) -> None:
        """Keep keys and values in this form of ``config.schemes.CACHES``, as far as the artifact is concerned."""
        self.stored = stored_states(self.states, form)

    # --- programs ----------------------------------------------------------------------------------

    def program(self, rows: int | None, fold_diagonals: bool = True) -> Program:
        """Trace the cached step at T = rows (None: symbolic) and run all passes.

        Args:
            fold_diagonals: whether small matrices may take diagonals.

        Raises:
            FusionFailed: a promised rewrite fired too seldom; names the first block that lacks it, and why.
        """
        geometry, formats = self.checkpoint.geometry, self.formats
        step = Step(self.net, self.context, self.heads)
        phase = {1: "decode", None: "prefill"}.get(rows, f"prefill_{rows}")
        with self.progress.stage(f"trace {phase}"):
            program = trace(
                step, empty_state(self.states), parameter_sources(step), rows, self.max_chunk, bool(self.heads)
            )
        engram = (geometry.engram_conv_taps,) if geometry.engram_layers else ()
        orders = geometry.engram_orders if geometry.engram_layers else ()
        taps, fold = (geometry.qkv_conv_taps, *engram), self.fold_into_matrices
        passes = pipeline(
            taps, orders, geometry.mhc_lanes, fold, bool(self.heads),
            _none if formats is None else formats.format_of,
            formats.of if formats and self.rotate else None,
            fold_diagonals,
        )
        check_traced(program)
        fired = self._rewrite(program, passes, phase)
        self.places[phase], self.left[phase] = fired.places, fired.left
        # Before the legal ops: what wasn't fused is illegal too, but the promise knows the reason.
        named = _none if formats is None else formats.format
        check(geometry, fired.counts, fired.places, fired.left, len(self.heads), named)
        check_rewritten(program)
        return program

    def head_program(self, name: str) -> Program:
        """Trace what a probe head makes of its state; its pools are the inputs, and one op is all of it.

        Raises:
            FusionFailed: it is not one op.
            UsageError: the checkpoint has no such head.
        """
        states = [s for s in state_specs(self.checkpoint.geometry, self.context, (name,)) if s.head]
        answer = Answer(self.net, name)
        with self.progress.stage(f"trace {name}"):
            # Its state without the largest scores, which only say what the pools are relative to.
            program = trace_head(answer, empty_state(tuple(states[1:])), parameter_sources(answer), name)
        check_traced(program)
        fired = self._rewrite(program, head_pipeline(), name)
        check_head(fired.counts, fired.left)
        check_rewritten(program)
        return program

    def _rewrite(self, program: Program, passes: list[Pass], phase: str) -> Fired:
        """Run passes in order; all that they did and left."""
        facts, whole = {"traced"}, Fired()
        with self.progress.stage(f"rewrite {phase}", len(passes)) as task:
            for one in passes:
                if not one.needs <= facts:
                    raise AssertionError(f"{one.name} needs {sorted(one.needs - facts)}")
                fired = one.run(program)
                facts |= one.leaves
                log.debug("%s: %s fired %s", phase, one.name, fired.counts)
                whole.places += fired.places
                whole.left += fired.left
                task.advance()
        program.graph.lint()
        return whole

    def fusions(self) -> dict[str, Fusion]:
        """Expected and made, by rewrite; of the phases, the one that made fewer.

        A rewrite that no geometry owes is expected where it fired or where it looked and refused.
        """
        layers = self.checkpoint.geometry.num_layers
        format_of = _none if self.formats is None else self.formats.format
        owed = promises(self.checkpoint.geometry, len(self.heads), format_of)
        counts = {phase: Counter(n for n, _ in places) for phase, places in self.places.items()}
        tried = {n for c in counts.values() for n in c} | {x.op for left in self.left.values() for x in left}
        table = {}
        for name in [*owed, *sorted(tried - set(owed))]:
            phase = min(counts, key=lambda p: counts[p][name])
            fused = counts[phase][name]
            # A fused op looks at many places that only end like it: those are misses only if it falls short.
            short = name not in owed or fused < owed[name].total(layers)
            left = tuple(
                LeftUnfused(x.layer if x.layer >= 0 else None, x.node, x.reason)
                for x in self.left[phase]
                if x.op == name and short
            )
            expected = owed[name].total(layers) if name in owed else fused + len(left)
            table[name] = Fusion(expected, fused, left)
        return table

    def notes(self) -> list[str]:
        """What the rewrites did that a reader of node counts should know."""
        if any(name == "drop_unread_mixing" for name, _ in self.places.get("decode", [])):
            return [
                "the last block's lane mixing is left out: the mean over lanes that follows does not depend on it"
            ]
        return []

    def state_bytes(self) -> tuple[int, dict[str, int]]:
        """Bytes of state at the context: total and by part."""
        parts = state_bytes(self.stored)
        total = parts.pop("total")
        return total, parts

    # --- the reference -----------------------------------------------------------------------------

    def use_stored_weights(
        self, weights: Iterable[StoredWeight], activations: Activations | None, half: bool = False, cache: str = "fp32"
    ) -> None:
        """Round the reference as the artifact is rounded, compute as its runtime does, and measure the cost.

        Args:
            activations: how the runtime rounds the inputs of integer matrices, or None where it doesn't.
            half: whether everything that isn't compressed is stored in half precision.
            cache: the form that new keys and values are rounded to.
        """
        self._use(Scheme.of(weights, activations, half, cache))

    def use_recorded_scheme(self, record: Mapping[str, Any]) -> None:
        """As :meth:`use_stored_weights`, from a report's record."""
        self._use(Scheme.from_record(record))

    def _use(self, scheme: Scheme) -> None:
        self.scheme = scheme
        if replace(scheme, cache="fp32") != Scheme():
            self._round_weights(scheme)
        if scheme.cache != "fp32":
            before = self._probed()
            self.net.stored = partial(caches.stored, form=scheme.cache)
            self.cache_loss = parity.loss(before, self._probed())

    def _round_weights(self, scheme: Scheme) -> None:
        step = Step(self.net, self.context)
        sources, halves = parameter_sources(step), set(scheme.halves)
        tensors = [*step.named_parameters(), *step.named_buffers()]
        before = self.plain_logits() if self.original is None else self.original
        with torch.inference_mode():
            for path, value in tensors:
                source = sources.get(path)
                if source is not None and (source[0], source[2]) in halves:
                    value.copy_(value.half().float())
            round_as_read(step, scheme.as_read)
            if scheme.activations is not None:
                self._quantized = quantize_parameters(tensors, sources, quantizers(scheme))
                self.products = partial(DynamicProducts, self._quantized)
            self._formed = round_parameters(tensors, sources, plain_forms(scheme))
        if scheme.half:
            # Traced anew, so that constants are folded into the rounded weights; codes are numbers to the reference.
            told, self.rotate = (dict(self.places), dict(self.left)), False
            self.stored_program, (self.places, self.left) = self.program(None), told
            round_floats(self.stored_program, {(s, n) for s, n, _ in scheme.forms})
        self.scheme_loss = parity.loss(before, self._probed())

    def _probed(self) -> NDArray[np.float32]:
        """Logits [T, V] of the tokens by which a scheme is judged, under what is in use by now."""
        with torch.inference_mode(), self.products():
            return self._logits(self._probe())

    def _probe(self) -> torch.Tensor:
        """Tokens [T] that tell what a scheme does to the model."""
        return torch.from_numpy(parity.draw(self.checkpoint.geometry.vocab_size, self.context, 7, 0)[-1][0])

    def plain_logits(self) -> NDArray[np.float32]:
        """Of the reference as it is, in float32, for the tokens by which a scheme is judged: [T, V]."""
        with torch.inference_mode():
            return np.asarray(self.net(self._probe().unsqueeze(0))[0])

    def matrices(self) -> dict[tuple[str, int], rows.Matrix]:
        """The numbers that the reference computes with, under the scheme in use, by the parameter's path and site."""
        step, halves = Step(self.net, self.context), set(self.scheme.halves)
        own = _none if self.formats is None else self.formats.imported
        as_read = self.scheme.as_read
        return rows.matrices(step, halves, self._quantized, self._formed, self.scheme.half, own, as_read)

    def reference(self, seed: int) -> list[parity.Case]:
        """Seeded sequences with the reference's logits (uncached) and its state at their ends.

        Where the scheme rounds at run time, ``sensitivity`` tells afterwards how far they move by the last bits.
        """
        cases = []
        drawn = parity.draw(self.checkpoint.geometry.vocab_size, self.context, seed, self.ring_rows)
        with self.progress.stage("run the reference", len(drawn)) as task, torch.inference_mode(), self.products():
            for tokens, prompt in drawn:
                logits, state = self._run(tokens)
                if not np.isfinite(logits).all():
                    raise BadInput(
                        "the model's own logits are not finite",
                        where=self.checkpoint.source.path_name,
                        fix="its weights are damaged or overflow; check the file it was made from",
                    )
                best, margin = logits.argmax(-1), parity.margins(logits)
                cases.append(parity.Case(tokens, prompt, logits, best, state, margin))
                task.advance()
        if self.scheme.rounds_at_run_time:
            with self.progress.stage("measure the reference's sensitivity"), torch.inference_mode():
                self.sensitivity = self._sensitivity(cases)
        return cases

    def _logits(self, tokens: torch.Tensor) -> NDArray[np.float32]:
        """Of a sequence [T], under the scheme in use: [T, V]."""
        if self.stored_program is not None:
            return self._stepper().feed(tokens.numpy())
        return np.asarray(self.net(tokens.unsqueeze(0))[0])

    def _stepper(self) -> Stepper:
        assert self.stored_program is not None
        return Stepper(self.stored_program, empty_state(self.states), self.max_chunk)

    def _run(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], dict[str, NDArray[Any]]]:
        if self.stored_program is not None:
            stepper = self._stepper()
            logits = stepper.feed(tokens)
            return logits, self._cut(stepper.state, len(tokens))
        sequence = torch.from_numpy(tokens)
        # What a probe head answers at the end is compared as a state is.
        state = self._state(sequence)
        for name in self.heads:
            # As a mean: by themselves, pool and sum of weights both move with the largest score so far.
            state[f"probe_{name}_pool"] = state[f"probe_{name}_pool"] / state[f"probe_{name}_sum"]
            state[name] = self.net.head(name, sequence).numpy()
        return self.net(sequence.unsqueeze(0))[0].numpy(), state

    def _sensitivity(self, cases: list[parity.Case]) -> parity.Sensitivity:
        """Largest change of logits and states when what is rounded at run time moves by its last bits."""
        found = parity.Sensitivity()
        steps = len(self.net.layers) * sum(len(case.tokens) for case in cases)
        for seed in range(parity.MOST_JITTERS):
            if found.is_told_by(seed, steps):
                break
            jitter = torch.Generator().manual_seed(seed)
            products = nullcontext() if self.scheme.activations is None else self.products(jitter=jitter)
            with self.net.jittered(jitter), products:
                for case in cases:
                    found = found.widened(case, *self._run(case.tokens))
        return found

    def _state(self, tokens: torch.Tensor) -> dict[str, NDArray[Any]]:
        state = empty_state(self.states)
        chunk = min([len(tokens), *([self.ring_rows] if self.ring_rows else [])])
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            _, state = self.net.step(piece, torch.tensor([start]), state, self.context, self.heads)
        return self._cut(state, len(tokens))

    def _cut(self, state: Mapping[str, torch.Tensor], rows: int) -> dict[str, NDArray[Any]]:
        return {s.name: (state[s.name][:rows] if s.cache else state[s.name]).numpy() for s in self.states}

    def streams(self, tokens: NDArray[np.int64], count: int) -> list[NDArray[np.float32]]:
        """The stream behind each block [T, n, C], of the first ``count`` tokens at least."""
        with torch.inference_mode(), self.products():
            if self.stored_program is None:
                return [s.numpy() for s in self.net.streams(torch.from_numpy(tokens))[1:]]
            stepper = self._stepper()
            chunks = [stepper.chunk(piece)[1] for piece in stepper.pieces(tokens[: max(count, 2)])]
        # A block whose stream nothing reads is left out, as the artifact leaves it out.
        return [torch.cat([c[block] for c in chunks]).numpy() for block in sorted(chunks[0])]
