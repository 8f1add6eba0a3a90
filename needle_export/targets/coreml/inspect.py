"""What ``needle-export inspect`` tells of a Core ML package: as data, and as rows of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from needle_export.targets.coreml.evaluate.package import load_package


def describe_package(path: Path | str) -> dict[str, Any]:
    """What a package holds, ready for JSON; no weight is read for it.

    Raises:
        BadInput: a part of the package is missing, damaged or cut short.
        Unsupported: it isn't an ML program that the evaluator knows.
    """
    return load_package(path).describe()


def package_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    """A description as rows of a table: what, and how much."""
    constants = description["constants"]
    rows = [
        ("format", f"specification {description['specification']}, runs from {description['minimum_os']} on"),
        ("weight file", f"{description['weight_file_bytes']:,} bytes"),
    ]
    rows += [(f"  {form}", f"{size:,} bytes") for form, size in constants["forms"].items()]
    rows.append(("constants in the specification", f"{constants['in_specification']:,} bytes"))
    if len(description["functions"]) > 1:
        rows.append(("shared between functions", f"{constants['shared']:.1%} of the constants' bytes"))
    for name, declared in description["states"].items():
        rows.append((f"state {name}", feature_text(declared)))
    for name, function in description["functions"].items():
        default = ", runs if none is named" if name == description["default_function"] else ""
        rows.append((f"function {name}", f"{function['ops']:,} ops, opset {function['opset']}{default}"))
        rows += [(f"  input {key}", feature_text(declared)) for key, declared in function["inputs"].items()]
        rows += [(f"  output {key}", feature_text(declared)) for key, declared in function["outputs"].items()]
        if function["states"] and set(function["states"]) != set(description["states"]):
            rows.append(("  states", ", ".join(function["states"])))
        rows.append(("  computes in", ", ".join(f"{key}: {count:,}" for key, count in function["precisions"].items())))
        rows.append(("  ops", ", ".join(f"{key} {count:,}" for key, count in function["op_types"].items())))
    return rows


def feature_text(declared: dict[str, Any]) -> str:
    """A tensor's type and sizes: ``float16 1 x 48 x 256``."""
    sizes = " x ".join("?" if size < 0 else f"{size}" for size in declared["shape"])
    return f"{declared['dtype']} {sizes}".rstrip()
