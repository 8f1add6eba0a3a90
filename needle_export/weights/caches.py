"""Rows of keys and values as a cache holds them, each rounded by itself: one head's numbers at one position.

Dimension letters: G key/value heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needle_export.errors import Unsupported

#: The least scale there is, which makes zeros of a row of zeros: float32's least normal number.
LEAST = torch.finfo(torch.float32).tiny

#: How far ``jitter`` moves a number, of the greatest in its row: what another order of summing does to a row that went
#: through projection, taps, norm and rotation.
_MOVED = 2.0**-20


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric levels with a scale a row: max|row| / 127, numbers divided by it and rounded half to even.

    Scales are float32 and not halves: a half would round the scale before the levels, run out below 6e-8 and above
    65504, and save 2 of the 52 or 68 bytes of a row.

    Args:
        rows: float32 [..., G, D].

    Returns:
        Levels int8 [..., G, D] from -127 to 127, and scales float32 [..., G, 1], all positive.
    """
    scales = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=LEAST)
    return torch.round(rows / scales).to(torch.int8), scales


def stored(rows: Tensor, form: str, jitter: torch.Generator | None = None) -> Tensor:
    """What a cache gives back of rows that were written into it, in float32.

    Args:
        rows: float32 [..., G, D]; keys after rotation.
        form: of the cache, ``fp32``, ``fp16`` or ``int8``.
        jitter: if given, every number first moves by up to 2^-20 of its row's greatest, at random.

    Raises:
        Unsupported: a number is beyond half precision, where that is the form.
        ValueError: there is no such form.
    """
    if jitter is not None:
        unit = rows.abs().amax(-1, keepdim=True) * _MOVED
        rows = rows + unit * (2 * torch.rand(rows.shape, generator=jitter) - 1)
    if form == "fp32":
        return rows
    if form == "int8":
        levels, scales = quantize_rows(rows)
        return levels.float() * scales
    if form != "fp16":
        raise ValueError(f"caches have no form {form!r}")
    halves = rows.half().float()
    if bool((torch.isinf(halves) & torch.isfinite(rows)).any()):
        raise Unsupported("a key or a value is beyond half precision", where="--cache fp16", fix="choose fp32 or int8")
    return halves
