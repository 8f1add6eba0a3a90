"""What a build may take from earlier ones: verified artifacts, and rounded matrices; and by what they are found again.

A key is a hash of everything that decides the content: the inputs by their hashes, the options, this package's own
source, every distribution that takes part, and the machine, as verification ran on it. So nothing has to be thrown away
when something changes; it is just not found any more. What belongs to here and now, times and memory, isn't kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from needle_export.bundle.cache import Cache
from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.files import file_sha256
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.config.units import quantity
from needle_export.errors import BadInput, UsageError
from needle_export.measure.latency import host
from needle_export.report.schema import REPORT_NAME, AdapterInfo, Report, dump_report, load_report
from needle_export.targets.base import OtherRuntime

FOLDER, LIMIT = "NEEDLE_EXPORT_CACHE", "NEEDLE_EXPORT_CACHE_LIMIT"
"""Environment variables: the cache's folder, or ``off``; and how much it may take, with a unit."""

OFF = "off"

DEFAULT_LIMIT = 10 * 10**9
"""Bytes. An fp32 artifact of the published model takes 0.5 GB, one of int4 with its rounded matrices 0.2 GB."""

ROOTS = {
    "": ("torch", "numpy", "safetensors", "ml_dtypes"),
    "onnx": ("onnx", "onnx-ir", "onnxruntime"),
    "tflite": ("ai-edge-litert", "litert-converter", "litert-torch"),
    "coreml": ("coremltools", "cattrs"),
}
"""Distributions that make and run the artifacts of all targets (``""``) and of each; what these need takes part too."""

