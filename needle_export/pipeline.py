"""The whole compile on one page: what runs, in what order, what is handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from needle_export import __version__
from needle_export.appfiles import check_app_files, find_tokenizer, noted, write_app_files
from needle_export.assemble import check_files, describe_artifact, file_info
from needle_export.bundle.arrays import write_arrays
from needle_export.bundle.cache import Cache
from needle_export.bundle.publish import publish, stage
from needle_export.checkpoint.files import file_sha256
from needle_export.config.device import Device
from needle_export.config.options import BuildOptions, usual_buckets
from needle_export.config.progress import Progress
from needle_export.config.rules import Rule
from needle_export.errors import BadInput, UsageError, VerificationFailed
from needle_export.estimates import with_estimates
from needle_export.loading import Loaded, load
from needle_export.measure import parity, rounded, weights
from needle_export.measure.locate import locate
from needle_export.measure.packing import Packing
from needle_export.provenance import checkpoint_info, metadata, prompts_info, versions
from needle_export.report.schema import (
    REPORT_NAME,
    SCHEMA,
    TOOL,
    Artifact,
    PlanInfo,
    Report,
    Tool,
    dump_report,
    load_report,
)
from needle_export.reuse import Earlier
from needle_export.runtimes import check_all, check_native
from needle_export.targets import find_target
from needle_export.targets.base import LoweringOptions, ReadsWeights, RoundsResults, Target
from needle_export.timing import STEPS, check_measurable, usual_prompts, with_measurements

if TYPE_CHECKING:
    from needle_export.compile import Compiler

#: What a later verification compares against, beside the artifact.
REFERENCE_NAME = "reference.npz"


def build(
    options: BuildOptions,
    progress: Progress,
    plan: PlanInfo | None = None,
    cache: Cache | None = None,
    device: Device | None = None,
) -> Report:
    """Read, slice, merge, trace, rewrite, lower, verify, measure, publish.

    Args:
        plan: the recipe and the device that the options come from, for the report.
        cache: of what earlier builds made and verified; None neither reads nor keeps anything.
        device: that the artifact is for, and whose latency is to be estimated.

    Raises:
        NeedleExportError: whatever stopped it; then nothing was published.
    """
    with stage(options.out) as folder:
        target = find_target(options.target)
        # Here already, as it says what is wrong with the environment.
        others = target.other_runtimes(folder)
        _check_tolerances(options)
        loaded = load(options, progress)
        tokenizer = find_tokenizer(options, loaded[0], progress)
        earlier = Earlier(cache, options, loaded[0], loaded[1])
        report = earlier.built(others, folder, progress, partial(_make, options, loaded, folder, progress, earlier))
        # From here on what the cache knows nothing of: this plan, this device, here and now.
        # An evaluator's own speed says nothing about a device's.
        if options.bench and target.status == "verified-on-runtime":
            report = with_measurements(
                report,
                folder,
                threads=options.threads,
                steps=min(STEPS, options.context),
                prompts=usual_prompts(options.context),
                progress=progress,
                shown=options.out,
            )
        recipe = options.recipe() | prompts_info(options)
        report = noted(replace(report, checkpoint=checkpoint_info(*loaded), options=recipe, plan=plan), tokenizer)
        write_app_files(folder, report, tokenizer)
        devices = () if device is None else (device,)
        report = with_estimates(report, folder, usual_prompts(options.context), devices)
        (folder / REPORT_NAME).write_bytes(dump_report(report))
        publish(folder, options.out)
    return report


def _make(options: BuildOptions, loaded: Loaded, folder: Path, progress: Progress, earlier: Earlier) -> Report:
    """A new artifact in an empty folder, verified, with all that is known of it but how fast it is."""
    from needle_export.codebooks import Codebooks
    from needle_export.compile import Compiler

    checkpoint, _, dropped = loaded
    with Packing() as packing:
        compiler = Compiler(checkpoint, options.context, progress, options.heads)
        compiler.use_caches(options.cache_form)
        target = find_target(options.target)
        multiple = target.chunk_multiple(compiler.states, options.os)
        lowering = LoweringOptions(
            options.schemes,
            options.context,
            options.opset,
            compiler.max_chunk,
            metadata(checkpoint, options),
            _buckets(options, compiler, multiple) if target.fixed_shapes else (),
            options.heads,
            options.os,
        )
        compiler.use_formats(Codebooks(checkpoint, options.schemes), target.folds_into_matrices(options.schemes))
        # After everything that can be refused: it may take minutes.
        _improve(compiler, target, options, progress, earlier)
        with progress.stage(f"lower to {target.name}"):
            compiled = target.compile(compiler, compiler.stored, checkpoint.geometry.head_vocab, folder, lowering)
        packing.start([folder / name for name in compiled.files])
        compiler.use_stored_weights(
            compiled.weights,
            target.activations(options.schemes),
            target.half(options.schemes),
            # An evaluator keeps states as floats; what halves do is told by its rounded run.
            options.cache_form if target.status == "verified-on-runtime" else "fp32",
        )
        equal = _compare_weights(target, folder, compiler, progress, options.target, "nothing was published")
        cases = compiler.reference(options.seed)
        measured = _verify_new(target, folder, compiler, cases, options, progress)
        measured["weights"] = equal
        others = target.other_runtimes(folder)
        runtimes, told = check_all(target, others, measured, str(options.schemes), cases, progress)
        compiled.notes += told
        # Before anything is timed, so that times are of a machine that does nothing else.
        with progress.stage("pack the files"):
            packed = packing.result()
        artifact = describe_artifact(
            target, options, folder, compiler, compiled, packed, measured, runtimes, dropped, versions()
        )
    recipe = options.recipe() | prompts_info(options)
    return Report(SCHEMA, Tool(TOOL, __version__), checkpoint_info(*loaded), recipe, None, (artifact,))


def _check_tolerances(options: BuildOptions) -> None:
    """Refuse bounds above a scheme's own, where that is known before the reference has run."""
    target = find_target(options.target)
    kept = target.status != "verified-on-runtime" or options.cache_form == "fp32"
    if target.activations(options.schemes) is not None or not kept:
        return  # by the reference's sensitivity; the tighter of both holds then
    own = parity.tolerance_of(str(options.schemes), None)
    for name, value in options.tolerances:
        if value > getattr(own, name):
            raise UsageError(f"{value:g} for {name} is looser than the scheme's own {getattr(own, name):g}",
                             where="--tolerances", fix="a bound may only be tightened; leave it out")


