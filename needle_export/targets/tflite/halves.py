"""Constants of 4-bit files in half precision: which they can be, and what they are called in the file.

The runtime widens them once, when it loads a file, so that a step costs what it costs with float32. The reference can
follow them where it knows what an op reads: a checkpoint tensor's own values, or a norm's scale with what passes fold
into it (``model.rounding``).
"""

from __future__ import annotations

import re

from needle_export.graph.program import Weight
from needle_export.targets.constants import is_constant, short_name
from needle_export.targets.tflite.layouts import EACH, FLAT

#: Why these are no integers, where a scheme asks for 4 bits.
VECTOR = "half precision: applied entry by entry, where the runtime has no kernel for integers beside floats"
FACTOR = "half precision: a Kronecker factor of the MLP, which the model's own 4-bit containers hold in halves too"

#: Why some stay float32 beside that.
FOLDED = "constants went into it, so its values are no checkpoint tensor's"
HEAD = "a probe head's: multiplied entry by entry in a step, which is done in float32"
LARGE = "a value is beyond half precision"
BIAS = "a bias, which the runtime's product takes in float32 only"

#: Scales of norms by the names that passes give them: what they hold is ``1 + scale``, times the block's gate behind
#: attention, and of queries times attention's factor. The last are rows, one a head.
_SCALES = (
    re.compile(r"((?:layers\.\d+\.(?:norm_in|pre_mlp_norm)|final_norm)\.scale)\.add(?:_\d+)?"),
    re.compile(r"(layers\.\d+\.post_norm\.scale)\.add(?:_\d+)?\.gated"),
)
_HEADS = re.compile(r"(layers\.\d+\.attention)\.qk_norm\.scaled")


def named(weight: Weight, layout: str) -> tuple[str, str] | None:
    """The name of what a constant holds, and its layout; None where the reference doesn't know its values.

    Args:
        layout: that it has if it isn't a norm's scale: ``taps``, or nothing for a matrix [O, I], or ``flat``.
    """
    name = short_name(weight.name)
    if is_constant(weight.parts):
        return None
    if weight.folded:
        heads = _HEADS.fullmatch(name)
        if heads:
            return f"{heads.group(1)}.q_norm.scale+k_norm.scale", EACH
        found = next((match for pattern in _SCALES if (match := pattern.fullmatch(name))), None)
        return None if found is None else (found.group(1), FLAT)
    if layout != FLAT:
        return name, layout
    if weight.value.dim() != 1:
        return None
    whole = name.removesuffix(".cut")
    return (name if whole == name else f"{whole}[:,:{weight.value.numel()}]"), FLAT
