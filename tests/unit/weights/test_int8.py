"""Int8 rows, and that the emulated FULLY_CONNECTED is the runtime's, to the last bits."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from needle_export.weights.int8 import Activations, dequantize_rows, dynamic_linear, quantize_rows

KERNELS: tuple[Activations, ...] = ("asymmetric", "symmetric")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows of very different sizes, as a scale a row is there for."""
    return normal(rows, columns, seed=seed) * normal(rows, 1, seed=seed + 1).mul(2).exp()


# Quantising


def test_a_value_is_the_nearest_level() -> None:
    weight = uneven(64, 96)
    values, scales = quantize_rows(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.float32
    assert torch.equal(scales, weight.abs().amax(dim=1) / 127)
    error = (dequantize_rows(values, scales) - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())


def test_every_row_uses_its_whole_range() -> None:
    values, _ = quantize_rows(uneven(64, 96))
    assert torch.equal(values.to(torch.int32).abs().amax(dim=1), torch.full((64,), 127, dtype=torch.int32))


def test_the_lowest_level_stays_unused() -> None:
    values, _ = quantize_rows(torch.tensor([[-1.0, 1.0], [-3e38, 0.0]]))
    assert values.tolist() == [[-127, 127], [-127, 0]]


def test_negation_mirrors() -> None:
    weight = uneven(8, 32)
    values, scales = quantize_rows(weight)
    mirrored, same = quantize_rows(-weight)
    assert torch.equal(mirrored, -values) and torch.equal(same, scales)


def test_quantising_again_changes_nothing() -> None:
    values, scales = quantize_rows(uneven(64, 96))
    again, same = quantize_rows(dequantize_rows(values, scales))
    assert torch.equal(again, values)
    assert torch.allclose(same, scales, rtol=3e-7, atol=0)


@pytest.mark.parametrize("tiny", [0.0, -0.0, 1e-45, -1e-40, 1.4e-36])
def test_a_row_too_small_for_a_scale_is_zero(tiny: float) -> None:
    values, scales = quantize_rows(torch.tensor([[tiny, 0.0], [1.0, 2.0]]))
    assert values.tolist() == [[0, 0], [64, 127]]
    assert scales[0] == 1.0
    assert not bool(dequantize_rows(values, scales)[0].any())


def test_a_small_row_keeps_its_scale() -> None:
    values, scales = quantize_rows(torch.tensor([[2e-36, -1e-36]]))
    assert values.tolist() == [[127, -64]] and 0 < scales[0] < 1e-37


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3),
        torch.zeros(3, 0),
        torch.zeros(2, 2, dtype=torch.float16),
        torch.tensor([[1.0, torch.nan]]),
        torch.tensor([[1.0, -torch.inf]]),
    ],
    ids=["vector", "no columns", "float16", "nan", "infinity"],
)
def test_what_is_no_weight_is_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"float32 matrix|NaN"):
        quantize_rows(weight)


# The linear layer, against itself


@pytest.mark.parametrize("kernel", KERNELS)
def test_leading_dimensions_are_rows(kernel: Activations) -> None:
    values, scales = quantize_rows(normal(16, 32))
    x = normal(2, 3, 32, seed=7)
    flat = dynamic_linear(x.reshape(6, 32), values, scales, None, kernel)
    assert torch.equal(dynamic_linear(x, values, scales, None, kernel), flat.reshape(2, 3, 16))
    assert torch.equal(dynamic_linear(x[1, 2], values, scales, None, kernel), flat[5])


@pytest.mark.parametrize("kernel", KERNELS)
def test_zeros_give_the_bias(kernel: Activations) -> None:
    values, scales = quantize_rows(normal(16, 32))
    bias = normal(16, seed=3)
    assert torch.equal(dynamic_linear(torch.zeros(2, 32), values, scales, bias, kernel), bias.expand(2, 16))


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_is_near_the_product_and_not_equal_to_it(kernel: Activations) -> None:
    values, scales = quantize_rows(normal(64, 768))
    x = normal(8, 768, seed=5)
    exact = x @ dequantize_rows(values, scales).T
    error = (dynamic_linear(x, values, scales, None, kernel) - exact).square().mean().sqrt() / exact.std()
    assert 0.003 < error < 0.012


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(2, 4, dtype=torch.float64)},
        {"values": torch.zeros(5, 4)},
        {"scales": torch.ones(1)},
        {"scales": torch.ones(5, 1)},
        {"bias": torch.zeros(1)},
        {"bias": torch.zeros(5, dtype=torch.float64)},
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_does_not_fit_is_refused(wrong: dict[str, Tensor], kernel: Activations) -> None:
    right = {
        "x": torch.zeros(2, 4),
        "values": torch.zeros(5, 4, dtype=torch.int8),
        "scales": torch.ones(5),
        "bias": torch.zeros(5),
    }
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        dynamic_linear(**(right | wrong), activations=kernel)  # type: ignore[arg-type]  # wrong on purpose


