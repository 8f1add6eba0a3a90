"""What an artifact's files hold of a model, weight by weight: from its geometry and the schemes, without building it.

Each target's rules for a weight of given shape are written down once more here, in integers alone, so that they can be
asked in no time and without a target's packages; ``tests/unit/measure/test_inventory.py`` holds them against what the
targets themselves say and store.

Dimension letters: O outputs (rows of a matrix), I inputs (its columns); a geometry's are those of
``checkpoint.dimensions``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from needle_export.checkpoint.dimensions import COND_RANK, Geometry
from needle_export.checkpoint.layout import ATTENTION, BLOCK, MLP, head_shapes, role_of
from needle_export.config.rules import Rules

Kind = Literal["table", "matrix", "condition", "factor", "taps", "heads", "scale", "diagonal", "gate", "bias", "vector"]

#: Bits and group of a container's codes of a tensor, by source, block and site; None where it holds floats.
Imported = Callable[[str, int, int], tuple[int, int] | None]

#: Indices of three levels, ``bits`` 5 in a container, take two bits.
_INDEX_BITS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 2}

#: Bits of codes that are made from floats.
_CODES = {"cq4": 4, "cq2": 2}

#: Bits of ONNX Runtime's integers, and the fewest columns a block of them.
_ONNX_BITS, _ONNX_LEAST = {"int8": 8, "int4": 4, "int2": 2}, {8: 16, 4: 16, 2: 32}


@dataclass(frozen=True)
class Tensor:
    """A weight as the graphs have it, padding cut off.

    Attributes:
        source: the checkpoint tensor's name, without an engram site's number.
        role: of the byte ledger.
        layer: block, or -1.
        kind: what it is to a target. A ``table`` is read by rows, a ``matrix`` multiplies, a ``condition`` is one of
            the two small matrices that condition the MLP, a ``factor`` one of a Kronecker product, ``taps`` of a
            convolution, ``heads`` the scale of a norm a head. The others are vectors: the ``scale`` of a norm, a
            ``diagonal`` (the MLP's first), the ``gate`` of attention, a ``bias`` of lanes, any other ``vector``.
        rows, columns: O and I; taps and channels; heads and width.
        site: of the engram, or -1.
        joined: what else is stored in one matrix with it, if the schemes are the same, has this name and block too.
    """

    source: str
    role: str
    layer: int
    kind: Kind
    rows: int
    columns: int
    site: int = -1
    joined: str = ""

    @property
    def elements(self) -> int:
        """O * I."""
        return self.rows * self.columns


def tensors(g: Geometry, heads: tuple[str, ...] = ()) -> Iterator[Tensor]:
    """Every weight that an artifact of this geometry has.

    Args:
        heads: probe heads that it has.
    """
    d, sites = g.d_model, len(g.engram_layers)
    yield _tensor("embedding/embedding", -1, "table", g.vocab_size, d)
    if sites:
        yield _tensor("engrams/embedding", -1, "table", sites * g.engram_tables * g.engram_slots, g.engram_sub_dim)
    for site in range(sites):
        for name in ("key", "value"):
            yield _tensor(f"engrams/{name}_proj/kernel", -1, "matrix", d, g.engram_width, site, "engram")
    if sites:
        yield _tensor("engrams/taps", -1, "taps", g.engram_conv_taps, sites * d)
    for layer in range(g.num_layers):
        yield from _block(g, layer)
    yield _tensor("stack/final_norm/scale", -1, "scale", 1, d)
    for name in heads:
        head = g.head(name)
        for source, shape in head_shapes(g, head).items() if head else ():
            matrix = source.endswith("/kernel")
            rows = shape[-1] if matrix else 1
            yield _tensor(source, -1, "matrix" if matrix else "vector", rows, math.prod(shape) // rows)


def _block(g: Geometry, layer: int) -> Iterator[Tensor]:
    d, n, lanes = g.d_model, g.hada_n, g.mhc_lanes
    for name in ("pre", "post", "res"):
        width = lanes * lanes if name == "res" else lanes
        if name == "res" and layer == g.num_layers - 1:
            continue  # the mean over lanes that follows doesn't depend on the last block's mixing
        yield _tensor(f"stack/mhc_phi_{name}", layer, "matrix", width, lanes * d, joined="lanes")
        yield _tensor(f"stack/mhc_b_{name}", layer, "bias", 1, width)
    yield _tensor(f"{BLOCK}/ZCRMSNorm_0/scale", layer, "scale", 1, d)
    widths = {"q": g.num_heads * g.qk_head_dim, "k": g.num_kv_heads * g.qk_head_dim, "v": g.num_kv_heads * g.v_head_dim}
    out = g.num_heads * g.v_head_dim
    for name, width in widths.items():
        yield _tensor(f"{ATTENTION}/{name}_proj/kernel", layer, "matrix", width, d, joined="tapped")
        if g.qkv_conv_taps:
            yield _tensor(f"{ATTENTION}/{name}_taps", layer, "taps", g.qkv_conv_taps, width)
    yield _tensor(f"{ATTENTION}/gate_proj/kernel", layer, "matrix", out, d, joined="gate")
    yield _tensor(f"{ATTENTION}/out_proj/kernel", layer, "matrix", d, out)
    yield _tensor(f"{ATTENTION}/q_norm/scale", layer, "heads", g.num_heads, g.qk_head_dim)
    yield _tensor(f"{ATTENTION}/k_norm/scale", layer, "heads", g.num_kv_heads, g.qk_head_dim)
    yield _tensor(f"{BLOCK}/attn_gate", layer, "gate", 1, 1)
    yield _tensor(f"{BLOCK}/post_attn_norm/scale", layer, "scale", 1, d)
    yield _tensor(f"{BLOCK}/pre_hada_norm/scale", layer, "scale", 1, d)
    a, b = g.hada_blocks
    cut, width = (d // b, d) if d % b == 0 else (a, n)  # rows and columns that meet the padding are left out
    yield _tensor(f"{MLP}/d1", layer, "diagonal", 1, width)
    for name, size in (("d2", n), ("b2", n), ("d3", n), ("d4", width)):
        yield _tensor(f"{MLP}/{name}", layer, "vector", 1, size)
    for name, rows in (("w1", cut), ("w2", a), ("w3", cut)):
        yield _tensor(f"{MLP}/{name}a", layer, "factor", rows, a)
        yield _tensor(f"{MLP}/{name}b", layer, "factor", b, b)
    yield _tensor(f"{MLP}/cond_v", layer, "condition", COND_RANK, d)
    yield _tensor(f"{MLP}/cond_u", layer, "condition", n, COND_RANK)


def _tensor(source: str, layer: int, kind: Kind, rows: int, columns: int, site: int = -1, joined: str = "") -> Tensor:
    role = role_of(source.replace("engrams/", "engrams_0/"))
    return Tensor(source, role, layer, kind, rows, columns, site, joined)


def no_codes(source: str, layer: int, site: int) -> None:
    """A checkpoint that holds floats only."""


@dataclass(frozen=True)
class Stores:
    """How a target stores weights.

    Attributes:
        target: its name.
        rules: which scheme every weight has.
        reach: positions that the engram's convolution spans, (K - 1) * dilation + 1.
        prefill: whether there is a function for prompts beside decode.
        imported: the codes that the checkpoint holds.
        stateful: of Core ML, whether the host's system has states (iOS 18 on).
    """

    target: str
    rules: Rules
    reach: int
    prefill: bool = True
    imported: Imported = no_codes
    stateful: bool = True

    def bytes(self, tensor: Tensor, joined: int, common: int) -> int:
        """What a weight takes in the files.

        Args:
            joined: elements of all that is stored in one matrix with it, itself included.
            common: the greatest common divisor of their rows.
        """
        scheme = self.rules.scheme(tensor.source, tensor.role)
        if self.target == "onnx":
            return self._onnx(tensor, scheme, joined)
        return self._tflite(tensor, scheme, joined) if self.target == "tflite" else \
            self._coreml(tensor, scheme, joined, common)

    def _coded(self, t: Tensor, scheme: str, widths: dict[int, int]) -> int | None:
        """Indices and norms of a weight in codebook form, or None where it has none.

        Args:
            widths: bits that an index takes in the file, by those that it needs.
        """
        if t.kind not in ("table", "matrix") or t.role == "heads":
            return None
        found: list[tuple[int, int] | None]
        if scheme in _CODES:
            found = [(_CODES[scheme], math.gcd(128, t.columns))]
        elif scheme == "codebook":
            sites = range(self._sites(t)) if t.source == "engrams/embedding" else (t.site,)
            found = [self.imported(t.source, t.layer, site) for site in sites]
        else:
            return None
        if any(f is None or f[1] < 8 for f in found):
            return None
        share, total = t.elements // len(found), 0
        for entry in found:
            assert entry is not None
            bits, group = entry
            total += share * widths[_INDEX_BITS[bits]] // 8 + 2 * share // group
        return total

    def _sites(self, t: Tensor) -> int:
        count = 0
        while self.imported(t.source, t.layer, count) is not None:
            count += 1
        return max(count, 1)

    # --- ONNX --------------------------------------------------------------------------------------

    def _onnx(self, t: Tensor, scheme: str, joined: int) -> int:
        coded = self._coded(t, scheme, {1: 1, 2: 2, 3: 4, 4: 4})
        if coded is not None:
            return coded
        if t.kind in ("table", "matrix", "condition") and scheme in _ONNX_BITS:
            whole = self._onnx_integers(t, scheme, joined)
            if whole is not None:
                return whole
        if t.kind == "bias":
            return 4 * t.elements
        if t.kind == "taps":
            spread = t.source.startswith("engrams") and not _onnx_narrows(scheme, t.elements)
            rows = self.reach if spread else t.rows
            return _onnx_float(scheme, joined) * rows * t.columns
        if t.kind == "heads":
            # Of query and key heads side by side; apart, one head's scale each, if that is narrower than float32.
            return _onnx_float(scheme, t.columns) * t.columns if _onnx_narrows(scheme, joined) else 4 * t.elements
        if t.kind in ("diagonal", "gate"):
            # By themselves only where what takes them is made of them at load time: the condition, or the norm's scale.
            apart = _onnx_narrows(scheme, COND_RANK * t.elements if t.kind == "diagonal" else joined)
            return _onnx_float(scheme, t.elements) * t.elements if apart else 0
        return _onnx_float(scheme, joined) * t.elements

    def _onnx_integers(self, t: Tensor, scheme: str, joined: int) -> int | None:
        bits, block = _ONNX_BITS[scheme], math.gcd(128, t.columns)
        if t.kind == "condition":
            # Unpacked when the file is loaded, by an op that takes no two bits; rows of eight are turned.
            bits = max(4, bits)
            block = block if block >= _ONNX_LEAST[bits] else math.gcd(128, t.rows)
        if joined < _ONNX_MATRIX or block < _ONNX_LEAST[bits]:
            return None
        return t.elements * bits // 8 + 4 * t.elements // block

    # --- TFLite ------------------------------------------------------------------------------------

    def _tflite(self, t: Tensor, scheme: str, joined: int) -> int:
        if t.kind in ("table", "matrix", "condition") and scheme != "fp32":
            if scheme == "int4":
                if t.columns % 32 == 0:
                    return t.elements // 2 + 2 * t.elements // 32
                return t.elements + 4 * t.rows
            if joined >= 10_000:
                return 2 * t.elements if scheme == "fp16" else t.elements + 4 * t.rows
        whole = "int4" in self.rules.schemes  # then the MLP's small matrices take no factors, and no kernel has zeros
        held = self._held(t, scheme) == "int4" and t.kind != "bias" and t.role != "heads"
        width = 2 if held else 4
        if t.kind == "taps" and t.source.startswith("engrams"):
            return width * t.columns * (t.rows if whole else self.reach + (t.rows if self.prefill else 0))
        if t.kind == "gate" or (t.kind == "diagonal" and not whole):
            return 0
        if self.rules.schemes == ("fp32",) and t.source.endswith("ZCRMSNorm_0/scale"):
            return 0  # a factor of the rows of what reads it
        return width * t.elements

    def _held(self, t: Tensor, scheme: str) -> str:
        """The scheme of a vector; of those that lie in one constant with others theirs too, or the base."""
        leaves = {"taps": ("q_taps", "k_taps", "v_taps"), "heads": ("q_norm/scale", "k_norm/scale")}.get(t.kind)
        if leaves is None or not t.source.startswith(ATTENTION):
            return scheme
        sources = [f"{ATTENTION}/{leaf}" for leaf in leaves]
        found = {self.rules.scheme(source, role_of(source)) for source in sources}
        return found.pop() if len(found) == 1 else self.rules.base

    # --- Core ML -----------------------------------------------------------------------------------

    def _coreml(self, t: Tensor, scheme: str, joined: int, common: int) -> int:
        wide = 4 if self.rules.base == "fp32" else 2
        coded = self._coded(t, scheme, _INDEX_BITS)
        if coded is not None:
            return coded
        if t.kind in ("table", "matrix", "condition") and joined >= 10_000:
            if scheme == "int8":
                return t.elements + wide * t.rows
            if scheme == "int4":
                return t.elements // 2 + wide * t.elements // math.gcd(32, t.columns)
            if scheme == "palette4":
                return t.elements // 2 + wide * 16 * t.rows // math.gcd(16, common)
        if t.kind == "taps":
            engram = t.source.startswith("engrams")
            rows = (self.reach if engram else t.rows) + (t.rows if self.prefill else 0)
            return wide * t.columns * rows
        return 0 if t.kind in ("diagonal", "gate") else wide * t.elements


_ONNX_HALVES, _ONNX_TINY, _ONNX_MATRIX = 1 << 13, 1 << 9, 1 << 12


def _onnx_narrows(scheme: str, elements: int) -> bool:
    """Whether a weight of so many elements is stored in less than float32."""
    return scheme != "fp32" and elements >= (_ONNX_HALVES if scheme == "fp16" else _ONNX_TINY)


def _onnx_float(scheme: str, elements: int) -> int:
    """Bytes of an element of a weight of so many that is no integer."""
    return 2 if _onnx_narrows(scheme, elements) else 4


def inventory(g: Geometry, stores: Stores, heads: tuple[str, ...] = ()) -> list[tuple[Tensor, int]]:
    """Every weight with its bytes in the files of one function's package; see :class:`Stores`."""
    found = list(tensors(g, heads))
    sizes: dict[tuple[object, ...], tuple[int, int]] = {}
    for t in found:
        elements, common = sizes.get(_key(t, stores), (0, 0))
        sizes[_key(t, stores)] = elements + t.elements, math.gcd(common, t.rows)
    return [(t, stores.bytes(t, *sizes[_key(t, stores)])) for t in found]


def _key(t: Tensor, stores: Stores) -> tuple[object, ...]:
    """What is one stored weight; TFLite cuts projections where taps begin."""
    scheme, tflite = stores.rules.scheme(t.source, t.role), stores.target == "tflite"
    apart = (t.joined == "engram" and tflite) or (t.joined == "lanes" and stores.target == "onnx" and scheme == "fp16")
    if t.joined and not apart:
        return "tapped" if t.joined == "gate" and not tflite else t.joined, t.layer, t.site, scheme
    if t.kind in ("taps", "heads"):
        return t.kind, t.layer, t.site, t.source.startswith("engrams")
    return "gated" if t.kind == "gate" or "post_attn_norm" in t.source else t.source, t.layer, t.site
