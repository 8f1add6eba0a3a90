"""The numbers that decide the shape of a Needle 3 model, and the rules they obey.

Dimension letters used in this package: L layers, C = d_model, H query heads, G key/value heads,
Dqk and Dv head widths, n lanes, N = hada_n (C rounded up to a power of two), V vocabulary rows,
E engram tables, S slots a table, s engram_sub_dim, k probes and q queries of a probe head.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from needle_export.errors import BadInput

HEAD_NAMES = ("embedding", "confidence", "router")
"""Probe heads in the order that files list them; the container codes them 1, 2, 3."""

HEAD_OUT_DIMS = {"confidence": 1, "router": 3}
"""Output widths that the architecture fixes; the embedding's is a configuration value."""

ENGRAM_CONV_TAPS = 4
ENGRAM_DEFAULT_SUB_DIM = 128
COND_RANK = 8

# Upper bounds are far above any model of the family. They exist so that a damaged number is named as
# such instead of being carried into a product that some later stage sizes memory from.
_BOUNDS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "out_vocab": (0, 1 << 24),
    "d_model": (2, 1 << 16),
    "num_heads": (1, 1 << 12),
    "num_kv_heads": (1, 1 << 12),
    "num_layers": (1, 1 << 10),
    "qk_head_dim": (2, 1 << 12),
    "v_head_dim": (1, 1 << 12),
    "max_seq_len": (1, 1 << 24),
    "mhc_lanes": (1, 64),
    "sliding_window": (0, 1 << 24),
    "qkv_conv_taps": (0, 64),
    "engram_heads": (1, 1 << 12),
    "engram_slots": (1, (1 << 31) - 1),
    "engram_sub_dim": (1, 1 << 16),
    "engram_seed_heads": (0, 1 << 16),
    "kv_window": (0, 1 << 24),
    "kv_bits": (0, 16),
    "pad_token_id": (0, 1 << 24),
}
_MAX_ORDER = 16
_MAX_ORDERS = 16


@dataclass(frozen=True)
class HeadGeometry:
    """One probe head: k probes pool every row, q queries pick among the pooled rows.

    ``name`` is one of ``HEAD_NAMES``; ``out_dim`` is the width of the projection's output.
    """

    name: str
    probes: int
    queries: int
    out_dim: int

    @property
    def key(self) -> str:
        """The head's subtree in the tensor names, e.g. ``confidence_head``."""
        return f"{self.name}_head"

    def validate(self) -> None:
        """Raises BadInput, naming the field, when a number can't be right."""
        if self.name not in HEAD_NAMES:
            raise BadInput(f"there is no probe head called {self.name!r}", where="heads")
        for field in ("probes", "queries", "out_dim"):
            value = getattr(self, field)
            if not 1 <= value <= 1 << 16:
                raise BadInput(f"{self.name}_{field} is {value}, outside 1 to 65536",
                               where=f"{self.name}_{field}")
        fixed = HEAD_OUT_DIMS.get(self.name)
        if fixed is not None and self.out_dim != fixed:
            raise BadInput(f"the {self.name} head has {self.out_dim} outputs instead of {fixed}",
                           where=self.key)


