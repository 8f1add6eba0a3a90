"""Ways to spoil a finished Core ML build: bytes of its matrices, and ops of its functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from needle_export.targets.coreml import contract
from tests.support.coreml_builds import GEOMETRY, constants, functions, uses
from tests.targets.coreml.packages import WEIGHTS, operations, read_spec, write_spec

#: Of the weight file: a constant's bytes lie behind 64 bytes that describe it.
RECORD = 64
OUT_PROJ = (GEOMETRY.d_model, GEOMETRY.num_heads * GEOMETRY.v_head_dim)


class Spoiled:
    """A copy of a finished build under a test's hands."""

    def __init__(self, folder):
        self.folder, self.package = folder, folder / contract.FILE_NAME

    def stored(self, block, parameter=None):
        """A constant of a block's output projection: the matrix itself, or a parameter of what decompresses it."""
        found = []
        for _, function in functions(self.folder):
            makers = {name: made for made in function.ops for name, _ in made.outputs}
            for one in uses(function, "linear"):
                maker = makers[one.inputs["weight"][0]]
                if maker.outputs[0][1].shape != OUT_PROJ:
                    continue
                value = maker.inputs[parameter or "val"][0]
                found.append(constants(function).get(value, value) if isinstance(value, str) else value)
        # One constant for all functions, in each of which blocks come in order.
        places = [value.offset for value in found]
        assert len(found) % GEOMETRY.num_layers == 0 and len(set(places)) == GEOMETRY.num_layers
        return found[block]

    def change(self, value, kind, how):
        """Change a constant's bytes in place."""
        size = value.type.bytes // np.dtype(kind).itemsize
        array = np.memmap(self.package / WEIGHTS, kind, "r+", value.offset + RECORD, size)
        before = array.copy()
        how(array)
        assert (before.view(np.uint8) != array.view(np.uint8)).any()
        array.flush()

    def flip_signs(self, block=1, row=7):
        def flip(halves):
            rows = halves.reshape(OUT_PROJ)
            rows[row] ^= 0x8000

        self.change(self.stored(block), "u2", flip)

    def flip_one_bit(self):
        """The highest of one exponent."""

        def flip(halves):
            halves[5000] ^= 0x4000

        self.change(self.stored(0), "u2", flip)

    def double_a_scale(self, parameter):
        def double(scales):
            scales[3:200:4] += 1 << 10  # the exponents of some

        self.change(self.stored(1, parameter), "u2", double)

    def exchange_nibbles(self, parameter):
        def exchange(packed):
            packed[1000:2000] = packed[1000:2000] << 4 | packed[1000:2000] >> 4

        self.change(self.stored(1, parameter), "u1", exchange)

    def change_one(self, block: int, parameter: Any, kind: str, at: int) -> None:
        """One bit of one entry of a constant."""

        def flip(array: np.ndarray) -> None:
            array[at] ^= 1

        self.change(self.stored(block, parameter), kind, flip)

    def swap_constants(self):
        """Two matrices of one shape change places in every function."""
        one, other = (self.stored(block).offset for block in (0, 2))
        swapped, model = 0, read_spec(self.package)
        for name in model.mlProgram.functions:
            for each in operations(model, name):
                value = each.attributes["val"].blobFileValue if "val" in each.attributes else None
                if value is not None and value.fileName and value.offset in (one, other):
                    value.offset = one + other - value.offset
                    swapped += 1
        assert swapped == 2 * len(model.mlProgram.functions)
        write_spec(self.package, model)

    def drop_write(self, state, function):
        """What a conversion that loses writes leaves: a package that runs and forgets."""
        model = read_spec(self.package)
        ops = operations(model, function)
        (at,) = (
            i for i, o in enumerate(ops) if o.type == "write_state" and o.inputs["input"].arguments[0].name == state
        )
        del ops[at]
        write_spec(self.package, model)
