"""A saved .mlpackage as data: its functions, their ops, and constants that stay in the mapped weight file.

Read from the protobuf messages and the weight file directly. coremltools gives the message classes and
nothing else: the library that wrote a package is no witness of what it wrote.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from needle_export.errors import BadInput, Unsupported
from needle_export.targets.coreml.evaluate.blobs import WeightFile
from needle_export.targets.coreml.evaluate.spec import FunctionInfo, SpecReader

_AGAIN = "the package is damaged: build it anew"

#: What fileName of a constant in a file begins with; the rest is a path beside the model's.
_PREFIX = "@model_path/"

#: Opsets whose meaning the evaluator knows. Earlier ones differ in how negative indices are taken.
OPSETS = ("CoreML7", "CoreML8", "CoreML9")


@dataclass(frozen=True)
class Package:
    """A package that was read and whose references all hold.

    Attributes:
        path: of the package.
        specification: version of its format.
        functions: by name.
        weights: mapped weight files, by the path that constants give.
        default: the function that runs if none is named, or empty.
        metadata: what the package says about itself.
    """

    path: Path
    specification: int
    functions: dict[str, FunctionInfo]
    weights: dict[str, WeightFile]
    default: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    def function(self, name: str) -> FunctionInfo:
        """One function.

        Raises:
            BadInput: the package has none of that name.
        """
        if name not in self.functions:
            has = ", ".join(sorted(self.functions))
            raise BadInput(f"the package has no function {name!r}", where=str(self.path), fix=f"it has: {has}")
        return self.functions[name]

    def describe(self) -> dict[str, Any]:
        """What the package holds, as ``inspect`` prints it; see :mod:`.describe`."""
        from needle_export.targets.coreml.evaluate.describe import describe

        return describe(self)


def load_package(path: Path | str, *, evaluable: bool = True) -> Package:
    """Read a package; no constant is read from its weight file, and every reference to one is checked.

    Args:
        path: of the .mlpackage folder.
        evaluable: whether it must be in an opset that the evaluator knows; a description needs none.

    Raises:
        BadInput: a part is missing, damaged or cut short, or parts contradict each other.
        Unsupported: it isn't an ML program, or has an opset that the evaluator doesn't know.
    """
    path = Path(path)
    root, items = _manifest(path)
    spec_path = path / "Data" / root
    try:
        raw = spec_path.read_bytes()
    except OSError as error:
        raise BadInput("the model specification can't be read", where=str(spec_path), fix=_AGAIN) from error
    model = _parse(raw, spec_path)
    kind = model.WhichOneof("Type")
    if kind is None:
        raise BadInput("the model specification is cut short: it has no model", where=str(spec_path), fix=_AGAIN)
    if kind != "mlProgram":
        raise Unsupported(
            f"the package holds no ML program (it is a {kind})", where=str(path), fix="only programs can be read"
        )
    weights: dict[str, WeightFile] = {}

    def weight_file(name: str) -> WeightFile:
        if name not in weights:
            weights[name] = WeightFile(_weight_path(path, spec_path, items, name))
        return weights[name]

    reader = SpecReader(spec_path, weight_file)
    functions: dict[str, FunctionInfo] = {}
    for name in sorted(model.mlProgram.functions):
        function = reader.function(name, model.mlProgram.functions[name])
        if evaluable and function.opset not in OPSETS:
            raise Unsupported(
                f"function {name!r} is written in opset {function.opset!r}",
                where=str(path),
                fix=f"the evaluator knows {', '.join(OPSETS)}",
            )
        functions[name] = function
    _check_description(model.description, functions, spec_path)
    return Package(
        path=path,
        specification=model.specificationVersion,
        functions=functions,
        weights=weights,
        default=model.description.defaultFunctionName or ("main" if "main" in functions else ""),
        metadata=dict(sorted(model.description.metadata.userDefined.items())),
    )


def _parse(raw: bytes, path: Path) -> Any:
    before = logging.root.manager.disable
    # The import logs and warns of parts that are missing on this system and not needed here.
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from coremltools.proto import Model_pb2
            from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no stubs
    except ImportError as error:
        raise Unsupported(
            "reading Core ML packages needs coremltools", fix="pip install 'needle-export[coreml]'"
        ) from error
    finally:
        logging.disable(before)
    model = Model_pb2.Model()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise BadInput("the model specification is cut short or damaged", where=str(path), fix=_AGAIN) from error
    return model


def _manifest(path: Path) -> tuple[PurePosixPath, list[PurePosixPath]]:
    """Where the model specification is, relative to Data, and all items."""
    file = path / "Manifest.json"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput("isn't a Core ML package: it has no readable Manifest.json", where=str(path)) from error
    except ValueError as error:
        raise BadInput("the manifest isn't JSON", where=str(file), fix=_AGAIN) from error
    try:
        entries = manifest["itemInfoEntries"]
        paths = {key: PurePosixPath(str(entry["path"])) for key, entry in entries.items()}
        root = paths[manifest["rootModelIdentifier"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput("the manifest doesn't say which item is the model", where=str(file), fix=_AGAIN) from error
    for item in paths.values():
        if item.is_absolute() or ".." in item.parts:
            raise BadInput(f"the manifest names {str(item)!r}, outside the package", where=str(file), fix=_AGAIN)
        if not (path / "Data" / item).exists():
            raise BadInput(f"the manifest names {str(item)!r}, which isn't there", where=str(file), fix=_AGAIN)
    return root, list(paths.values())


def _weight_path(package: Path, spec: Path, items: list[PurePosixPath], name: str) -> Path:
    inner = PurePosixPath(name.removeprefix(_PREFIX))
    if not name.startswith(_PREFIX) or inner.is_absolute() or ".." in inner.parts:
        raise BadInput(f"a constant lies in {name!r}, outside the package", where=str(spec), fix=_AGAIN)
    path = spec.parent / inner
    listed = PurePosixPath(path.relative_to(package / "Data").as_posix())
    if not any(listed.is_relative_to(item) for item in items):
        raise BadInput(
            f"a constant lies in {str(listed)!r}, which the manifest doesn't list",
            where=str(package / "Manifest.json"),
            fix=_AGAIN,
        )
    return path


def _check_description(description: Any, functions: Mapping[str, FunctionInfo], path: Path) -> None:
    """The interface that an app sees must be that of the program."""
    parts = {part.name: part for part in description.functions} or {"main": description}
    if set(parts) != set(functions):
        missing = sorted(set(parts) - set(functions))
        more = sorted(set(functions) - set(parts))
        what = f"no function {missing[0]!r}, which it describes" if missing else f"a function {more[0]!r} undescribed"
        raise BadInput(f"the model specification has {what}", where=str(path), fix=_AGAIN)
    for name, part in parts.items():
        function = functions[name]
        for kind, said, had in (
            ("inputs", part.input, function.inputs),
            ("states", part.state, function.states),
            ("outputs", part.output, function.outputs),
        ):
            if {feature.name for feature in said} != set(had):
                raise BadInput(
                    f"the {kind} that the specification describes for function {name!r} aren't those of the program",
                    where=str(path),
                    fix=_AGAIN,
                )
