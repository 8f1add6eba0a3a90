"""The files of onnxruntime-web that a site needs: from a folder, or from the npm package, checked by its hash."""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from needle_export.checkpoint.files import atomic_write
from needle_export.errors import BadInput, NeedleExportError, Unsupported

log = logging.getLogger(__name__)

PACKAGE = "onnxruntime-web"

#: The version that sites are tested with.
VERSION = "1.30.0"

#: Of its package, as npm has it.
INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="

#: The WebAssembly backend alone, the smallest build that there is: module, loader and machine code.
MODULE = "ort.wasm.min.mjs"
FILES = (MODULE, "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")

#: Seconds that fetching it may take.
_PATIENCE = 600

_MARK = re.compile(r"ONNX Runtime Web v(\d+\.\d+\.\d+\S*)")


def put_runtime(out: Path, given: Path | None, cache: Path | None) -> str:
    """Copy the runtime's files into a folder; its version.

    Args:
        given: folder that has them: the npm package's own, its ``dist``, or a copy of that; None to fetch the package.
        cache: folder in which a fetched package is kept; None to keep none.

    Raises:
        BadInput: files are missing from ``given`` or aren't onnxruntime-web's, or what npm fetched isn't the package
            that was tested.
        Unsupported: npm is missing or can't fetch it.
    """
    if given is not None:
        place, version = _looked_at(given)
        for name in FILES:
            shutil.copyfile(place / name, out / name)
        return version
    with tarfile.open(fileobj=io.BytesIO(_package(cache))) as package:
        for name in FILES:
            member = package.extractfile(f"package/dist/{name}")
            assert member is not None  # the package is the one that was tested
            (out / name).write_bytes(member.read())
    return VERSION


def _looked_at(folder: Path) -> tuple[Path, str]:
    """Where in a folder the runtime's files are, and their version."""
    place = folder / "dist" if (folder / "dist" / MODULE).is_file() else folder
    fix = f"give the dist folder of the npm package {PACKAGE}"
    missing = next((name for name in FILES if not (place / name).is_file()), None)
    if missing:
        raise BadInput(f"there is no {missing}", where=str(folder), fix=fix)
    with (place / MODULE).open(encoding="utf-8", errors="replace") as handle:
        found = _MARK.search(handle.read(1000))
    if not found:
        raise BadInput(f"this isn't {PACKAGE}'s", where=str(place / MODULE), fix=fix)
    return place, found[1]


def _package(cache: Path | None) -> bytes:
    """The tested version's package, from the cache or through npm."""
    kept = None if cache is None else cache / f"{PACKAGE}-{VERSION}.tgz"
    if kept is not None and kept.is_file():
        package = kept.read_bytes()
        if _hash(package) == INTEGRITY:
            return package
        log.warning("%s: it is damaged and is fetched again", kept)
    package = _fetched()
    found = _hash(package)
    if found != INTEGRITY:
        raise BadInput(f"its hash is {found[:20]}…, not {INTEGRITY[:20]}…, so it isn't the one that was tested",
                       where=f"{PACKAGE} {VERSION} from npm", fix="give --runtime a folder that you trust")
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(kept) as handle:
                handle.write(package)
        except (OSError, NeedleExportError) as fault:
            log.warning("%s: the package couldn't be kept (%s)", kept, fault)
    return package


def _fetched() -> bytes:
    npm = shutil.which("npm")
    way = f"give --runtime the dist folder of {PACKAGE} {VERSION}"
    if npm is None:
        raise Unsupported(f"there is no {PACKAGE} here, and no npm to fetch it with", fix=f"install Node.js, or {way}")
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", scratch, "--loglevel", "error"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False, cwd=scratch,
                                 stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise Unsupported(f"npm took more than {_PATIENCE} s to fetch {PACKAGE} {VERSION}",
                              fix=f"check the network, or {way}") from None
        packages = list(Path(scratch).glob("*.tgz"))
        if run.returncode or len(packages) != 1:
            said = next((line.strip() for line in run.stderr.splitlines() if line.strip()), "no package came")
            raise Unsupported(f"npm couldn't fetch {PACKAGE} {VERSION} ({said[:200]})",
                              fix=f"check the network, or {way}")
        return packages[0].read_bytes()


def _hash(package: bytes) -> str:
    """As npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
