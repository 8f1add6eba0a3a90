"""What a device can't do with an artifact, known before an hour is spent on building it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from needle_export.config.figures import version_parts
from needle_export.config.options import IR_VERSIONS, OPSETS, OWN_OPS_SCHEMES, SYSTEMS, BuildOptions

if TYPE_CHECKING:
    from needle_export.config.device import Device, Runtime

#: By opset, the oldest ONNX Runtime that has run such a build.
ONNX_NEEDS = {21: "1.18.1", 23: "1.23.2", 24: "1.25.1"}

#: The release of TensorFlow that knows all versions of ops in a TFLite file, and in one with 4-bit matrices in blocks.
TFLITE_NEEDS, TFLITE_BLOCKS_NEED = "2.13.0", "2.18.0"

#: Schemes whose matrices are such blocks.
TFLITE_BLOCKS = ("int4",)

#: Systems by name, as people call them.
SYSTEM_NAMES = {"ios17": "iOS 17", "ios18": "iOS 18", "ios26": "iOS 26"}


def fitting_opset(runtime: Runtime) -> int | None:
    """The newest opset that a runtime takes, of those that can be emitted; None where it takes none."""
    return next((opset for opset in reversed(OPSETS) if not _too_new(runtime, opset)), None)


def refusals(device: Device, options: BuildOptions, resident: int | None) -> tuple[str, ...]:
    """A sentence for everything that a device can't do with an artifact, in order of how much depends on it.

    Args:
        device: that is to run it.
        options: of the build.
        resident: bytes that a session must have in memory at once, or None if that isn't known.
    """
    if not device.runtimes:
        return (f"{device.name} runs none of the runtimes that artifacts are made for: {_end(device.refusal)}",)
    runtime = device.runtime_of(options.target)
    if runtime is None:
        why = next((w.why for w in device.without if w.target == options.target), "")
        has = f"choose --target {' or '.join(device.targets)}"
        return (f"{device.name} has no runtime for {options.target}{': ' if why else ''}{why.rstrip('.')}; {has}.",)
    rules = {"onnx": _onnx, "tflite": _tflite, "coreml": _coreml}[options.target]
    return (*rules(device, runtime, options), *_listed(device, runtime, options), *_memory(device, resident))


def _onnx(device: Device, runtime: Runtime, options: BuildOptions) -> Iterator[str]:
    opset = options.opset
    assert opset is not None  # of an ONNX build, since its options were checked
    why = _too_new(runtime, opset)
    if not why:
        return
    fit = fitting_opset(runtime)
    own = next((s for s in options.schemes.schemes if s in OWN_OPS_SCHEMES), None)
    if fit is None:
        fix = "no opset that can be emitted is old enough"
    elif own is not None:
        fix = f"choose --opset {fit} and --weights fp32 or fp16, since {own} needs opset {OPSETS[-1]}"
    else:
        fix = f"choose --opset {fit}"
    yield f"Opset {opset} is too new for {_called(runtime)} on {device.name}: {why}; {fix}."


def _too_new(runtime: Runtime, opset: int) -> str:
    """Why a runtime doesn't take files of an opset, or empty."""
    assert runtime.opset is not None and runtime.ir is not None  # of an ONNX runtime, since its file was checked
    ir, oldest = IR_VERSIONS[opset], ONNX_NEEDS[opset]
    if opset > runtime.opset.value:
        return f"it runs opset {runtime.opset.value} at most"
    if ir > runtime.ir.value:
        return f"such a file has IR version {ir}, and it reads {runtime.ir.value} at most"
    if runtime.version.parts < version_parts(oldest):
        return f"the oldest version that has run such a build is {oldest}"
    return ""


def _tflite(device: Device, runtime: Runtime, options: BuildOptions) -> Iterator[str]:
    assert runtime.ops is not None  # of a TFLite runtime, since its file was checked
    blocks = next((s for s in options.schemes.schemes if s in TFLITE_BLOCKS), None)
    needs = TFLITE_BLOCKS_NEED if blocks else TFLITE_NEEDS
    if runtime.ops.parts >= version_parts(needs):
        return
    what = f"{blocks} is matrices in blocks, whose" if blocks else "A TFLite artifact has ops whose"
    old = runtime.ops.parts < version_parts(TFLITE_NEEDS)
    fix = "a newer runtime must come with the app" if old else "choose --weights int8 or fp16, or a newer runtime"
    yield (f"{what} versions came with TensorFlow {needs}, and {_called(runtime)} on {device.name} knows those of "
           f"{runtime.ops.value} at most; {fix}.")


def _coreml(device: Device, runtime: Runtime, options: BuildOptions) -> Iterator[str]:
    assert runtime.system is not None and options.os is not None  # since both were checked
    newest = runtime.system.value
    if SYSTEMS.index(options.os) <= SYSTEMS.index(newest):
        return
    lacks = "has no states, which such a package keeps its caches in" if newest == SYSTEMS[0] else "doesn't load it"
    yield (f"A package for {SYSTEM_NAMES[options.os]} is too new for {device.os} {device.os_version.value} on "
           f"{device.name}: the system {lacks}; choose --os {newest}, or a newer system.")


def _listed(device: Device, runtime: Runtime, options: BuildOptions) -> Iterator[str]:
    asked = {"weights": options.schemes.schemes, "cache": (options.cache_form,)}
    for refused in runtime.refuses:
        for option, values in asked.items():
            for value in values:
                if value in getattr(refused, option):
                    yield (f"{_called(runtime)} on {device.name} can't take --{option} {value}: {_end(refused.why)}")


def _memory(device: Device, resident: int | None) -> Iterator[str]:
    if resident is not None and resident > device.memory_bytes:
        yield (f"A session needs at least {resident / 1e6:,.1f} MB at once, and an app on {device.name} may use "
               f"{device.memory.value}; choose fewer bits, fewer layers or a shorter context.")


def _called(runtime: Runtime) -> str:
    return f"{runtime.name} {runtime.version.value}"


def _end(sentence: str) -> str:
    """With one full stop."""
    return f"{sentence.rstrip('.')}."
