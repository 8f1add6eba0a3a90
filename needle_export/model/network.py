"""The reference model: a full-sequence forward, a cached step for any number of positions, probe heads.

Letters as in :mod:`needle_export.model.block`; V is the output vocabulary, L the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from needle_export.checkpoint.geometry import Geometry
from needle_export.errors import UsageError
from needle_export.graph import reference as ref
from needle_export.model.block import Block, Norm, param
from needle_export.model.heads import ProbeHead
from needle_export.model.state import cache_rows, no_such_head, probe_state, state_specs


class Engram(nn.Module):
    """N-gram memory of all sites: table rows picked by hashes, projected to a key and a value a site."""

    seeds: Tensor
    base: Tensor

    def __init__(self, geometry: Geometry, w: Mapping[str, Tensor]) -> None:
        super().__init__()
        sites = range(len(geometry.engram_layers))
        self.sites, self.width = len(geometry.engram_layers), geometry.d_model
        self.tables_per_site = geometry.engram_tables
        self.slots, self.dilation = geometry.engram_slots, max(geometry.engram_orders)
        self.orders = list(geometry.engram_orders)
        seeds = ref.hash_seeds(self.orders, geometry.engram_heads, geometry.engram_seed_heads)
        self.register_buffer("seeds", torch.tensor(seeds, dtype=torch.int64))
        # One table of all rows: site-major, then table, then slot.
        self.tables = param(torch.cat([w[f"engrams_{s}/embedding"].flatten(0, 1) for s in sites]))
        self.key_proj = param(torch.stack([w[f"engrams_{s}/key_proj/kernel"] for s in sites]))
        self.value_proj = param(torch.stack([w[f"engrams_{s}/value_proj/kernel"] for s in sites]))
        self.taps = param(torch.cat([w[f"engrams_{s}/taps"] for s in sites], dim=-1))
        count = self.sites * self.tables_per_site
        base = torch.arange(count).reshape(self.sites, 1, self.tables_per_site) * self.slots
        self.register_buffer("base", base)

    def forward(self, rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """rows [T, N] int64, valid [T, N] -> keys [sites, T, C] and values before the taps [T, sites*C]."""
        fetched = nn.functional.embedding(rows.unsqueeze(0) + self.base, self.tables)
        fetched = (fetched * valid.unsqueeze(-1)).flatten(-2)
        keys = torch.matmul(fetched, self.key_proj)
        values = torch.matmul(fetched, self.value_proj)
        return keys, values.permute(1, 0, 2).flatten(-2)


class Needle(nn.Module):
    """A Needle 3 model at the depth of its geometry.

    Args:
        geometry: the model's numbers.
        tensors: upstream's flat tensor names, per-layer tensors stacked on axis 0; fp16 or fp32. Torch tensors that
            gradients are to reach are float32.
        permutations: the two permutations of the Monarch MLP, [N] int64 each.
    """

    frequencies: Tensor

    def __init__(
        self,
        geometry: Geometry,
        tensors: Mapping[str, np.ndarray | Tensor],
        permutations: tuple[np.ndarray, np.ndarray],
    ) -> None:
        super().__init__()
        self.geometry = geometry
        w = {k: v if isinstance(v, Tensor) else torch.from_numpy(np.require(v, requirements=["C", "W"]))
             for k, v in tensors.items()}
        perms = (torch.from_numpy(permutations[0]), torch.from_numpy(permutations[1]))
        self.embedding = param(w["embedding/embedding"])
        self.embed_scale = math.sqrt(geometry.d_model)
        layered = {
            k.removeprefix("stack/layers/block/"): v
            for k, v in w.items()
            if k.startswith("stack/layers/block/")
        }
        layered |= {k.removeprefix("stack/"): v for k, v in w.items() if k.startswith("stack/mhc_")}
        self.layers = nn.ModuleList(
            Block(geometry, {k: v[i] for k, v in layered.items()}, perms, i)
            for i in range(geometry.num_layers)
        )
        self.engram = Engram(geometry, w) if geometry.engram_layers else None
        self.final_norm = Norm(w["stack/final_norm/scale"])
        self.heads = nn.ModuleDict(
            {
                h.name: ProbeHead(
                    h, {k.removeprefix(h.key + "/"): v for k, v in w.items() if k.startswith(h.key + "/")}
                )
                for h in geometry.heads
            }
        )
        half = torch.arange(0, geometry.qk_head_dim, 2, dtype=torch.float32) / geometry.qk_head_dim
        self.register_buffer("frequencies", 1.0 / (geometry.rope_theta**half))
        #: What becomes of new keys (after rotation) and values [T, G, D] before anything reads them: what a cache of
        #: fewer bits gives back. None while a step is traced: how rows are stored is a target's affair.
        self.stored: Callable[..., Tensor] | None = None

    @contextmanager
    def jittered(self, generator: torch.Generator) -> Iterator[None]:
        """While active, rows move by their last bits before a cache rounds them; where none does, nothing moves."""
        calm = self.stored
        self.stored = None if calm is None else partial(calm, jitter=generator)
        try:
            yield
        finally:
            self.stored = calm

    def _as_stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if self.stored is None else (self.stored(k), self.stored(v))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotation: positions [T] -> [T, Dqk/2] each."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.frequencies
        return torch.cos(angles), torch.sin(angles)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] -> their vectors [T, C] and the stream before the first block [T, n, C]."""
        x = nn.functional.embedding(tokens, self.embedding) * self.embed_scale
        return x, x.unsqueeze(-2).expand(*x.shape[:-1], self.geometry.mhc_lanes, x.shape[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of lane-averaged hidden states [..., C] behind the last block: [..., V]."""
        return nn.functional.linear(self.final_norm(hidden), self.embedding[: self.geometry.head_vocab])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position without caches: tokens [B, T] int64 -> [B, T, V]."""
        return torch.stack([self.logits(self.hidden(row)[-1]) for row in tokens])

    def hidden(self, tokens: Tensor) -> list[Tensor]:
        """Lane-averaged hidden states of one sequence: tokens [T] -> L + 1 tensors [T, C], embedding first."""
        streams = self.streams(tokens)
        return [s.mean(-2) for s in streams]

    def streams(self, tokens: Tensor) -> list[Tensor]:
        """The stream before the first block and after each: tokens [T] -> L + 1 tensors [T, n, C]."""
        g, rows = self.geometry, tokens.shape[0]
        positions = torch.arange(rows)
        cos, sin = self.angles(positions)
        distance = positions.unsqueeze(1) - positions.unsqueeze(0)
        causal = distance >= 0
        local = causal & (distance < g.sliding_window) if g.sliding_window else causal

        def taps(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
            history = x.new_zeros(((weight.shape[0] - 1) * dilation, x.shape[-1]))
            return ref.causal_taps(x, history, weight, dilation)[0]

        keys = values = None
        if self.engram is not None:
            e = self.engram
            past = tokens.new_zeros(e.dilation - 1)
            hashed, valid, _ = ref.ngram_rows(tokens, past, positions[:1], e.seeds, e.orders, e.slots)
            keys, values = e(hashed, valid)
            values = taps(values, e.taps, e.dilation)
        _, stream = self.embed(tokens)
        streams = [stream]
        for index, layer in enumerate(self.layers):
            visible = causal if not g.sliding_window or index in g.global_layers else local

            def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor = visible) -> Tensor:
                return ref.attend(q, *self._as_stored(k, v), visible, g.qk_head_dim**-0.5)

            stream = layer(stream, cos, sin, self.memory(index, keys, values), taps, attend)
            streams.append(stream)
        return streams

    def memory(self, layer: int, keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """A layer's key and value [T, C] of what :class:`Engram` gave for all sites; None where it has no site."""
        if keys is None or values is None or layer not in self.geometry.engram_layers:
            return None
        site = self.geometry.engram_layers.index(layer)
        width = self.geometry.d_model
        return keys[site], values[..., site * width : (site + 1) * width]

    def step(
        self,
        tokens: Tensor,
        position: Tensor,
        state: Mapping[str, Tensor],
        context: int,
        heads: tuple[str, ...] = (),
        count: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One cached step.

        Args:
            tokens: [T] int64; T at most the ring length where the context exceeds the window.
            position: [1] int64, the position of ``tokens[0]``; ``position + T`` at most ``context``.
            state: tensors as :func:`needle_export.model.state.state_specs` lists them.
            context: the length that the caches were made for.
            heads: probe heads that read the tokens; :meth:`answer` asks them.
            count: [1] int64, how many of the tokens the heads are to read, the rest being padding; None: all.

        Returns:
            Logits [T, V] and the next state.

        Raises:
            UsageError: a chunk longer than the ring it is written to, or a head that the checkpoint hasn't.
        """
        logits, state, _ = self.step_streams(tokens, position, state, context, heads, count)
        return logits, state

    def step_streams(
        self,
        tokens: Tensor,
        position: Tensor,
        state: Mapping[str, Tensor],
        context: int,
        heads: tuple[str, ...] = (),
        count: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
        """As :meth:`step`, with the stream after each block [T, n, C] as third result."""
        g = self.geometry
        nxt: dict[str, Tensor] = {}
        cos, sin = self.angles(position + torch.arange(tokens.shape[0]))
        keys = values = None
        if self.engram is not None:
            e = self.engram
            past = state["token_history"] if e.dilation > 1 else tokens.new_zeros(0)
            hashed, valid, past = ref.ngram_rows(tokens, past, position, e.seeds, e.orders, e.slots)
            if e.dilation > 1:
                nxt["token_history"] = past
            keys, values = e(hashed, valid)
            values, nxt["engram_history"] = ref.causal_taps(
                values, state["engram_history"], e.taps, e.dilation
            )
        embedded, stream = self.embed(tokens)
        streams: list[Tensor] = []
        cells = [embedded]
        for index, layer in enumerate(self.layers):
            rows, ring = cache_rows(g, index, context)

            def taps(x: Tensor, weight: Tensor, name: str = f"taps_{index:02d}") -> Tensor:
                if weight.shape[0] == 1:
                    return x * weight[0]
                y, nxt[name] = ref.causal_taps(x, state[name], weight, 1)
                return y

            def attend(
                q: Tensor, k: Tensor, v: Tensor, tag: str = f"{index:02d}", ring: bool = ring
            ) -> Tensor:
                out, nxt[f"k_{tag}"], nxt[f"v_{tag}"] = ref.cached_attention(
                    q, *self._as_stored(k, v), state[f"k_{tag}"], state[f"v_{tag}"], position, g.qk_head_dim**-0.5, ring
                )
                return out

            if ring and tokens.shape[0] > rows:
                raise UsageError(
                    f"a chunk of {tokens.shape[0]} tokens is longer than the {rows}-row window it is written to",
                    fix=f"feed at most {rows} tokens a step",
                )
            stream = layer(stream, cos, sin, self.memory(index, keys, values), taps, attend)
            streams.append(stream)
            # Here rather than behind the last block, so that no stream must be held for it.
            if heads and index < g.num_layers - 1:
                cells.append(stream.mean(-2))
        hidden = stream.mean(-2)
        logits = self.logits(hidden)
        for name in heads:
            head, names = self._head(name), probe_state(name)
            real = torch.tensor([tokens.shape[0]]) if count is None else count
            # The last row is the very mean that the logits are made of: a second one would keep its lane mixing.
            held = head.absorb(torch.stack([*cells, hidden]), real, *(state[n] for n in names))
            nxt.update(zip(names, held, strict=True))
        return logits, {s.name: nxt[s.name] for s in state_specs(g, context, heads)}, streams

    def answer(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """A probe head's output [O] from the state behind the last token that it has read.

        Raises:
            UsageError: the checkpoint has no such head.
        """
        _, total, pool = probe_state(name)
        return self._head(name).answer(state[total], state[pool])

    def _head(self, name: str) -> ProbeHead:
        if name not in self.heads:
            raise no_such_head(name, self.heads)
        head = self.heads[name]
        assert isinstance(head, ProbeHead)
        return head

    def head(self, name: str, tokens: Tensor) -> Tensor:
        """A probe head's output for one sequence without padding: tokens [T] -> [out_dim].

        Raises:
            UsageError: the checkpoint has no such head.
        """
        out: Tensor = self._head(name)(torch.stack(self.hidden(tokens), dim=-2))
        return out
