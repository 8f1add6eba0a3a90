"""A device on adb that benchmark_model runs on."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from needle_export.config.progress import Progress
from needle_export.errors import Unsupported, UsageError

#: Where benchmark_model is put, as its own instructions have it, and where files go.
FOLDER = "/data/local/tmp"
BENCHMARK = f"{FOLDER}/benchmark_model"

#: Seconds until a short command, the push of a model and a run must have ended.
_SHORT, _PUSH, _RUN = 30, 900, 900

_SAFE = re.compile(r"[A-Za-z0-9_./+-]+")


@dataclass(frozen=True)
class Adb:
    """One device.

    Attributes:
        program: adb.
        serial: of the device.
    """

    program: str
    serial: str

    @classmethod
    def find(cls, serial: str | None) -> Adb:
        """The device with this serial number, or the only one that is attached.

        Raises:
            Unsupported: there is no adb, or no such device that may be used.
            UsageError: there are several.
        """
        program = shutil.which("adb")
        if program is None:
            raise Unsupported("there is no adb on this machine", where="--adb",
                              fix="install Android's platform tools, or run benchmark_model yourself and import what it"
                              " prints with needle-export import-latency")
        states = _devices(_run([program, "devices"], _SHORT).stdout)
        if serial is not None and serial not in states:
            has = ", ".join(states) or "none"
            raise Unsupported(f"there is no device {serial!r}; attached: {has}", where="--adb", fix="attach it")
        if serial is None and len(states) > 1:
            raise UsageError(f"several devices are attached: {', '.join(states)}", where="--adb", fix="name one")
        if not states:
            raise Unsupported("no device is attached", where="--adb", fix="attach one and allow USB debugging on it")
        chosen = serial or next(iter(states))
        if states[chosen] != "device":
            raise Unsupported(f"the device {chosen} is {states[chosen]}", where="--adb",
                              fix="unlock it and allow USB debugging on it")
        return cls(program, chosen)

    def model(self) -> str:
        """What the device calls itself, with its Android version."""
        name = self._shell("getprop ro.product.model").strip() or self.serial
        version = self._shell("getprop ro.build.version.release").strip()
        return f"{name}, Android {version}" if version else name

    def day(self) -> str | None:
        """The device's date."""
        found = re.fullmatch(r"\d{4}-\d{2}-\d{2}", self._shell("date +%Y-%m-%d").strip())
        return found[0] if found else None

    def benchmark(self, model: Path, benchmark: str, *, threads: int, runs: int, progress: Progress) -> bytes:
        """What benchmark_model prints of a model; the model is removed from the device again.

        Raises:
            Unsupported: the device has no such program, or went away.
        """
        if not _SAFE.fullmatch(benchmark):
            raise UsageError(f"{benchmark[:60]!r} is no path on a device", where="--benchmark-model")
        there = f"{FOLDER}/needle-export-{secrets.token_hex(4)}.tflite"
        try:
            with progress.stage("push the model to the device"):
                self._adb("push", str(model), there, seconds=_PUSH)
            with progress.stage("run benchmark_model on the device"):
                command = f"{benchmark} --graph={there} --num_threads={threads} --num_runs={runs}"
                # Errors of its own go to standard error there, and belong to the output.
                printed = self._shell(f"{command} 2>&1", seconds=_RUN)
        finally:
            with contextlib.suppress(Unsupported):
                self._shell(f"rm -f {there}")
        return printed.encode()

    def _shell(self, command: str, *, seconds: int = _SHORT) -> str:
        return self._adb("shell", command, seconds=seconds)

    def _adb(self, *arguments: str, seconds: int) -> str:
        done = _run([self.program, "-s", self.serial, *arguments], seconds)
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        last = said[-1][:200] if said else "it said nothing"
        if done.returncode:
            if "not found" in last and arguments[0] == "shell" and "device" not in last:
                raise Unsupported(f"benchmark_model isn't on the device ({last})", where="--benchmark-model",
                                  fix=f"push it to {BENCHMARK}, or name its path there")
            raise Unsupported(f"adb failed on {self.serial}: {last}", where="--adb",
                              fix="attach the device again and repeat")
        return done.stdout


def _devices(listed: str) -> dict[str, str]:
    """Serial numbers and states, as ``adb devices`` lists them behind its first line."""
    found = {}
    for line in listed.partition("List of devices attached")[2].splitlines():
        parts = line.split("\t") if "\t" in line else line.split()
        if len(parts) >= 2:
            found[parts[0].strip()] = parts[1].strip()
    return found


def _run(command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        what = f"adb gave no answer within {seconds} s"
        raise Unsupported(what, where="--adb", fix="attach the device again") from None
    except OSError as error:
        raise Unsupported(f"adb can't be run ({error.strerror})", where="--adb") from None