def _improve(
    compiler: Compiler, target: Target, options: BuildOptions, progress: Progress, earlier: Earlier | None = None
) -> None:
    """Better rounding than to nearest, if that is asked for; found anew if not by an earlier build."""
    if options.rounding == "nearest":
        return
    from needle_export.improvement import Improvement

    compiler.original = compiler.plain_logits()
    improvement = Improvement(compiler.net, compiler.checkpoint, target, options)
    if earlier is None:
        improvement.run(progress)
    else:
        earlier.improved(improvement, progress)


def _buckets(options: BuildOptions, compiler: Compiler, multiple: int) -> tuple[int, ...]:
    """Prefill lengths: those asked for, or the usual ones that fit, or the longest that does.

    Args:
        multiple: what a length is a multiple of.

    Raises:
        UsageError: one asked for is longer than a ring of the model, or isn't such a multiple.
    """
    limit = compiler.ring_rows or options.context  # a ring is shorter than the context
    limit -= limit % multiple
    if options.buckets is None:
        return usual_buckets(limit)
    for bucket in options.buckets:
        if bucket > limit:
            raise UsageError(f"{bucket} tokens are more than the window of {limit}", where="--buckets")
        if bucket % multiple:
            fix = f"choose a multiple of {multiple}"
            raise UsageError(f"a prefill of {bucket} tokens can't be written at once", where="--buckets", fix=fix)
    return options.buckets


