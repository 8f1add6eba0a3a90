"""What better rounding saves, on a small trained model: divergence from the float model on held-out sequences.

    python -m tests.benchmarks.calibration [--steps N] [--model FILE]

Trains a Needle with all of its parts on the language of ``calibration_model`` (seeded, one thread), rounds every matrix
and table that the ONNX target holds in blocks, by each method of ``model/improve.py``, and prints the mean of KL(float,
rounded) in nats a token over sequences that neither training nor calibration has seen. ``inputs`` is the same with the
inputs of products rounded too, as ONNX Runtime does. All numbers come from one run; ``--model`` keeps the trained
network, so that the next run starts behind the training.
"""

from __future__ import annotations

import argparse
import copy
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from needle_export.model.dynamic import Blocks, DynamicProducts, quantize_parameters
from needle_export.model.improve import METHODS, Method, improve
from needle_export.model.moments import Moments, gather
from needle_export.model.network import Needle
from needle_export.model.step import Step, parameter_sources
from needle_export.weights.forms import Form
from tests.benchmarks import calibration_model as made

#: What the ONNX target holds in blocks.
HELD = ("kernel", "embedding", "phi_pre", "phi_post", "phi_res")
HELD_OUT, CALIBRATION = 3 * 10**6, 2 * 10**6
CASES = ((4, 32), (4, 128), (3, 32), (3, 128), (2, 32))


def forms_of(net: Needle, bits: int, block: int) -> dict[tuple[str, int], Form]:
    """A form for each matrix: blocks of ``block``, or the greatest part of it that divides the columns."""
    step, forms = Step(net, 32), {}
    parameters = dict(step.named_parameters())
    for path, (source, _, layer) in parameter_sources(step).items():
        if source.endswith(HELD):
            value = parameters[path]
            columns = value.shape[-1] if source.endswith("embedding") else value.shape[-2]
            size = block
            while columns % size:
                size //= 2
            forms[source, layer] = Form("int", bits, size)
    return forms


@torch.inference_mode()
def rounded(net: Needle, forms: dict[tuple[str, int], Form], method: Method, moments: Moments) -> Needle:
    """A copy of the network whose matrices are rounded."""
    other = copy.deepcopy(net)
    step = Step(other, 32)
    # The moments know the parameters of the network that they were gathered from.
    improve(step.named_parameters(), parameter_sources(step), forms, method, moments.moved(net, other))
    return other


def scores(net: Needle, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, T, V], float64."""
    return log_softmax(net(tokens).double(), -1)


def main() -> None:
    """Train, round, compare, print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--sequences", type=int, default=64, help="to calibrate with")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    net, losses = made.trained(given.steps, given.model)
    print(f"{len(losses)} steps, {time.perf_counter() - begun:.0f} s; loss {losses[0]:.3f} to {losses[-1]:.3f}")
    language = made.Language()
    held_out = language.sequences(48, HELD_OUT)
    parameters = [p for p in net.parameters() if p.dim() > 1]
    begun = time.perf_counter()
    moments = gather(net, parameters, language.sequences(given.sequences, CALIBRATION))
    print(f"{given.sequences} sequences of {made.LENGTH} tokens to calibrate with, {time.perf_counter() - begun:.1f} s")
    with torch.inference_mode():
        wanted = scores(net, held_out)
    print(f"held out: loss of the float model {loss(wanted, held_out):.4f}")
    print("| form | method | KL | of rtn's | loss | same choice | KL, inputs too | of rtn's | s |")
    for bits, block in CASES:
        forms, plain = forms_of(net, bits, block), []
        for method in METHODS:
            begun = time.perf_counter()
            other = rounded(net, forms, method, moments)
            took = time.perf_counter() - begun
            with torch.inference_mode():
                found = scores(other, held_out)
                with products(other, forms):
                    dynamic = scores(other, held_out[:16])
            off = [divergence(found, wanted), divergence(dynamic, wanted[:16])]
            plain = plain or off
            same = float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
            print(
                f"| int{bits}x{block} | {method} | {off[0]:.5f} | {off[0] / plain[0]:.3f} "
                f"| {loss(found, held_out):.4f} | {same:.4f} | {off[1]:.5f} | {off[1] / plain[1]:.3f} | {took:.1f} |",
                flush=True,
            )


def products(net: Needle, forms: dict[tuple[str, int], Form]) -> DynamicProducts:
    """Products with inputs rounded as well. The matrices lie on levels already, and stay."""
    step = Step(net, 32)
    before = {name: value.clone() for name, value in step.named_parameters()}
    wanted = {key: partial(Blocks.of, form) for key, form in forms.items()}
    matrices = quantize_parameters(step.named_parameters(), parameter_sources(step), wanted)
    assert all(torch.equal(value, before[name]) for name, value in step.named_parameters())
    return DynamicProducts(matrices)


def divergence(found: Tensor, wanted: Tensor) -> float:
    """KL(wanted, found), nats a token."""
    return float(kl_div(found, wanted, log_target=True, reduction="none").sum(-1).mean())


def loss(found: Tensor, tokens: Tensor) -> float:
    """Nats a token."""
    return float(cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


if __name__ == "__main__":
    main()
