"""What ``inspect`` found, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from needle_export.report.package_text import package_facts
from needle_export.report.text import Page
from needle_export.report.units import percent, plural, signed_size, size, whole
from needle_export.report.view import ROLE_MEANINGS, Fact, Section

if TYPE_CHECKING:
    from needle_export.inspection import AdapterFacts, Inspection, ModelFacts

_FORMATS = {"safetensors": "checkpoint (safetensors)", "cact": "container (.cact)", "adapter": "LoRA adapter",
            "mlpackage": "Core ML package"}


def render_inspection(inspection: Inspection, *, color: bool = False, width: int = 100) -> str:
    """The facts for a terminal ``width`` columns wide, ending in a newline; ANSI codes with ``color``."""
    page = Page(color=color, width=width)
    file = inspection.file
    page.title(f"{file.path_name}: {_FORMATS[file.format]}, {size(file.bytes)}")
    if file.random:
        page.warning("RANDOM WEIGHTS, made for tests: sizes and speeds are real, answers mean nothing")
    if file.sha256 is not None:
        page.facts([Fact("SHA-256", file.sha256)])
    if inspection.model is not None:
        _model(page, inspection.model, file.bytes)
    if inspection.adapter is not None:
        _adapter(page, inspection.adapter)
    if inspection.package is not None:
        package_facts(page, inspection.package)
    return page.text()


def _model(page: Page, m: ModelFacts, file_bytes: int) -> None:
    g = m.geometry
    window = plural(g["sliding_window"], "token") if g["sliding_window"] else "everything, too"
    page.facts([
        Fact("parameters", whole(m.parameters)),
        Fact("layers", f"{m.layers}; those that see everything: {_listing(g['global_layers'])}; the others "
             f"see {window}"),
        Fact("attention", f"{plural(g['num_heads'], 'query head')} and {g['num_kv_heads']} key/value heads, "
             f"q and k {g['qk_head_dim']} wide, v {g['v_head_dim']} wide"),
        Fact("width", f"{g['d_model']}, in {plural(g['mhc_lanes'], 'lane')}; MLP {g['hada_n']}"),
        Fact("memory", f"{plural(g['engram_tables'], 'table')} of {whole(g['engram_slots'])} rows, "
             f"{g['engram_sub_dim']} wide, at layers {_listing(g['engram_layers'])}"),
        Fact("vocabulary", f"{whole(g['vocab_size'])}, of which {whole(g['head_vocab'])} can be predicted"),
        Fact("probe heads", ", ".join(m.heads) or "none"),
        Fact("KV cache", f"{size(m.kv_cache_bytes)} at {whole(m.context)} tokens, 16-bit elements"),
    ])
    page.section(_ledger(m, file_bytes))
    if m.head_shapes:
        page.section(_head_shapes(m))
    page.section(_rungs(m))


def _ledger(m: ModelFacts, file_bytes: int) -> Section:
    total_16, total = sum(m.ledger_16.values()), sum(m.ledger.values())
    rows = [(role, ROLE_MEANINGS.get(role, ""), size(m.stored.get(role, 0)), size(m.ledger_16[role]),
             size(m.ledger[role]), percent(m.ledger[role], total)) for role in m.ledger]
    rows.append(("overhead", "headers, padding, tokenizer", size(m.stored["overhead"]), "", "", ""))
    rows.append(("total", "", size(file_bytes), size(total_16), size(total), percent(total, total)))
    shares = (*(count / total for count in m.ledger.values()), 0.0, 0.0)
    return Section("Where the bytes are", ("role", "weights", "this file", "16 bits", _bits(m), "share"),
                   tuple(rows), frozenset({2, 3, 4, 5}), shares)


def _head_shapes(m: ModelFacts) -> Section:
    own = sum(m.ledger.values())
    rows = tuple((f"{row.qk}/{row.v}{' (this model)' if row.current else ''}", whole(row.parameters),
                  size(row.bytes), signed_size(row.delta_bytes), f"{100 * row.delta_bytes / own:+.1f} %",
                  size(row.routing_bytes), size(row.content_bytes), size(row.kv_cache_bytes))
                 for row in m.head_shapes)
    return Section(f"Head widths (q and k / v) at {_bits(m)}",
                   ("widths", "parameters", "model", "difference", "", "routing", "content",
                    f"KV cache at {whole(m.context)}"), rows, frozenset({1, 2, 3, 4, 5, 6, 7}))


def _rungs(m: ModelFacts) -> Section:
    rows = tuple((str(rung.depth), whole(rung.parameters), size(wide.bytes), size(rung.bytes))
                 for rung, wide in zip(m.rungs, m.rungs_16, strict=True))
    most = m.rungs[-1].bytes
    return Section("Rungs of the ladder", ("layers", "parameters", "16 bits", _bits(m)), rows,
                   frozenset({0, 1, 2, 3}), tuple(rung.bytes / most for rung in m.rungs))


def _adapter(page: Page, a: AdapterFacts) -> None:
    page.facts([
        Fact("rank", str(a.rank)),
        Fact("scale", f"{a.scale:g}"),
        Fact("tuned on", a.base or "not recorded"),
        Fact("parameters", whole(a.parameters)),
    ])
    page.section(Section("Parameters by role", ("role", "weights", "parameters"), tuple(
        (role, ROLE_MEANINGS.get(role, ""), whole(count)) for role, count in a.parameters_by_role.items()),
        frozenset({2})))
    page.section(Section("Changed tensors", ("name",), tuple((name,) for name in a.targets)))


def _bits(m: ModelFacts) -> str:
    return f"{m.bits:g} bits" if m.bits != 1 else "1 bit"


def _listing(layers: list[int]) -> str:
    return ", ".join(str(layer) for layer in layers) or "none"