def verify(dist: Path, *, checkpoint: str | None, progress: Progress) -> Report:
    """Check a published folder: its files' hashes, then the artifact in its runtime.

    Without a checkpoint it is compared with what the build recorded of the reference (every position's best
    token and a sample of logit columns); with one, with the reference itself, and its matrices with the reference's.
    An artifact that an evaluator verifies is also compared in the runtime that it is for, if this machine has it.

    Returns:
        The folder's report, with what became of its artifacts in such a runtime, here.

    Raises:
        VerificationFailed: a file isn't the one described, or the artifact computes something else.
    """
    report, fix = load_report(dist), "build it again, and compare the versions in the report"
    for artifact in report.artifacts:
        check_files(dist, artifact)
    check_app_files(dist, report)
    checked = []
    for artifact in report.artifacts:
        target = find_target(artifact.target)
        tolerance = parity.recorded_tolerance(artifact.weights, artifact.parity)
        if checkpoint is None:
            cases, columns = _recorded(dist, artifact)
        else:
            compiler = _recompiler(report, artifact, checkpoint, progress)
            _compare_weights(target, dist, compiler, progress, str(dist), fix)
            cases, columns = compiler.reference(_recorded_option(report, "seed")), None
        runner = target.open(dist)
        with progress.stage(f"verify {artifact.target}", len(cases)) as task:
            measured = parity.compare(runner, cases, columns, task.advance)
        fault = parity.judge(measured, tolerance)
        if fault:
            raise VerificationFailed(fault, where=str(dist), fix=fix)
        others = target.other_runtimes(dist) if target.status == "verified-by-evaluator" else []
        checked.append(check_native(artifact, others, tolerance, cases, columns, dist, progress))
    return replace(report, artifacts=tuple(checked))


def bench(
    dist: Path,
    *,
    threads: int,
    steps: int,
    prompt: tuple[int, ...] | None,
    progress: Progress,
    compute_units: str | None = None,
    devices: Sequence[Device] = (),
) -> Report:
    """The report of a published folder with times measured now, on this machine.

    Args:
        prompt: prompt lengths to time; None takes the usual ones that the context has room for.
        compute_units: one of ``COMPUTE_UNITS`` for artifacts that run in Core ML; None takes all.
        devices: to estimate latency for beside it.

    Raises:
        UsageError: a prompt or the number of steps is longer than the context, or a choice is another target's.
        Unsupported: the artifact's runtime isn't on this machine.
    """
    report = load_report(dist)
    check_measurable(report, dist, threads, compute_units)
    context = int(_recorded_option(report, "context"))
    for option, length in [("--prompt", n) for n in prompt or ()] + [("--steps", steps)]:
        if length > context:
            raise UsageError(f"{length} tokens don't fit in the context of {context}", where=option)
    prompts = prompt or usual_prompts(context)
    report = with_measurements(
        report, dist, threads=threads, steps=steps, prompts=prompts, progress=progress, shown=dist,
        compute_units=compute_units,
    )  # fmt: skip
    return with_estimates(report, dist, prompts, devices)


def _recorded_option(report: Report, key: str) -> Any:
    if key not in report.options:
        raise BadInput(f"the report's options lack {key!r}", where=REPORT_NAME, fix="build again")
    return report.options[key]


