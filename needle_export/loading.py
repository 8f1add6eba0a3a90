"""A checkpoint as a build starts from it: read, its adapter merged, cut to the depth asked for."""

from __future__ import annotations

from needle_export.checkpoint.adapter import merge_lora, read_adapter
from needle_export.checkpoint.checkpoint import Checkpoint, drop_head, read_checkpoint
from needle_export.checkpoint.ladder import slice_ladder
from needle_export.checkpoint.resolve import resolve
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.report.schema import AdapterInfo

#: A checkpoint, the adapters merged into it, and the heads dropped for them.
Loaded = tuple[Checkpoint, tuple[AdapterInfo, ...], tuple[str, ...]]


def load(options: BuildOptions, progress: Progress) -> Loaded:
    """The checkpoint at the depth asked for with its adapter merged; adapters, and heads dropped for them.

    The adapter was trained on the whole model, so it is merged before the rung is cut.
    """
    with progress.stage("read the checkpoint"):
        checkpoint = read_checkpoint(resolve(options.checkpoint))
    adapters: tuple[AdapterInfo, ...] = ()
    dropped: tuple[str, ...] = ()
    if options.lora is not None:
        adapter = read_adapter(resolve(options.lora))
        checkpoint = merge_lora(checkpoint, adapter)
        adapters = (AdapterInfo(adapter.path_name, adapter.sha256),)
        if not options.keep_confidence and any(h.name == "confidence" for h in checkpoint.geometry.heads):
            checkpoint = drop_head(checkpoint, "confidence")
            dropped = ("confidence",)
    if options.layers is not None:
        checkpoint = slice_ladder(checkpoint, options.layers)
    return checkpoint, adapters, dropped
