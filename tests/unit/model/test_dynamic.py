"""The reference computes products with quantised weights as a runtime does, and nothing else differently."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import SMALL
from needle_export.model import dynamic
from needle_export.model.dynamic import Blocks, DynamicProducts, Rows, quantize_parameters
from needle_export.model.step import Step, parameter_sources
from needle_export.weights.forms import Form
from needle_export.weights.int8 import asymmetric, dequantize_rows, dynamic_linear, quantize_rows
from needle_export.weights.linear import dequantize_blocks, dynamic_blocks, dynamic_row_blocks, quantize_blocks
from tests.support.programs import needle, tokens

#: Of every block, what the int8 scheme of a target might store so; and the two tables.
KERNELS = ("q_proj/kernel", "k_proj/kernel", "v_proj/kernel", "gate_proj/kernel", "out_proj/kernel")
IDS = torch.from_numpy(tokens(SMALL, 20))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(activations: Any = "asymmetric") -> partial[Rows]:
    return partial(Rows.of, activations)


def one_matrix(weight: Tensor, table: bool = False, make: Any = None) -> dict[int, list[Any]]:
    """Round one parameter in place as if it were a kernel, or a table."""
    name = dynamic._TABLES[0] if table else "kernel"
    return quantize_parameters([("w", weight)], {"w": (name, "role", 0)}, {(name, 0): make or rows()})


def test_a_kernels_columns_are_its_rows() -> None:
    weight = normal(12, 7)  # [I, O]
    before = weight.clone()
    matrices = one_matrix(weight)
    values, scales = quantize_rows(before.t().contiguous())
    (got,) = matrices[weight.data_ptr()]
    assert torch.equal(got.values, values) and torch.equal(got.scales, scales)
    assert torch.equal(weight, dequantize_rows(values, scales).t()) and not torch.equal(weight, before)


def test_a_table_is_rounded_row_by_row() -> None:
    table = normal(12, 7)
    before = table.clone()
    one_matrix(table, table=True)
    assert torch.equal(table, dequantize_rows(*quantize_rows(before)))


def test_only_what_is_wanted_is_rounded() -> None:
    same = {name: normal(6, 6, seed=i) for i, name in enumerate(("wanted", "another layer", "another", "unknown"))}
    before = {name: value.clone() for name, value in same.items()}
    sources = {"wanted": ("k", "r", 1), "another layer": ("k", "r", 2), "another": ("j", "r", 1)}
    matrices = quantize_parameters(same.items(), sources, {("k", 1): rows()})
    assert list(matrices) == [same["wanted"].data_ptr()]
    assert {name for name, value in same.items() if not torch.equal(value, before[name])} == {"wanted"}


@pytest.mark.parametrize("activations", ["asymmetric", "symmetric"])
def test_a_product_is_the_runtimes(activations: Any) -> None:
    x, weight = normal(5, 12), normal(12, 7, seed=1)
    matrices = one_matrix(weight, make=rows(activations))
    integers = matrices[weight.data_ptr()][0]
    wanted = dynamic_linear(x, integers.values, integers.scales, None, activations)
    plain = torch.matmul(x, weight)
    with DynamicProducts(matrices):
        assert torch.equal(torch.matmul(x, weight), wanted)
        assert torch.equal(torch.matmul(x.unsqueeze(0), weight), wanted.unsqueeze(0))
    assert not torch.equal(wanted, plain) and torch.allclose(wanted, plain, atol=0.5)


def test_a_product_with_a_scale_for_each_run_of_columns() -> None:
    x, weight, form = normal(5, 64), normal(64, 7, seed=1), Form("int", 4, 32)
    values, scales = quantize_blocks(weight.t().contiguous(), 4, 32)
    matrices = one_matrix(weight, make=partial(Blocks.of, form, "blocks"))
    assert torch.equal(weight, dequantize_blocks(values, scales).t())
    wanted = dynamic_blocks(x, values, scales)
    with DynamicProducts(matrices):
        assert torch.equal(torch.matmul(x, weight), wanted)
    plain = torch.matmul(x, weight)
    assert not torch.equal(wanted, plain) and torch.allclose(wanted, plain, atol=0.5)


def test_inputs_of_blocks_may_be_rounded_by_row() -> None:
    x, weight, form = normal(5, 64), normal(64, 7, seed=1), Form("int", 4, 32, brain=True)
    values, scales = form.quantize(weight.t().contiguous())
    wanted, other = dynamic_row_blocks(x, values, scales), dynamic_blocks(x, values, scales)
    # The docstring, in floats: levels of a row by its own step, and the matrix as it stands for.
    levels, step = asymmetric(x)
    exact = (levels * step).double() @ dequantize_blocks(values, scales).double().T
    assert torch.allclose(wanted.double(), exact, atol=1e-5) and not torch.allclose(wanted, other, atol=1e-4)
    assert torch.equal(dynamic_row_blocks(x.reshape(1, 5, 64), values, scales), wanted.unsqueeze(0))
    with DynamicProducts(one_matrix(weight, make=partial(Blocks.of, form, "asymmetric"))):
        assert torch.equal(torch.matmul(x, weight), wanted)
    with pytest.raises(ValueError, match="inputs of int4x32bf16 are rounded by runs, or asymmetrically by row"):
        Blocks.of(form, "symmetric", weight.t().contiguous())
    with pytest.raises(ValueError, match="doesn't fit"):
        dynamic_row_blocks(x[:, :32], values, scales)


def test_a_tied_head_takes_the_tables_own_rows() -> None:
    x, table = normal(5, 12), normal(30, 12, seed=1)
    matrices = one_matrix(table, table=True)
    values, scales = matrices[table.data_ptr()][0].values, matrices[table.data_ptr()][0].scales
    with DynamicProducts(matrices):
        whole = nn.functional.linear(x, table)
        first = nn.functional.linear(x, table[:9])  # fewer outputs than the vocabulary
        looked_up = nn.functional.embedding(torch.tensor([3, 4]), table)
    assert torch.equal(whole, dynamic_linear(x, values, scales, None, "asymmetric"))
    assert torch.equal(first, whole[:, :9])
    assert torch.equal(looked_up, dequantize_rows(values, scales)[3:5])


def test_stacked_matrices_meet_their_own_inputs() -> None:
    x, weight = normal(3, 5, 12), normal(3, 12, 7, seed=1)
    matrices = one_matrix(weight)
    assert len(matrices[weight.data_ptr()]) == 3
    with DynamicProducts(matrices):
        got = torch.matmul(x, weight)
    for site, integers in enumerate(matrices[weight.data_ptr()]):
        assert torch.equal(got[site], dynamic_linear(x[site], integers.values, integers.scales, None, "asymmetric"))


def test_other_products_are_left_alone() -> None:
    x, weight, other = normal(12, 12), normal(12, 12, seed=1), normal(12, 12, seed=2)
    matrices = one_matrix(weight)
    with DynamicProducts(matrices, jitter=torch.Generator().manual_seed(0)):
        assert torch.equal(torch.matmul(x, other), torch.mm(x, other))
        assert torch.equal(torch.matmul(weight, x), torch.mm(weight, x))  # on the left it is no weight
        assert torch.equal(nn.functional.linear(x, other), torch.mm(x, other.t()))
        assert torch.equal(weight + x, torch.add(x, weight)) and torch.equal(weight[0], weight[0, :])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Inputs of every product that is computed in integers."""
    found: list[Tensor] = []

    def spy(x: Tensor, *rest: Any) -> Tensor:
        found.append(x)
        return dynamic_linear(x, *rest)

    monkeypatch.setattr(dynamic.int8, "dynamic_linear", spy)
    yield found


