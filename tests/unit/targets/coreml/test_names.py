"""Names in Core ML packages: short, unique, and the block can be read from them."""

from __future__ import annotations

import re

import pytest

from needle_export.targets.coreml.names import block_name, block_of, constant_name, number_name


@pytest.mark.parametrize(
    ("count", "name"), [(1, "0"), (10, "9"), (11, "00"), (370, "9z"), (371, "000"), (13330, "9zz")]
)
def test_numbers_begin_with_a_digit_and_take_few_characters(count, name):
    assert number_name(count) == name


@pytest.mark.parametrize(("layer", "name"), [(0, "a"), (19, "t"), (25, "z"), (26, "aa"), (701, "zz"), (702, "aaa")])
def test_a_block_is_read_from_the_names_of_its_ops(layer, name):
    assert block_name(layer) == name
    for count in (1, 11, 371, 5000):
        assert block_of(name + number_name(count)) == layer


@pytest.mark.parametrize("name", ["causal_taps_8", "stream_03_1", "rows_oembedding_e_1", "caa", "logits", "k_00"])
def test_other_names_are_of_no_block(name):
    assert block_of(name) == -1


def test_no_two_names_are_one_and_none_is_a_word_of_mil():
    names = [block_name(layer) + number_name(count) for layer in range(40) for count in range(1, 400)]
    names += [constant_name(count) for count in range(1, 3000)]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z][a-z0-9]*", name) for name in names)
    assert max(len(block_name(layer) + number_name(370)) for layer in range(26)) == 3
    words = {"any", "bool", "func", "tensor", "list", "dict", "tuple", "true", "false", "string", "state"}
    words |= {f"{kind}{bits}" for kind in ("bf", "fp", "int", "uint") for bits in (1, 2, 3, 4, 8, 16, 32, 64)}
    assert not words & set(names)