#: Settings of mathematical libraries and runtimes, which may change the order of sums.
_SETTINGS = ("OMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "NEEDLE_EXPORT_TFLITE_PYTHON")

_LEVELS = "levels.npz"

_PACKAGE = Path(__file__).parent

#: Of the note that a report has where its artifact wasn't made by the build that writes it.
_TAKEN = "taken from the cache: an earlier build with the same inputs and software made and verified it on"


def open_cache() -> Cache | None:
    """The user's cache, or None where it is switched off.

    Raises:
        UsageError: the limit is no size.
    """
    named = os.environ.get(FOLDER, "")
    if named == OFF:
        return None
    if named:
        folder = Path(named)
    else:
        from platformdirs import user_cache_path

        folder = user_cache_path("needle-export", appauthor=False)
    return Cache(folder.absolute(), _limit())


def _limit() -> int:
    text = os.environ.get(LIMIT, "")
    if not text:
        return DEFAULT_LIMIT
    try:
        return int(quantity(text, "bytes"))
    except ValueError as error:
        raise UsageError(str(error), where=LIMIT) from None


def was_taken(report: Report) -> bool:
    """Whether a build found its artifact in the cache."""
    return any(note.startswith(_TAKEN) for artifact in report.artifacts for note in artifact.notes)


class Earlier:
    """What earlier builds made for the inputs of this one.

    Args:
        kept: the cache, or None for none.
        checkpoint: of the build, at its depth.
        adapters: merged into it.
    """

    def __init__(
        self, kept: Cache | None, options: BuildOptions, checkpoint: Checkpoint, adapters: Sequence[AdapterInfo]
    ) -> None:
        self._kept, self._options, self._checkpoint = kept, options, checkpoint
        self._adapters = [a.sha256 for a in adapters]

    def built(
        self, others: Sequence[OtherRuntime], folder: Path, progress: Progress, make: Callable[[], Report]
    ) -> Report:
        """An artifact in ``folder``, from the cache or new; its report, not yet with times.

        Args:
            others: further runtimes that the target has here.
            folder: empty.
            make: makes and verifies it.

        Raises:
            NeedleExportError: as ``make``.
        """
        kept, key = self._kept, self.artifact_key(others)
        if kept is None or key is None:
            return make()
        options, checkpoint = self._options, self._checkpoint
        depth = checkpoint.geometry.num_layers
        what = f"{options.target} {options.schemes}, {depth} layers, {options.context} tokens"
        with kept.locked(key, what, progress):
            report = _taken(kept, key, folder, progress)
            if report is None:
                report = make()
                (folder / REPORT_NAME).write_bytes(dump_report(report))
                with progress.stage("keep it in the cache"):
                    kept.keep(key, f"{what}, of {checkpoint.source.path_name}", lambda into: _copy(folder, into))
        return report

    def improved(self, improvement: Any, progress: Progress) -> None:
        """Round the matrices of the reference, to what an earlier build has found where there is one.

        Args:
            improvement: an ``improvement.Improvement`` of the build.

        Raises:
            BadInput: the prompts can't be read.
        """
        kept, key = self._kept, self.levels_key(improvement.forms)
        if kept is None or key is None:
            improvement.run(progress)
            return
        checkpoint = self._checkpoint
        what = f"matrices rounded for {self._options.target} {self._options.schemes}, {self._options.rounding}, "
        what += f"{checkpoint.geometry.num_layers} layers"
        with kept.locked(key, what, progress):
            found = kept.find(key)
            if found is not None:
                try:
                    with progress.stage("take rounded matrices from the cache"):
                        improvement.restore(_read(found / _LEVELS))
                    return
                except BadInput:
                    kept.drop(key)
            improvement.run(progress)
            with progress.stage("keep rounded matrices in the cache"):
                arrays = improvement.found()
                kept.keep(key, f"{what}, of {checkpoint.source.path_name}", lambda into: _write(into, arrays))

    def artifact_key(self, others: Sequence[OtherRuntime]) -> str | None:
        """Of an artifact with its verification; None without a cache, or where the prompts can't be read.

        The build then says what is wrong with these.
        """
        runtimes = [[o.name, o.version, o.reason, o.native, o.open is not None] for o in others]
        return self._key("artifact", {"recipe": self._options.recipe(), "runtimes": runtimes})

    def levels_key(self, forms: list[list[Any]]) -> str | None:
        """Of rounded matrices: what they are rounded from, to which forms, how, and for which prompts.

        Contexts, prefill lengths and heads have no part in it, so builds that differ in those share them.
        """
        depth, rounding = self._checkpoint.geometry.num_layers, self._options.rounding
        return self._key("levels", {"layers": depth, "rounding": rounding, "forms": forms})

    def _key(self, kind: str, parts: dict[str, Any]) -> str | None:
        if self._kept is None:
            return None
        calibrate = self._options.calibrate
        try:
            prompts = None if calibrate is None else file_sha256(Path(calibrate))
        except OSError:
            return None
        parts = parts | {
            "checkpoint": self._checkpoint.source.sha256,
            "adapters": self._adapters,
            "prompts": prompts,
            "surroundings": surroundings(self._options.target),
        }
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"


def _taken(kept: Cache, key: str, folder: Path, progress: Progress) -> Report | None:
    with progress.stage("look into the cache"):
        found = kept.find(key)
        if found is None:
            return None
        try:
            report = load_report(found)
        except BadInput:
            kept.drop(key)
            return None
        _copy(found, folder)
    note = f"{_TAKEN} {host()}; needle-export verify runs it again"
    return replace(report, artifacts=tuple(replace(a, notes=(*a.notes, note)) for a in report.artifacts))


def _write(folder: Path, arrays: dict[str, NDArray[Any]]) -> None:
    np.savez(folder / _LEVELS, allow_pickle=False, **arrays)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _copy(source: Path, into: Path) -> None:
    """Every file of a folder into an empty one."""
    for path in sorted(source.rglob("*")):
        if path.is_dir():
            (into / path.relative_to(source)).mkdir()
        else:
            shutil.copyfile(path, into / path.relative_to(source))


def surroundings(target: str) -> dict[str, Any]:
    """What takes part in every build for a target beside its inputs: source, distributions, machine."""
    return {
        "source": sourcefile_sha256(),
        "python": platform.python_version(),
        "distributions": _distributions((*ROOTS[""], *ROOTS[target])),
        "machine": [host(), platform.mac_ver()[0], platform.libc_ver(), _processor_flags()],
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)},
    }


def sourcefile_sha256() -> str:
    """Of every file of this package, in hex, so that an edit in a checkout is a change as any other.

    Devices and recipes are left out: what they choose is among the options.
    """
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        name = path.relative_to(_PACKAGE)
        if path.is_file() and "__pycache__" not in name.parts and name.parts[0] not in ("devices", "recipes"):
            digest.update(f"{name.as_posix()} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


@cache
def _distributions(roots: Iterable[str]) -> dict[str, str]:
    """Versions of distributions and of all that they need, as far as they are installed."""
    found: dict[str, str] = {}
    names = list(roots)
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            one = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = one.version
        needed = [re.match(r"[\w.-]+", r) for r in one.requires or () if "extra ==" not in r]
        names += [match.group() for match in needed if match]
    return found


def _processor_flags() -> str:
    """What the processor offers beyond its name, which a virtual machine may cut."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return ""