def test_jitter_moves_every_input_by_one_unit_in_the_last_place(asked: list[Tensor]) -> None:
    x, weight = normal(5, 12) * torch.tensor([1e-3, 1.0, 50.0, 1e4, 1.0])[:, None], normal(12, 7, seed=1)
    x[4] = 0
    matrices = one_matrix(weight)
    for seed in (0, 0, 1):
        with DynamicProducts(matrices, jitter=torch.Generator().manual_seed(seed)):
            torch.matmul(x, weight)
    with DynamicProducts(matrices):
        torch.matmul(x, weight)
    first, same, other, still = asked
    assert torch.equal(first, same) and not torch.equal(first, other) and torch.equal(still, x)
    # Of the row's greatest value, up or down, both of them often.
    steps = (first.double() - x.double()) / (x.abs().amax(-1, keepdim=True).double() * 2.0**-23)
    assert torch.equal(steps[4].nan_to_num(), torch.zeros(12, dtype=torch.float64))
    # Rounding to float32 takes at most half a unit of a value as great as the row's greatest.
    assert bool(((steps[:4].abs() - 1).abs() <= 0.5).all())
    assert bool((steps[:4] > 0).any()) and bool((steps[:4] < 0).any())


def test_nothing_leaks_out_of_the_context() -> None:
    x, weight = normal(5, 12), normal(12, 7, seed=1)
    matrices = one_matrix(weight)
    plain = torch.matmul(x, weight)
    for _ in range(2):
        with DynamicProducts(matrices):
            assert not torch.equal(torch.matmul(x, weight), plain)
        assert torch.equal(torch.matmul(x, weight), plain)
    with pytest.raises(RuntimeError), DynamicProducts(matrices):
        raise RuntimeError
    assert torch.equal(torch.matmul(x, weight), plain)


def quantised_model() -> tuple[Any, partial[DynamicProducts], int]:
    """The model with kernels and tables rounded, its products, and how many matrices that makes."""
    net = needle(SMALL)
    step = Step(net, 32)
    sources, tensors = parameter_sources(step), [*step.named_parameters(), *step.named_buffers()]
    wanted = {(s[0], s[2]): rows() for s in sources.values() if s[0].endswith(KERNELS) or s[0] in dynamic._TABLES}
    with torch.inference_mode():
        matrices = quantize_parameters(tensors, sources, wanted)
    return net, partial(DynamicProducts, matrices), len(matrices)


def test_every_product_of_the_model_with_such_a_weight_is_met(asked: list[Tensor]) -> None:
    net, products, count = quantised_model()
    with torch.inference_mode():
        rounded = net(IDS.unsqueeze(0))[0].numpy()
        assert not asked
        with products():
            got = net(IDS.unsqueeze(0))[0].numpy()
        assert torch.equal(net(IDS.unsqueeze(0))[0], torch.from_numpy(rounded))
    # Every matrix once, but for the engram's table, which is only looked up in.
    assert count == 5 * SMALL.num_layers + 2 and len(asked) == count - 1
    assert 1e-4 < np.abs(got - rounded).max() < 0.5
    assert (got.argmax(-1) == rounded.argmax(-1)).mean() > 0.8


def test_the_cached_step_rounds_the_same_inputs() -> None:
    from needle_export.model.state import empty_state, state_specs

    net, products, _ = quantised_model()
    with torch.inference_mode(), products():
        whole = net(IDS.unsqueeze(0))[0]
        state = empty_state(state_specs(SMALL, 32))
        logits, _ = net.step(IDS[:16], torch.tensor([0]), state, 32)
    # Rows are rounded one by one, so what stands beside a row changes nothing but the order of sums.
    assert float((logits - whole[:16]).abs().median()) < 1e-3
