"""What each type of op computes, written from the documented meaning; importing this registers all of them."""

from needle_export.targets.coreml.evaluate.ops import (
    arrays,
    elementwise,
    gathers,
    products,
    quantized,
    reductions,
    slices,
)

__all__ = ["arrays", "elementwise", "gathers", "products", "quantized", "reductions", "slices"]