@dataclass(frozen=True)
class Geometry:
    """The whole model in numbers, resolved: no field means "work it out".

    ``out_vocab`` 0 is the full vocabulary, ``sliding_window`` 0 is no window, ``qkv_conv_taps`` 0 is no
    convolution, ``engram_seed_heads`` 0 is ``engram_heads``, ``ladder_order`` () is bisection,
    ``kv_window`` 0 is "from the memory budget alone". Lengths are in tokens, widths in elements.
    """

    vocab_size: int
    out_vocab: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    qk_head_dim: int
    v_head_dim: int
    max_seq_len: int
    rope_theta: float
    mhc_lanes: int
    sliding_window: int
    global_layers: tuple[int, ...]
    qkv_conv_taps: int
    engram_orders: tuple[int, ...]
    engram_heads: int
    engram_slots: int
    engram_sub_dim: int
    engram_seed_heads: int
    engram_layers: tuple[int, ...]
    ladder_order: tuple[int, ...]
    split_permutations: bool
    kv_window: int
    kv_bits: int
    pad_token_id: int
    heads: tuple[HeadGeometry, ...]

    @property
    def hada_n(self) -> int:
        """Width N of the Monarch MLP: d_model rounded up to a power of two."""
        return 1 << (self.d_model - 1).bit_length()

    @property
    def hada_blocks(self) -> tuple[int, int]:
        """Sizes (a, b) of the two Kronecker factors, a * b = N, a <= b."""
        return kronecker_blocks(self.hada_n)

    @property
    def engram_tables(self) -> int:
        """Tables E a site gathers from: one for each order and hash head."""
        return len(self.engram_orders) * self.engram_heads

    @property
    def engram_width(self) -> int:
        """Elements gathered a position and site, E * s; at most d_model."""
        return self.engram_tables * self.engram_sub_dim

    @property
    def engram_conv_taps(self) -> int:
        """Taps of the causal convolution over engram values."""
        return ENGRAM_CONV_TAPS

    @property
    def engram_dilation(self) -> int:
        """Distance in tokens between those taps: the longest n-gram."""
        return max(self.engram_orders)

    @property
    def head_vocab(self) -> int:
        """Rows of the tied embedding that produce logits."""
        return self.out_vocab or self.vocab_size

    @property
    def conv_channels(self) -> int:
        """Channels that pass through the causal taps: H*Dqk + G*Dqk + G*Dv."""
        return (self.num_heads + self.num_kv_heads) * self.qk_head_dim + self.num_kv_heads * self.v_head_dim

    def head(self, name: str) -> HeadGeometry | None:
        """The probe head called ``name``, or None when the checkpoint has none."""
        return next((head for head in self.heads if head.name == name), None)

    def validate(self) -> None:
        """Raises BadInput, naming the field, for a number no model of this family can have."""
        for field, (low, high) in _BOUNDS.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise BadInput(f"{field} is {value}, outside {low} to {high}", where=field)
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0):
            raise BadInput(f"rope_theta is {self.rope_theta}, not a positive number", where="rope_theta")
        if self.out_vocab > self.vocab_size:
            raise BadInput(f"out_vocab is {self.out_vocab}, more than vocab_size {self.vocab_size}",
                           where="out_vocab")
        if self.num_heads % self.num_kv_heads:
            raise BadInput(f"num_kv_heads is {self.num_kv_heads}, which doesn't divide num_heads "
                           f"{self.num_heads}", where="num_kv_heads")
        if self.qk_head_dim % 2:
            raise BadInput(f"qk_head_dim is {self.qk_head_dim}, but rotary pairs need an even width",
                           where="qk_head_dim")
        if self.pad_token_id >= self.vocab_size:
            raise BadInput(f"pad_token_id is {self.pad_token_id}, outside the vocabulary of "
                           f"{self.vocab_size}", where="pad_token_id")
        self._validate_engram()
        self._validate_layers("engram_layers", self.engram_layers)
        self._validate_layers("global_layers", self.global_layers)
        order = self.ladder_order
        if order and (len(order) != self.num_layers or sorted(order) != list(range(self.num_layers))):
            raise BadInput(f"ladder_order isn't a permutation of the {self.num_layers} blocks",
                           where="ladder_order")
        names = [head.name for head in self.heads]
        for head in self.heads:
            head.validate()
        if names != [name for name in HEAD_NAMES if name in names]:
            raise BadInput(f"probe heads {names} aren't in the order {list(HEAD_NAMES)}", where="heads")

    def _validate_engram(self) -> None:
        orders = self.engram_orders
        if not 1 <= len(orders) <= _MAX_ORDERS or not all(1 <= order <= _MAX_ORDER for order in orders):
            raise BadInput(f"engram_orders is {list(orders)}: needs 1 to {_MAX_ORDERS} lengths of 1 to "
                           f"{_MAX_ORDER} tokens", where="engram_orders")
        if self.engram_sub_dim != self.d_model // self.engram_tables:
            raise BadInput(f"engram_sub_dim is {self.engram_sub_dim}, but {self.engram_tables} tables over "
                           f"d_model {self.d_model} make it {self.d_model // self.engram_tables}",
                           where="engram_sub_dim")

    def _validate_layers(self, field: str, layers: tuple[int, ...]) -> None:
        increasing = all(a < b for a, b in itertools.pairwise(layers))
        if not increasing or not all(0 <= layer < self.num_layers for layer in layers):
            raise BadInput(f"{field} is {list(layers)}: needs increasing block numbers below num_layers "
                           f"{self.num_layers}", where=field)

    def with_layers(self, num_layers: int) -> Geometry:
        """The same model at another depth, its special blocks spaced as here.

        A kind of block that first appears at index f recurs every f + 1 blocks (published: engram
        sites 3, 7, 11, ..., global layers 4, 9, 14, ...), clipped to the new depth.

        Raises:
            BadInput: when the depth is outside what a model can have.
        """
        if num_layers == self.num_layers:
            return self

        def spaced(layers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(range(layers[0], max(num_layers, 0), layers[0] + 1)) if layers else ()

        out = dataclasses.replace(self, num_layers=num_layers, ladder_order=(),
                                  engram_layers=spaced(self.engram_layers),
                                  global_layers=spaced(self.global_layers))
        out.validate()
        return out

    def to_config(self) -> dict[str, Any]:
        """The configuration a checkpoint of this geometry carries in its metadata (JSON-able).

        Every field is written out, so that no reader's default can change the model. Split
        permutations are expressed the way the format does, by a non-empty ``ladder_widths``.
        """
        config: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
            if field.name not in ("heads", "split_permutations", "engram_sub_dim")
        }
        config = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
        config["ladder_widths"] = [self.d_model // 2] if self.split_permutations else []
        config["ladder_depths"] = []
        config["ladder_sample"] = False
        for head in self.heads:
            config[f"{head.name}_probes"] = head.probes
            config[f"{head.name}_queries"] = head.queries
            if head.name == "embedding":
                config["embedding_dim"] = head.out_dim
        return config

    def as_dict(self) -> dict[str, Any]:
        """All fields and the derived widths, JSON-able, for reports and manifests."""
        out = dataclasses.asdict(self)
        out = {key: list(value) if isinstance(value, tuple) else value for key, value in out.items()}
        out.update(hada_n=self.hada_n, hada_blocks=list(self.hada_blocks), engram_tables=self.engram_tables,
                   engram_width=self.engram_width, head_vocab=self.head_vocab,
                   conv_channels=self.conv_channels)
        return out


def kronecker_blocks(n: int) -> tuple[int, int]:
    """Sizes (a, b) of the Kronecker factors of a power of two ``n``: a = 2**(log2(n) // 2), b = n / a."""
    a = 1 << ((n - 1).bit_length() // 2)
    return a, n // a


def default_engram_heads(d_model: int, orders: int) -> int:
    """Hash heads an order when a configuration names none: enough for rows 128 wide, at least one."""
    return max(1, d_model // (orders * ENGRAM_DEFAULT_SUB_DIM))


PUBLISHED = Geometry(
    vocab_size=8192, out_vocab=0, d_model=768, num_heads=12, num_kv_heads=2, num_layers=20,
    qk_head_dim=48, v_head_dim=64, max_seq_len=8192, rope_theta=100000.0, mhc_lanes=4,
    sliding_window=1024, global_layers=(4, 9, 14, 19), qkv_conv_taps=3, engram_orders=(2, 3),
    engram_heads=3, engram_slots=18432, engram_sub_dim=128, engram_seed_heads=0,
    engram_layers=(3, 7, 11, 15, 19), ladder_order=(), split_permutations=False, kv_window=256,
    kv_bits=8, pad_token_id=0, heads=(HeadGeometry("confidence", 4, 4, 1),),
)
"""The geometry of the published Needle 3: 121,019,861 trained parameters."""

SMALL = Geometry(
    vocab_size=256, out_vocab=0, d_model=96, num_heads=4, num_kv_heads=2, num_layers=3,
    qk_head_dim=48, v_head_dim=64, max_seq_len=512, rope_theta=100000.0, mhc_lanes=4,
    sliding_window=16, global_layers=(2,), qkv_conv_taps=3, engram_orders=(2, 3),
    engram_heads=2, engram_slots=512, engram_sub_dim=24, engram_seed_heads=0,
    engram_layers=(1,), ladder_order=(), split_permutations=False, kv_window=32,
    kv_bits=8, pad_token_id=0, heads=(HeadGeometry("confidence", 4, 4, 1),),
)
"""A toy with every mechanism of the published model: real head widths, a short window, N > d_model."""
