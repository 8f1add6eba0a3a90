"""The comparison of matrices finds and names what isn't the reference's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from needle_export.measure import weights
from needle_export.targets.matrices import Place, ReadMatrix, RowsOf

HERE = (Place("matmul_1 of decode", 2),)


@dataclass(frozen=True)
class Matrix:
    """A matrix of a reference."""

    tensor: str
    role: str
    layer: int
    values: Any
    scales: Any = None
    form: str = ""
    spare: tuple[int, int] = (0, 0)

    @property
    def rows(self) -> int:
        return len(self.values)

    @property
    def used(self) -> tuple[int, int]:
        return self.values.shape[0] - self.spare[0], self.values.shape[1] - self.spare[1]

    @property
    def dtype(self) -> str:
        return self.form or str(self.values.dtype.name)

    def load(self) -> Any:
        return self.values, self.scales


def integers(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(-127, 128, (rows, 6), dtype=np.int8), rng.random(rows, np.float32) + 0.5


REFERENCE = {
    ("layers.2.q", -1): Matrix("q", "routing", 2, *integers(4, 0)),
    ("layers.2.k", -1): Matrix("k", "routing", 2, *integers(3, 1)),
    ("layers.3.k", -1): Matrix("k", "routing", 3, *integers(3, 2)),
    ("memory", 0): Matrix("memory_0", "memory", -1, *integers(3, 3)),
    ("memory", 1): Matrix("memory_1", "memory", -1, *integers(3, 4)),
}


def stored(*keys: tuple[str, int], start: int = 0, stop: int | None = None, places: Any = HERE) -> ReadMatrix:
    """What an artifact should hold of these matrices of the reference."""
    found = [REFERENCE[key] for key in keys]
    claim = RowsOf(tuple(path for path, _ in keys), keys[0][1], start, stop)
    rows = slice(start, stop)
    values, scales = (np.concatenate([getattr(m, part) for m in found])[rows] for part in ("values", "scales"))
    return ReadMatrix(claim, False, values, scales, places)


def good() -> list[ReadMatrix]:
    """All of the reference: two matrices merged and cut inside the second, the others by themselves."""
    merged = ("layers.2.q", -1), ("layers.2.k", -1)
    return [
        stored(*merged, stop=5),
        stored(*merged, start=5),
        stored(("layers.3.k", -1), places=(Place("matmul_9 of decode", 3), Place("elsewhere", -1))),
        stored(("memory", 0)),
        stored(("memory", 1)),
    ]


def fault(changed: list[ReadMatrix]) -> str:
    found = weights.compare(changed, REFERENCE).fault()
    assert found is not None
    return found


def with_part(at: int, **changes: Any) -> list[ReadMatrix]:
    matrices = good()
    return [*matrices[:at], dataclasses.replace(matrices[at], **changes), *matrices[at + 1 :]]


def test_all_equal() -> None:
    found = weights.compare(good(), REFERENCE)
    assert found.fault() is None
    assert found.table() == {"matrices": 5, "bytes": 16 * (6 + 4), "folded": 0}
    # Rows that are stored twice, as those of a tied table, count once.
    assert weights.compare([*good(), *good()], REFERENCE).table() == found.table()


def test_a_value_in_a_part_behind_the_first() -> None:
    values = good()[1].values.copy()
    values[1, 4] += 1
    said = fault(with_part(1, values=values))
    wanted = REFERENCE["layers.2.k", -1].values[2, 4]
    assert said == (
        f"k of block 2 (routing): 1 of 2 rows differ, row 2 first, where 1 of 6 values differ"
        f" (at 4: {values[1, 4]} and not {wanted})"
    )


def test_a_scale() -> None:
    scales = good()[2].scales
    assert scales is not None
    moved = np.nextafter(scales, np.float32(9))
    said = fault(with_part(2, scales=moved))
    assert said.startswith("k of block 3 (routing): 3 of 3 rows differ, row 0 first, whose scale is ")
    assert said.endswith(f" is {moved[0]:.9g} and not {scales[0]:.9g}")
    assert fault(with_part(2, scales=None)).startswith("k of block 3 (routing): no scales")


def test_rows_exchanged_within_a_matrix_and_between_sites() -> None:
    first, second = good()[3], good()[4]
    assert first.scales is not None
    order = [0, 2, 1]
    said = fault(with_part(3, values=first.values[order], scales=first.scales[order]))
    assert said == "memory_0 (memory): 2 of 3 rows differ, row 1 first, which holds row 2"
    said = fault(with_part(3, values=second.values, scales=second.scales))
    assert said == "memory_0 (memory): 3 of 3 rows differ, row 0 first, which holds row 0 of memory_1 (memory)"


def test_an_op_of_another_block() -> None:
    assert fault(with_part(2, places=HERE)) == "matmul_1 of decode reads k of block 3 (routing)"


def test_equal_matrices_may_be_one_constant() -> None:
    """Under the name of one of them, as a compiler makes them."""
    twins = {**REFERENCE, ("layers.3.k", -1): dataclasses.replace(REFERENCE["layers.2.k", -1], layer=3)}
    twins["memory", 1] = dataclasses.replace(REFERENCE["memory", 0], tensor="memory_1")
    both = (*HERE, Place("matmul_9 of decode", 3))
    matrices = [dataclasses.replace(m, places=both) if "layers.2.k" in m.claim.parameters else m for m in good()]
    # q has no twin in that block.
    assert weights.compare(matrices[:2], twins).fault() == "matmul_9 of decode reads q of block 2 (routing)"
    alone = [stored(("layers.2.q", -1)), dataclasses.replace(stored(("layers.2.k", -1)), places=both), good()[3]]
    assert weights.compare(alone, twins).table()["matrices"] == 5
    # A last bit apart, and they aren't.
    values = twins["layers.3.k", -1].values.copy()
    values[2, 5] ^= 1
    twins["layers.3.k", -1] = dataclasses.replace(twins["layers.3.k", -1], values=values)
    assert weights.compare(alone, twins).fault() == "matmul_9 of decode reads k of block 2 (routing)"


def test_what_no_op_reads() -> None:
    assert fault(good()[:-1]) == "memory_1 (memory) is read by no op of the artifact"
    assert fault([good()[0], *good()[2:]]) == "k of block 2 (routing): row 1 is read by no op of the artifact"
    # What stayed in float32 needn't be found by a name.
    small = {**REFERENCE, ("small", -1): Matrix("small", "norms", -1, np.ones((2, 2), np.float32))}
    assert weights.compare(good(), small).fault() is None


def test_names_that_lead_nowhere() -> None:
    said = fault(with_part(3, claim=RowsOf(("elsewhere",), 0)))
    assert said == "the matrix elsewhere, site 0: no matrix of the checkpoint is called so (matmul_1 of decode)"
    for claim in (RowsOf(("memory",), 0, 0, 4), RowsOf(("memory",), 0, 1), RowsOf(("memory",), 0, 2, 1)):
        assert "3 rows are stored, not rows" in fault(with_part(3, claim=claim))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_another_format_than_the_references(kind: Any) -> None:
    values = good()[3].values.astype(kind)
    assert f"memory_0 (memory) is stored as {values.dtype.name} [3, 6], not int8 [3, 6]" in fault(
        with_part(3, values=values)
    )
    assert "int8 [3, 5], not int8 [3, 6]" in fault(with_part(3, values=good()[3].values[:, :5]))


def in_blocks(seed: int, levels: bool = False) -> Matrix:
    values, _ = integers(4, seed)
    scales = np.random.default_rng(seed).random((4, 3), np.float32)
    form = "palette4x2" if levels else "int8x2"
    return Matrix("w", "content", 2, values.view(np.uint8) if levels else values, scales, form)


@pytest.mark.parametrize("levels", [False, True])
def test_blocks_and_palettes(levels: bool) -> None:
    wanted = in_blocks(7, levels)
    reference = {("w", -1): wanted}
    values, scales = wanted.load()
    good = ReadMatrix(RowsOf(("w",)), False, values, scales, HERE, form=wanted.form, own=True, bytes=40)
    assert weights.compare([good], reference).table() == {"matrices": 1, "bytes": 40, "folded": 0}

    def fault(**changes: Any) -> str:
        return str(weights.compare([dataclasses.replace(good, **changes)], reference).fault())

    moved = scales.copy()
    moved[2, 1] = np.nextafter(moved[2, 1], np.float32(9))
    kind = "level 1" if levels else "scale of columns 2 and on"
    assert fault(scales=moved) == (
        f"w of block 2 (content): 1 of 4 rows differ, row 2 first, whose {kind} is {moved[2, 1]:.9g}"
        f" and not {scales[2, 1]:.9g}"
    )
    assert "1 scales of a row are stored, not 3" in fault(scales=scales[:, :1])
    assert "no scales of its rows" in fault(scales=None)
    assert "is stored as int8x3 [4, 6], not" in fault(form="int8x3")
    order = [1, 0, 2, 3]
    assert fault(values=values[order], scales=scales[order]).endswith("rows differ, row 0 first, which holds row 1")


def test_equal_blocks_may_be_one_constant() -> None:
    one = in_blocks(8)
    reference = {("w", -1): one, ("v", -1): dataclasses.replace(one, tensor="v")}
    read = ReadMatrix(RowsOf(("w",)), False, one.values, one.scales, HERE, form=one.form, own=True)
    assert weights.compare([read], reference).table()["matrices"] == 2
    other = {**reference, ("v", -1): dataclasses.replace(one, tensor="v", scales=one.scales * np.float32(2))}
    assert weights.compare([read], other).fault() == "v of block 2 (content) is read by no op of the artifact"


def test_rows_and_columns_that_meet_padding() -> None:
    values = integers(4, 9)[0].astype(np.float16)
    spare = {("w", -1): Matrix("w", "mixing", 2, values, spare=(1, 2))}
    whole = {("w", -1): Matrix("w", "mixing", 2, values)}

    def read(rows: int, columns: int) -> ReadMatrix:
        claim = RowsOf(("w",), stop=rows, columns=columns)
        return ReadMatrix(claim, False, values[:rows, :columns], None, HERE)

    assert weights.compare([read(3, 4)], spare).table() == {"matrices": 1, "bytes": 3 * 4 * 2, "folded": 0}
    said = weights.compare([read(2, 4)], spare).fault()
    assert said == "w of block 2 (mixing): row 2 is read by no op of the artifact"
    assert "only 3 of its columns are stored, and 4 matter" in str(weights.compare([read(3, 3)], spare).fault())
    assert "only 4 of its columns are stored, and 6 matter" in str(weights.compare([read(3, 4)], whole).fault())


def test_a_factor_of_the_op_itself() -> None:
    values = np.ones((2, 2), np.float32)
    reference = {("w", -1): Matrix("w", "content", 2, values)}
    read = ReadMatrix(RowsOf(("w",)), False, values, np.ones(2, np.float32), HERE, own=True)
    assert weights.compare([read], reference).fault() is None
    wrong = dataclasses.replace(read, scales=np.full(2, 1.5, np.float32))
    assert weights.compare([wrong], reference).fault() == (
        "w of block 2 (content): matmul_1 of decode multiplies it by 1.5"
    )


def test_what_cannot_be_read() -> None:
    said = fault(with_part(3, fault="GATHER reads it"))
    assert said == "the matrix memory, site 0: GATHER reads it (matmul_1 of decode)"


def test_several_faults_are_counted() -> None:
    matrices = good()
    for at in (2, 3):
        matrices[at] = dataclasses.replace(matrices[at], values=matrices[at].values + np.int8(1))
    assert fault(matrices).startswith("k of block 3") and fault(matrices).endswith(" (and 1 more)")


def test_what_took_constants_in_is_counted_and_excused() -> None:
    folded = dataclasses.replace(good()[4], folded=True, values=np.zeros((1, 1), np.int8))
    assert weights.compare([*good(), folded], REFERENCE).table()["folded"] == 1
    renamed = dataclasses.replace(folded, claim=RowsOf(("memory.scaled",), 1))
    for matrix in (folded, renamed):
        assert weights.compare([*good()[:-1], matrix], REFERENCE).fault() is None


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_floats_are_compared_bit_for_bit(kind: Any) -> None:
    values = np.array([[0.0, 1.5], [2.0, -0.0]], kind)
    reference = {("w", -1): Matrix("w", "content", 0, values)}
    factors = np.ones(2, np.float32)
    # A factor behind a product whose matrix has none belongs to something else.
    for scales in (None, factors):
        read = ReadMatrix(RowsOf(("w",)), False, values, scales, (Place("op", 0),))
        assert weights.compare([read], reference).table() == {"matrices": 1, "bytes": values.nbytes, "folded": 0}
    negative = dataclasses.replace(read, values=values * np.array([[-1, 1], [1, 1]], kind))
    assert "row 0 first" in str(weights.compare([negative], reference).fault())
    scaled = {("w", -1): Matrix("w", "lanes", 0, values, factors * 3)}
    said = str(weights.compare([read], scaled).fault())
    assert said == "w of block 0 (lanes): 2 of 2 rows differ, row 0 first, whose scale is 1 and not 3"


# With a scale for each run of columns


def in_runs(seed: int) -> Matrix:
    levels, _ = integers(4, seed)
    return Matrix("q", "routing", 2, levels, np.random.default_rng(seed).random((4, 3), np.float32) + 0.5)


def compared(matrix: Matrix, scales: Any, behind: Any = None) -> weights.Compared:
    claim = RowsOf(("layers.2.q",))
    have = ReadMatrix(claim, False, matrix.values, scales, HERE, behind=behind, bits=4)
    return weights.compare([have], {("layers.2.q", -1): matrix})


def test_scales_of_runs_are_compared_one_by_one() -> None:
    matrix = in_runs(0)
    found = compared(matrix, matrix.scales)
    # Six levels of four bits and three halves a row.
    assert found.fault() is None and found.table()["bytes"] == 4 * (3 + 6)
    wrong = matrix.scales.copy()
    wrong[2, 1] *= 1.5
    said = compared(matrix, wrong).fault()
    assert said is not None
    assert said.startswith("q of block 2 (routing): 1 of 4 rows differ, row 2 first, whose scale of columns 2 and on")
    said = compared(matrix, matrix.scales[:, 0]).fault()
    assert said == "q of block 2 (routing): 1 scales of a row are stored, not 3"


def test_a_factor_behind_is_the_matrix_own_or_nobodys() -> None:
    """The reference's scales hold its own; what else multiplies there, as a norm, is not the matrix' affair."""
    matrix, factor = in_runs(0), np.float32([2, 3, 5, 7])
    assert compared(matrix, matrix.scales, factor).fault() is None
    own = dataclasses.replace(matrix, scales=matrix.scales * factor[:, None])
    assert compared(own, matrix.scales, factor).fault() is None
    for behind in (None, factor * np.float32([1, 1, 1.01, 1])):
        said = compared(own, matrix.scales, behind).fault()
        assert said is not None and "whose scale of columns 0 and on is" in said