def logits(dist: Path, tokens: NDArray[np.int64], progress: Progress) -> NDArray[np.float32]:
    """The artifact's own logits for tokens [T]: prefill, and decode for the last up to 64. [T, V]."""
    report = load_report(dist)
    if len(report.artifacts) != 1:
        raise UsageError(
            f"the folder holds {len(report.artifacts)} artifacts", where=str(dist), fix="name one"
        )
    runner = find_target(report.artifacts[0].target).open(dist)
    forced = min(parity.STEPS, len(tokens) // 2)
    parts = []
    with progress.stage("compute logits", len(tokens)) as task:
        for start in range(0, len(tokens) - forced, runner.max_chunk):
            chunk = tokens[start : min(start + runner.max_chunk, len(tokens) - forced)]
            parts.append(runner.feed(chunk))
            task.advance(len(chunk))
        for index in range(len(tokens) - forced, len(tokens)):
            parts.append(runner.feed(tokens[index : index + 1]))
            task.advance()
    return np.concatenate(parts)


def _compare_weights(
    target: Target, folder: Path, compiler: Compiler, progress: Progress, where: str, fix: str
) -> dict[str, int] | None:
    """Hold an artifact's matrices against the reference's; the numbers for the report, or None if it can't be read.

    Before anything is run: where this fails, it names the row, and logits could only name the block.

    Raises:
        VerificationFailed: a matrix isn't the checkpoint's, or isn't where it belongs.
    """
    if not isinstance(target, ReadsWeights):
        return None
    with progress.stage("compare the weights"):
        compared = weights.compare(target.read_matrices(folder), compiler.matrices())
    fault = compared.fault()
    if fault:
        raise VerificationFailed(fault, where=where, fix=fix)
    return compared.table()


def _verify_new(
    target: Target,
    folder: Path,
    compiler: Compiler,
    cases: list[parity.Case],
    options: BuildOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Compare a fresh artifact with the reference; on failure, say in which block it goes wrong."""
    rounds = compiler.scheme.activations is not None
    tolerance = parity.tolerance_of(str(options.schemes), compiler.sensitivity, rounds, compiler.scheme.cache)
    tolerance = tolerance.tightened(dict(options.tolerances))
    runner = target.open(folder)
    with progress.stage("verify", len(cases)) as task:
        measured = parity.compare(runner, cases, None, task.advance)
    fault = parity.judge(measured, tolerance)
    if fault:
        spot = locate(target.open(folder, inner=True), compiler.streams, cases[0], tolerance.logits)
        raise VerificationFailed(
            f"{fault}; it goes wrong first {spot}", where=options.target, fix="nothing was published"
        )
    table = measured.table(tolerance)
    path = folder / REFERENCE_NAME
    write_arrays(path, parity.pack(cases, options.seed))
    table["reference"] = asdict(file_info(folder, REFERENCE_NAME))
    table["scheme_loss"], table["cache_loss"] = compiler.scheme_loss, compiler.cache_loss
    table["scheme"] = compiler.scheme.record()
    table["sensitivity"] = None if compiler.sensitivity is None else asdict(compiler.sensitivity)
    if isinstance(target, RoundsResults):
        with progress.stage("round every op", rounded.STEPS) as task:
            table["rounded"] = rounded.measure_rounded(target.rounded(folder), cases[0], task.advance)
    return table


def _recorded(dist: Path, artifact: Artifact) -> tuple[list[parity.Case], NDArray[np.int64]]:
    expected = artifact.parity.get("reference", {})
    path = dist / REFERENCE_NAME
    if not path.is_file() or file_sha256(path) != expected.get("sha256"):
        raise VerificationFailed(
            "the recorded reference is missing or changed",
            where=str(path),
            fix="give --checkpoint, or build again",
        )
    with np.load(path, allow_pickle=False) as archive:
        return parity.unpack({name: archive[name] for name in archive.files})


def _recompiler(report: Report, artifact: Artifact, spec: str, progress: Progress) -> Compiler:
    """Of the build, with its reference under the artifact's scheme."""
    from needle_export.codebooks import Codebooks
    from needle_export.compile import Compiler

    if report.options.get("prompts"):
        raise UsageError(
            "the build was calibrated with prompts", where="--checkpoint", fix="verify without --checkpoint"
        )
    if report.checkpoint.lora:
        raise UsageError(
            "the build merged an adapter", where="--checkpoint", fix="verify without --checkpoint"
        )
    recipe = {key: _recorded_option(report, key) for key in ("target", "layers", "context", "weights")}
    heads = tuple(report.options.get("heads") or ())
    rules = tuple(Rule(*entry) for entry in report.options.get("rules") or ())
    rounding = report.options.get("rounding") or "nearest"
    options = BuildOptions(spec, Path("verify"), heads=heads, rules=rules, rounding=rounding, **recipe)
    checkpoint, _, _ = load(options, progress)
    if checkpoint.source.sha256 != report.checkpoint.sha256:
        raise BadInput("this is not the checkpoint that the build read", where=spec, fix="give the same file")
    compiler = Compiler(checkpoint, options.context, progress, options.heads)
    compiler.use_formats(Codebooks(checkpoint, options.schemes), False)
    _improve(compiler, find_target(artifact.target), options, progress)
    compiler.use_recorded_scheme(artifact.parity.get("scheme") or {})
    return compiler
