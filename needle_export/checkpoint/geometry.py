"""What a Needle 3 model is, in numbers, names and shapes: one place to import all of it from.

``dimensions`` holds the numbers and their rules, ``config`` reads them from a saved configuration,
``layout`` derives tensor names, shapes and roles.
"""

from __future__ import annotations

from needle_export.checkpoint.config import geometry_from_config
from needle_export.checkpoint.dimensions import (
    COND_RANK,
    ENGRAM_CONV_TAPS,
    HEAD_NAMES,
    PUBLISHED,
    SMALL,
    Geometry,
    HeadGeometry,
)
from needle_export.checkpoint.layout import (
    ROLES,
    check_tensors,
    optional_shapes,
    parameter_count,
    role_of,
    tensor_shapes,
)

__all__ = [
    "COND_RANK",
    "ENGRAM_CONV_TAPS",
    "HEAD_NAMES",
    "PUBLISHED",
    "ROLES",
    "SMALL",
    "Geometry",
    "HeadGeometry",
    "check_tensors",
    "geometry_from_config",
    "optional_shapes",
    "parameter_count",
    "role_of",
    "tensor_shapes",
]