# The linear layer, against the runtime


class Runtime:
    """Builds one FULLY_CONNECTED, and one EMBEDDING_LOOKUP of the same weight, and runs them."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "linear.tflite")

    def build(self, values: Tensor, scales: Tensor, bias: Tensor | None, rows: int, asymmetric: bool) -> None:
        pytest.importorskip("litert_converter")
        from litert_converter.mlir import ir, passmanager
        from litert_converter.mlir._mlir_libs import converter_api_ext
        from litert_converter.mlir.dialects import func

        outputs, inputs = values.shape
        context = ir.Context()
        converter_api_ext.prepare_mlir_context(context)
        with context, ir.Location.unknown():

            def floats(*shape: int) -> Any:
                return ir.RankedTensorType.get(shape, ir.F32Type.get())

            def create(name: str, result: Any, operands: Any = (), **attributes: Any) -> Any:
                return ir.Operation.create(
                    f"tfl.{name}", results=[result], operands=list(operands), attributes=attributes
                ).result

            module = ir.Module.create()
            tokens = ir.RankedTensorType.get((outputs,), ir.IntegerType.get_signless(32))
            signature = ir.FunctionType.get(
                [floats(rows, inputs), tokens], [floats(rows, outputs), floats(outputs, inputs)]
            )
            function = func.FuncOp("main", signature, ip=ir.InsertionPoint.at_block_begin(module.body))
            with ir.InsertionPoint(function.add_entry_block()):
                x, rows_wanted = function.arguments
                steps = ",".join(repr(s) for s in scales.tolist())
                row_quantised = ir.Type.parse(
                    f"tensor<{outputs}x{inputs}x!quant.uniform<i8<-127:127>:f32:0, {{{steps}}}>>"
                )
                stored = ir.RankedTensorType.get((outputs, inputs), ir.IntegerType.get_signless(8))
                weight = create(
                    "pseudo_qconst",
                    row_quantised,
                    qtype=ir.TypeAttr.get(row_quantised),
                    value=ir.DenseElementsAttr.get(values.numpy(), type=stored),
                )
                if bias is None:
                    added = create("no_value", ir.NoneType.get(), value=ir.UnitAttr.get())
                else:
                    constant = ir.DenseElementsAttr.get(bias.numpy(), type=floats(outputs))
                    added = create("pseudo_const", floats(outputs), value=constant)
                product = create(
                    "fully_connected",
                    floats(rows, outputs),
                    (x, weight, added),
                    fused_activation_function=ir.StringAttr.get("NONE"),
                    weights_format=ir.StringAttr.get("DEFAULT"),
                    keep_num_dims=ir.BoolAttr.get(True),
                    asymmetric_quantize_inputs=ir.BoolAttr.get(asymmetric),
                )
                found = create("embedding_lookup", floats(outputs, inputs), (rows_wanted, weight))
                func.ReturnOp([product, found])
            function.attributes["sym_visibility"] = ir.StringAttr.get("public")
            converter_api_ext.set_signature(
                module.operation, signature_name="main", input_names=["x", "tokens"], output_names=["y", "rows"]
            )
            merged = converter_api_ext.merge_modules([module])
            config = converter_api_ext.ConvertToTFLConfig()
            config.model_origin_framework = "PYTORCH"
            config.enable_x64 = False
            converter_api_ext.run_convert_to_tfl_passes(merged, passmanager.PassManager(), config)
        converter_api_ext.export_flatbuffer_to_file(getattr(merged, "operation", merged), self._path)

    def run(self, x: Tensor, outputs: int, delegate: bool) -> tuple[Tensor, Tensor]:
        pytest.importorskip("ai_edge_litert")
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        resolver = OpResolverType.AUTO if delegate else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = Interpreter(self._path, num_threads=1, experimental_op_resolver_type=resolver)
        result = interpreter.get_signature_runner("main")(x=x.numpy(), tokens=np.arange(outputs, dtype=np.int32))
        return torch.from_numpy(result["y"].copy()), torch.from_numpy(result["rows"].copy())

    def linear(
        self, x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, kernel: Activations, flag: bool
    ) -> Tensor:
        self.build(values, scales, bias, len(x), flag)
        return self.run(x, len(values), kernel == "asymmetric")[0]


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path)


#: Where the emulated order of roundings is the kernels' own: x86-64, with AVX2 or better for the asymmetric one.
TO_THE_BIT = platform.machine().lower() in ("x86_64", "amd64")


def misses(got: Tensor, want: Tensor, bias: Tensor | None) -> float:
    """The share of outputs further away than roundings that a processor may place elsewhere.

    That is two units in the last place of the product and of the bias. One level of one input is thousands of them.
    """
    offset = torch.zeros(()) if bias is None else bias
    bound = 2 * torch.finfo(torch.float32).eps * ((want - offset).abs() + want.abs() + offset.abs())
    return float(((got - want).abs() > bound).float().mean())


def special(columns: int) -> Tensor:
    """Rows that a scheme may treat differently from others."""
    usual = normal(columns, seed=11)
    ties = (torch.arange(columns) % 509 - 254) / 2
    ties[:2] = torch.tensor([-127.0, 127.0])
    wide = ties.clone()
    wide[0] = -128.0
    first = torch.zeros(columns)
    first[0] = 1.0
    outlier = usual.clone()
    outlier[0] = 1000.0
    return torch.stack(
        [
            torch.zeros(columns),
            -torch.zeros(columns),
            usual.abs() + 1,
            -usual.abs() - 1,
            torch.full((columns,), 3.0),
            torch.full((columns,), -3.0),
            first,
            -first,
            outlier,
            usual * 1e-20,
            usual * 1e-34,
            usual * 1e20,
            ties,
            wide,
        ]
    )


SHAPES = [(1, 16, 32), (3, 17, 33), (1, 40, 128), (64, 20, 128), (3, 96, 768), (2, 24, 3072)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_the_runtime_agrees(
    runtime: Runtime, rows: int, outputs: int, inputs: int, biased: bool, kernel: Activations
) -> None:
    values, scales = quantize_rows(uneven(outputs, inputs))
    x = uneven(rows, inputs, seed=5)
    bias = normal(outputs, seed=9) if biased else None
    got = runtime.linear(x, values, scales, bias, kernel, flag=False)
    want = dynamic_linear(x, values, scales, bias, kernel)
    assert misses(got, want, bias) == 0
    assert not TO_THE_BIT or torch.equal(got, want)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_the_runtime_agrees_about_special_rows(runtime: Runtime, biased: bool, kernel: Activations) -> None:
    weight = uneven(20, 96)
    weight[3] = 0
    values, scales = quantize_rows(weight)
    bias = normal(20, seed=9) if biased else None
    x = special(96)
    got = runtime.linear(x, values, scales, bias, kernel, flag=False)
    want = dynamic_linear(x, values, scales, bias, kernel)
    assert misses(got, want, bias) == 0
    assert not TO_THE_BIT or torch.equal(got, want)


@pytest.mark.parametrize(("kernel", "other"), [KERNELS, KERNELS[::-1]])
def test_the_other_scheme_does_not_fit(runtime: Runtime, kernel: Activations, other: Activations) -> None:
    """Nor does the exact product, or a scale that is off by a millionth: the bound above is worth something."""
    values, scales = quantize_rows(uneven(96, 768))
    x = uneven(3, 768, seed=5)
    got = runtime.linear(x, values, scales, None, kernel, flag=False)
    assert misses(got, dynamic_linear(x, values, scales, None, other), None) > 0.99
    assert misses(got, x @ dequantize_rows(values, scales).T, None) > 0.99
    assert misses(got, dynamic_linear(x, values, scales * 1.000002, None, kernel), None) > 0.99


@pytest.mark.parametrize(
    ("kernel", "lowest", "levels"),
    [("asymmetric", -128.0, [0, 2, 2, 0, -2, -2]), ("symmetric", -127.0, [1, 2, 3, -1, -2, -3])],
)
def test_halves_fall_where_the_runtime_lets_them(
    runtime: Runtime, kernel: Activations, lowest: float, levels: list[int]
) -> None:
    """Half to even in XNNPACK, away from zero in TFLite's kernel. The step is 1 and the weight the identity."""
    x = torch.tensor([[127.0, lowest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]])
    values = torch.eye(8, dtype=torch.int8)
    scales = torch.ones(8)
    got = runtime.linear(x, values, scales, None, kernel, flag=False)
    assert got[0, 2:].tolist() == levels
    assert dynamic_linear(x, values, scales, None, kernel)[0, 2:].tolist() == levels


