"""Names of stored forms, and that each does what its name says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needle_export.model.rounding import round_parameters
from needle_export.weights.forms import Form
from needle_export.weights.linear import dequantize_blocks, quantize_blocks
from needle_export.weights.palette import dequantize_palette, palettize
from needle_export.weights.scheme import Scheme

FORMS = [
    Form("int", 8, 96),
    Form("int", 4, 32),
    Form("int", 4, 32, brain=True),
    Form("int", 2, 1),
    Form("palette", 4, 16),
    Form("palette", 2, 1),
]


def weight(rows: int = 32, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_name_leads_back_to_its_form(form: Form) -> None:
    assert Form.parse(form.name) == form


def test_names_are_those_of_a_report() -> None:
    assert [form.name for form in FORMS] == [
        "int8x96",
        "int4x32",
        "int4x32bf16",
        "int2x1",
        "palette4x16",
        "palette2x1",
    ]


@pytest.mark.parametrize(
    "name", ["", "float16", "int8", "int4x", "int4x32 ", "xint4x32", "palette16x4", "int4x-1", "palette4x1bf16"]
)
def test_other_names_are_no_forms(name: str) -> None:
    assert Form.parse(name) is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_it_rounds_as_its_name_says(form: Form) -> None:
    values, extra = form.quantize(weight())
    if form.kind == "int":
        expected = quantize_blocks(weight(), form.bits, form.size, form.brain)
        back = dequantize_blocks(*expected)
    else:
        expected = palettize(weight(), form.bits, form.size)
        back = dequantize_palette(*expected)
    assert torch.equal(values, expected[0]) and torch.equal(extra, expected[1])
    assert torch.equal(form.dequantize(values, extra), back) and torch.equal(form.rounded(weight()), back)
    # What a kernel gives it is a view; and how many values there are is what the name promises.
    assert torch.equal(form.rounded(weight().t().contiguous().t()), back)
    runs = back.reshape(32, -1, form.size) if form.kind == "int" else back.reshape(32 // form.size, 1, -1)
    most = max(len(np.unique(run)) for row in runs.numpy() for run in row)
    assert 1 < most <= 2**form.bits - (form.kind == "int") or form.size == 1


def test_parameters_are_rounded_as_their_tensors_are_stored() -> None:
    """Kernels [I, O] by columns, tables by rows, sites one by one, and nothing that isn't asked for."""
    given = {
        "kernel": weight(96, 32, 1),
        "other_layer": weight(96, 32, 2),
        "table": weight(32, 96, 3),
        "sites": torch.stack([weight(96, 32, 4), 9 * weight(96, 32, 5)]),
        "unknown": weight(96, 32, 6),
    }
    sources = {
        "kernel": ("q_proj/kernel", "content", 0),
        "other_layer": ("q_proj/kernel", "content", 1),
        "table": ("embedding/embedding", "vocabulary", -1),
        "sites": ("engrams/key_proj/kernel", "memory", -1),
    }
    wanted = {
        ("q_proj/kernel", 0): "int4x32",
        ("embedding/embedding", -1): "palette4x16",
        ("engrams/key_proj/kernel", -1): "int8x96",
        ("q_proj/kernel", 1): "float16",
    }
    rounded = {name: value.clone() for name, value in given.items()}
    round_parameters(rounded.items(), sources, wanted)
    assert torch.equal(rounded["kernel"], Form("int", 4, 32).rounded(given["kernel"].t()).t())
    assert torch.equal(rounded["table"], Form("palette", 4, 16).rounded(given["table"]))
    for site in range(2):
        assert torch.equal(rounded["sites"][site], Form("int", 8, 96).rounded(given["sites"][site].t()).t())
    for name in ("other_layer", "unknown"):
        assert torch.equal(rounded[name], given[name])
    assert all(not torch.equal(rounded[name], given[name]) for name in ("kernel", "table", "sites"))


def test_a_scheme_survives_a_report() -> None:
    scheme = Scheme((("a", 1),), (("b", -1),), "symmetric", (("c", 2, "int4x32"), ("d", -1, "palette4x16")), True)
    assert Scheme.from_record(scheme.record()) == scheme
    # What earlier reports have.
    assert Scheme.from_record({"halves": [["a", 1]], "int8": [], "activations": None}) == Scheme((("a", 1),))
