"""What an artifact will have to do, before anything is built: products and lookups by shape, other ops by their number.

Products of weights are told by matrix, as :mod:`.inventory` has them, and attention by layer. How many ops there are
beside these follows from counts of finished artifacts (``overheads.json``); what they move is left out, as it is little
in a decode step. Letters: T positions of a call, S rows of a cache that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from needle_export.checkpoint.dimensions import Geometry
from needle_export.config.options import BuildOptions
from needle_export.measure.inventory import Tensor
from needle_export.measure.predict import Predicted, facts, kinds_of
from needle_export.measure.work import OpWork, Phase, Prompt, Work, gathered, pieces

#: The longest chunk of an ONNX prefill.
_CHUNK = 128

#: Rows of a cache that an ONNX host binds are a multiple of this many.
_ROW_STEP = 64

#: Schemes that a runtime multiplies as they are stored, by target; others are floats by then.
_INTEGERS = {"onnx": {"int8": "int8", "int4": "int4", "int2": "int4"}, "tflite": {"int8": "int8", "int4": "int4"}}


def predict_work(
    options: BuildOptions, geometry: Geometry, predicted: Predicted, position: int, prompts: tuple[int, ...] = ()
) -> Work:
    """The work of a decode step and of prompts.

    Args:
        predicted: of the same build.
        position: tokens before the decode step.
        prompts: their lengths, in tokens.
    """
    def call(before: int, tokens: int, name: str = "prefill") -> Phase:
        return _phase(options, geometry, predicted, name, before, tokens)

    return Work(
        options.target, position, call(position, 1, "decode"),
        tuple(Prompt(n, tuple(call(*piece) for piece in _calls(predicted.buckets, n))) for n in sorted(prompts)),
    )


def uncounted(options: BuildOptions, predicted: Predicted) -> tuple[str, ...]:
    """Kinds of graphs in an artifact whose ops ``overheads.json`` has no counts of; the work of others is known."""
    told = facts()[options.target].get("ops", {})
    return tuple(kind for kind in kinds_of(options, predicted.weights) if kind not in told)


def _calls(buckets: tuple[int, ...], length: int) -> Iterator[tuple[int, int]]:
    """The calls of a prompt: (tokens before, tokens of the call, padding included)."""
    if not buckets:
        yield from pieces(length, _CHUNK)
        return
    for before, tokens in pieces(length, max(buckets)):
        yield before, next(b for b in sorted(buckets) if b >= tokens)


def _phase(options: BuildOptions, g: Geometry, predicted: Predicted, name: str, before: int, tokens: int) -> Phase:
    rows = options.context
    if options.target == "onnx":
        rows = min(rows, -(-(before + tokens) // _ROW_STEP) * _ROW_STEP)
    ops = [*_products(options, g, predicted, tokens), *_attention(options, g, tokens, rows)]
    rest = round(_count(options, g, predicted, name)) - sum(op.count for op in ops)
    ops.append(OpWork("other", max(0, rest), 0, 0, 0, 0, "fp32"))
    return Phase(name, tokens, rows, gathered(ops))


def _count(options: BuildOptions, g: Geometry, predicted: Predicted, name: str) -> float:
    """Ops of a call, by the counts of finished artifacts of the same kinds."""
    told = facts()[options.target]["ops"]
    total = 0.0
    for kind, share in kinds_of(options, predicted.weights).items():
        fixed, layer, site = told[kind]["decode" if name == "decode" else "prefill"]
        total += share * (fixed + g.num_layers * layer + len(g.engram_layers) * site)
    return total


def _products(options: BuildOptions, g: Geometry, predicted: Predicted, tokens: int) -> Iterator[OpWork]:
    joined: dict[tuple[object, ...], list[tuple[Tensor, int]]] = {}
    small = 0
    for t, size in predicted.weights:
        if t.role == "heads":
            continue
        if t.kind == "table":
            yield _lookup(options, g, t, size, tokens)
            if t.source.startswith("engrams"):
                continue
            # The same bytes are the head's matrix, as far as ids can be predicted.
            size = size * g.head_vocab // t.rows
            yield _product(options, [(t, size)], tokens, g.head_vocab * t.columns)
        elif t.kind in ("matrix", "condition"):
            key = (t.joined or t.source, t.layer, t.site, options.schemes.scheme(t.source, t.role))
            joined.setdefault(key, []).append((t, size))
        elif t.kind == "factor":
            # Of the N numbers of a position as a matrix [a, b]: a product from the left, or from the right.
            a, b = g.hada_blocks
            macs = t.elements * (b if t.source.endswith("a") else a)
            yield OpWork("factor", 1, _widened(options, t), 0, 0, tokens * macs, _floats(options))
        else:
            small += _widened(options, t)
    yield OpWork("vectors", 1, small, 0, 0, 0, _floats(options))
    for parts in joined.values():
        yield _product(options, parts, tokens, sum(t.elements for t, _ in parts))


def _product(options: BuildOptions, parts: list[tuple[Tensor, int]], tokens: int, elements: int) -> OpWork:
    dtype, size = _held(options, parts[0][0], sum(size for _, size in parts), elements)
    return OpWork("product", 1, size, 0, 0, tokens * elements, dtype)


def _lookup(options: BuildOptions, g: Geometry, t: Tensor, size: int, tokens: int) -> OpWork:
    """Rows of a table for each position: of the embedding one, of the engram one a table and site."""
    count = tokens * (g.engram_tables * len(g.engram_layers) if t.source.startswith("engrams") else 1)
    return OpWork("lookup", 1, count * size // t.rows, 0, 0, 0, _floats(options))


def _held(options: BuildOptions, t: Tensor, size: int, elements: int) -> tuple[str, int]:
    """Type and bytes of a matrix as it is multiplied."""
    scheme = options.schemes.scheme(t.source, t.role)
    integers = _INTEGERS.get(options.target, {}).get(scheme)
    if options.target == "coreml":
        return _floats(options), size  # read as it is stored
    if integers is None or (t.kind == "condition" and options.target == "onnx"):
        return "fp32", 4 * elements  # widened when the file is loaded
    return integers, size  # what is too small for its scheme is as large as a float


def _widened(options: BuildOptions, t: Tensor) -> int:
    """Bytes of a small weight when it is read, in the type that the artifact computes in."""
    return (2 if _floats(options) == "fp16" else 4) * t.elements


def _floats(options: BuildOptions) -> str:
    return "fp16" if options.target == "coreml" and options.weights != "fp32" else "fp32"


def _attention(options: BuildOptions, g: Geometry, tokens: int, rows: int) -> Iterator[OpWork]:
    element = {"fp32": 4, "fp16": 2, "int8": 1}[options.cache_form]
    for layer in range(g.num_layers):
        local = g.sliding_window and layer not in g.global_layers
        seen = min(rows, g.sliding_window) if local else rows
        for width in (g.qk_head_dim, g.v_head_dim):
            state = seen * g.num_kv_heads * width * element
            yield OpWork("attention", 1, 0, state, 0, tokens * g.num_heads * seen * width, _floats(options))