def test_the_delegate_ignores_the_flag_and_the_builtin_kernel_does_not(runtime: Runtime) -> None:
    values, scales = quantize_rows(uneven(96, 768))
    x = uneven(3, 768, seed=5)
    want = dynamic_linear(x, values, scales, None, "asymmetric")
    runtime.build(values, scales, None, len(x), asymmetric=True)
    assert misses(runtime.run(x, 96, delegate=True)[0], want, None) == 0
    builtin = runtime.run(x, 96, delegate=False)[0]
    assert misses(builtin, dynamic_linear(x, values, scales, None, "symmetric"), None) > 0.99
    # The same levels but for ties, and another order of roundings.
    assert (builtin - want).abs().max() < 1e-3 * want.abs().max()


@pytest.mark.parametrize("delegate", [True, False], ids=["delegate", "builtin"])
def test_a_looked_up_row_is_dequantised_exactly(runtime: Runtime, delegate: bool) -> None:
    """One tensor is weight of the linear layer and table of the lookup, as tied embeddings are."""
    values, scales = quantize_rows(uneven(24, 64))
    runtime.build(values, scales, None, 1, asymmetric=False)
    assert torch.equal(runtime.run(torch.zeros(1, 64), 24, delegate)[1], dequantize_rows(values, scales))
