"""What an artifact's numbers are, as far as its reference must follow them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: How a runtime rounds the inputs of products with integer weights: by row, in one of the two ways of ``weights.int8``,
#: or by the runs of columns that share a scale, as ``weights.linear`` has it. By row says nothing of the weights: they
#: may have a scale a row or one for each run.
Activations = Literal["asymmetric", "symmetric", "blocks"]


@dataclass(frozen=True)
class Scheme:
    """One artifact's numbers.

    Attributes:
        halves: (checkpoint tensor, layer) of weights stored in half precision.
        int8: the same of weights stored as int8 rows.
        activations: how the runtime rounds the inputs of integer matrices, or None.
        forms: (checkpoint tensor, layer, form) of weights stored in a form of ``weights.forms``.
        half: everything else is stored in half precision too, after constants were folded into it; the reference is
            then the fused program with those numbers, since no tensor of the checkpoint has them.
        cache: what new keys and values are rounded to before anything reads them, a form of ``weights.caches``.
        as_read: (checkpoint tensor, layer) of weights stored in half precision as an op reads them: a norm's scale with
            all that a target folds into it. Of others that is what ``halves`` says.
    """

    halves: tuple[tuple[str, int], ...] = ()
    int8: tuple[tuple[str, int], ...] = ()
    activations: Activations | None = None
    forms: tuple[tuple[str, int, str], ...] = ()
    half: bool = False
    cache: str = "fp32"
    as_read: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, weights: Iterable[Any], activations: Activations | None, half: bool, cache: str) -> Scheme:
        """Of the weights that an artifact stores.

        Args:
            weights: each with a dtype, ``as_read``, and shares that know their checkpoint tensor and layer.
        """
        from needle_export.weights.forms import Form

        listed: dict[str, set[tuple[str, int]]] = {"float16": set(), "int8": set(), "as_read": set()}
        forms: set[tuple[str, int, str]] = set()
        for weight in weights:
            pairs = {(s.source, s.layer) for s in weight.shares}
            kind = "as_read" if weight.as_read else weight.dtype
            if kind in listed:
                listed[kind] |= pairs
            elif Form.parse(kind) is not None:
                forms |= {(*pair, kind) for pair in pairs}
        return cls(
            halves=() if half else tuple(sorted(listed["float16"])),
            int8=tuple(sorted(listed["int8"])),
            activations=activations if listed["int8"] or forms else None,
            forms=tuple(sorted(forms)),
            half=half,
            cache=cache,
            as_read=tuple(sorted(listed["as_read"])),
        )

    @property
    def rounds_at_run_time(self) -> bool:
        """Whether anything is rounded that a model computes, so that its last bits decide between two levels."""
        return self.activations is not None or self.cache != "fp32"

    def record(self) -> dict[str, Any]:
        """For the report."""
        return {
            "halves": [list(pair) for pair in self.halves],
            "int8": [list(pair) for pair in self.int8],
            "activations": self.activations,
            "forms": [list(entry) for entry in self.forms],
            "half": self.half,
            "cache": self.cache,
            "as_read": [list(pair) for pair in self.as_read],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Scheme:
        """The inverse of :meth:`record`; what an earlier report lacks is empty."""

        def pairs(key: str) -> tuple[tuple[str, int], ...]:
            return tuple((str(source), int(layer)) for source, layer in record.get(key) or ())

        forms = tuple((str(s), int(n), str(form)) for s, n, form in record.get("forms") or ())
        half, cache = bool(record.get("half")), str(record.get("cache") or "fp32")
        return cls(
            pairs("halves"), pairs("int8"), record.get("activations"), forms, half, cache, pairs("as_read")
        )
