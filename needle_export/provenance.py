"""What a build says about its origin: the checkpoint, the recipe, the versions of what took part."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from needle_export import __version__
from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.files import file_sha256
from needle_export.checkpoint.geometry import parameter_count
from needle_export.config.options import BuildOptions
from needle_export.report.schema import AdapterInfo, CheckpointInfo


def checkpoint_info(
    checkpoint: Checkpoint, adapters: tuple[AdapterInfo, ...], dropped: tuple[str, ...]
) -> CheckpointInfo:
    """The checkpoint for the report, after slicing and merging."""
    source = checkpoint.source
    return CheckpointInfo(
        path_name=source.path_name,
        sha256=source.sha256,
        format=source.format,
        random=source.random,
        geometry=checkpoint.geometry.as_dict(),
        layers=checkpoint.geometry.num_layers,
        parent_layers=checkpoint.parent_layers,
        parameters=parameter_count(checkpoint.geometry),
        lora=adapters,
        dropped_heads=dropped,
    )


def prompts_info(options: BuildOptions) -> dict[str, Any]:
    """What a report says, beside the recipe, of prompts that a build was calibrated with."""
    if options.calibrate is None:
        return {"prompts": None}
    prompts = Path(options.calibrate)
    return {"prompts": {"name": prompts.name, "sha256": file_sha256(prompts)}}


def metadata(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, str]:
    """What an artifact carries about itself, as strings."""
    return {
        "needle.tool": f"needle-export {__version__}",
        "needle.checkpoint.sha256": checkpoint.source.sha256,
        "needle.checkpoint.random": str(checkpoint.source.random).lower(),
        "needle.geometry": json.dumps(checkpoint.geometry.as_dict(), sort_keys=True, separators=(",", ":")),
        "needle.recipe": json.dumps(options.recipe(), sort_keys=True, separators=(",", ":")),
    }


def versions() -> dict[str, str]:
    """Versions of what every build uses; a target adds its own."""
    return {
        "needle-export": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
    }
