"""What docs/android.md says of a TFLite artifact is what the exporter writes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.config.options import BUCKETS
from needle_export.model.state import state_specs
from needle_export.targets.ports import CONTRACT_KEY, DECODE, Port, prefill_name
from needle_export.targets.tflite.contract import (
    FILE_NAME,
    contract_json,
    head_inputs,
    head_outputs,
    input_ports,
    layouts,
    output_ports,
)
from needle_export.targets.tflite.session import TAIL_SHARE

PAGE = (Path(__file__).parents[2] / "docs" / "android.md").read_text(encoding="utf-8")
CONTEXT = 1024
STATES = state_specs(PUBLISHED, CONTEXT)
VOCAB = PUBLISHED.head_vocab
HEAD = "confidence"
WITH_HEAD = state_specs(PUBLISHED, CONTEXT, (HEAD,))
TOP_KEYS = {"context", "vocab", "buckets", "heads", "state"}

Shape = tuple[int, ...]


def table(head: str) -> list[list[str]]:
    """Cells of the one table whose head begins with a word."""
    found = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", PAGE, re.M)
    assert len(found) == 1, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def code(language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 1
    return str(blocks[0])


KOTLIN = code("kotlin")


def shape_of(text: str, rows: int) -> Shape:
    letters = {"T": rows, "S": CONTEXT}
    dims = re.fullmatch(r"`\[(.*)\]`", text)
    assert dims, text
    return tuple(letters[d] if d in letters else int(d) for d in dims[1].split(", "))


def names_of(cell: str) -> list[str]:
    """``a`` or, of ``a_00`` … ``a_19``, every name between."""
    names = quoted(cell)
    if "…" not in cell:
        return names
    (stem, first), (same, last) = (name.rsplit("_", 1) for name in names)
    assert stem == same
    return [f"{stem}_{number:02d}" for number in range(int(first), int(last) + 1)]


def ports_on_page(head: str, rows: int) -> dict[str, tuple[Shape, str]]:
    return {name: (shape_of(shape, rows), dtype) for names, shape, dtype, _ in table(head) for name in names_of(names)}


def ports(made: tuple[Port, ...]) -> dict[str, tuple[Shape, str]]:
    return {p.name: (p.shape, p.dtype) for p in made}


def total(made: tuple[Port, ...]) -> int:
    return sum(4 * math.prod(p.shape) for p in made)


@pytest.mark.parametrize("rows", [1, *BUCKETS])
def test_inputs_and_outputs(rows: int) -> None:
    assert ports_on_page("input", rows) == ports(input_ports(STATES, rows))
    assert ports_on_page("output", rows) == ports(output_ports(STATES, VOCAB, rows))


@pytest.mark.parametrize("rows", [1, *BUCKETS])
def test_what_the_confidence_head_adds(rows: int) -> None:
    """Inputs and outputs beyond those of a file without it, and the bytes that a host copies for it."""
    given, made = ports(input_ports(WITH_HEAD, rows)), ports(output_ports(WITH_HEAD, VOCAB, rows))
    more = {n: p for n, p in given.items() if n not in ports(input_ports(STATES, rows))}
    assert more == {n: p for n, p in ports_on_page("further input", rows).items() if rows > 1 or n != "count"}
    assert ports_on_page("further output", rows) == {
        n: p for n, p in made.items() if n not in ports(output_ports(STATES, VOCAB, rows))
    }
    assert f"{sum(4 * math.prod(shape) for n, (shape, _) in more.items() if n != 'count'):,} bytes a call" in PAGE
    probes = PUBLISHED.head(HEAD)
    assert probes is not None
    assert f"{PUBLISHED.num_layers + 1} rows (the embedding and {PUBLISHED.num_layers} blocks)" in PAGE
    assert f"{probes.probes} probes" in PAGE


def test_the_signature_of_the_confidence_head() -> None:
    names = ("probe_confidence_sum", "probe_confidence_pool")
    assert tuple(p.name for p in head_inputs(WITH_HEAD, names)) == names
    (answer,) = head_outputs(HEAD, (1,))
    assert f"inputs `{names[0]}` and `{names[1]}` and the output `{answer.name}`,\n`[1]`" in PAGE
    assert f'runSignature(pools, mapOf<String, Any>("{answer.name}" to answer), "{HEAD}")' in KOTLIN
    assert 'listOf("' + '", "'.join(names) + '")' in KOTLIN
    assert {s.initial for s in layouts(WITH_HEAD)} == {0.0, -1e9} and "`initial` -1e9" in PAGE


def test_signatures_and_buckets() -> None:
    found = {
        name: int(rows)
        for names, counts in table("signature")
        for name, rows in zip(quoted(names), counts.split(", "), strict=True)
    }
    assert found == {DECODE: 1, **{prefill_name(b): b for b in BUCKETS}}
    assert f"{' and '.join(map(str, BUCKETS))} are the default buckets" in PAGE
    assert f'if (rows == 1) "{DECODE}" else "{prefill_name(0)[:-1]}$rows"' in KOTLIN


def test_names_of_the_file_and_its_metadata() -> None:
    assert f"`{FILE_NAME}`" in PAGE
    assert f"metadata key `{CONTRACT_KEY}`" in PAGE
    assert f'metadata(model, "{CONTRACT_KEY}")' in KOTLIN


def test_keys_of_the_contract() -> None:
    described = json.loads(contract_json(STATES, VOCAB, CONTEXT, BUCKETS, {}))
    on_page = {key for cell, _ in table("key") for key in quoted(cell)}
    assert on_page == TOP_KEYS <= set(described)
    (state_row,) = (meaning for cell, meaning in table("key") if quoted(cell) == ["state"])
    entry_keys = set(quoted(state_row))
    assert entry_keys <= set(described["state"][0])
    assert set(re.findall(r'root\.get\w+\("(\w+)"\)', KOTLIN)) == TOP_KEYS
    assert set(re.findall(r'\bs\.get\w+\("(\w+)"\)', KOTLIN)) == entry_keys - {"part"}


def test_every_kind_of_state_has_its_rule() -> None:
    kinds = {s.kind for s in layouts(WITH_HEAD)}
    rules = {kind: rule for cell, _, rule in table("kind") for kind in quoted(cell)}
    assert set(rules) == kinds
    assert rules["keys"] == rules["values"] and rules["keys"].startswith("replaces: row i of `k_rows[l]`")
    assert "(position + i) mod S" in rules["keys"]
    assert rules["history"].startswith("appends") and rules["tokens"].startswith("the same")
    branches = re.search(r"when \(s\.kind\) \{(.*?)else ->", KOTLIN, re.S)
    assert branches and set(re.findall(r'"(\w+)"', branches[1])) == kinds
    assert set(re.findall(r'kind == "(\w+)"', KOTLIN)) <= kinds
    assert {"replace", "append"} <= set(re.findall(r"private fun (\w+)", KOTLIN))
    assert "(position + i) % size" in KOTLIN
    for cell, patterns, _ in table("kind"):
        held = {s.name for s in layouts(WITH_HEAD) if s.kind in quoted(cell)}
        stems = {re.sub(r"[0-9]{2}$", "*", name) for name in held}
        assert stems == set(quoted(patterns)), cell
    assert rules["replace"].startswith("takes the whole output")


def test_the_code_uses_inputs_and_outputs_that_exist() -> None:
    inputs, outputs = ports(input_ports(STATES, 1)), ports(output_ports(STATES, VOCAB, 1))
    counted = ports(input_ports(WITH_HEAD, BUCKETS[0]))
    assert set(re.findall(r'\binputs\["(\w+)"\]', KOTLIN)) == {"tokens", "position", "count"} <= set(counted)
    assert set(re.findall(r'\boutputs\["(\w+)"\]', KOTLIN)) == {"logits"} <= set(outputs)
    tensors = dict(re.findall(r'Get(Input|Output)Tensor\(decode, "(\w+)"\)', code("c")))
    assert tensors["Input"] in inputs and tensors["Output"] in outputs
    assert f'"{DECODE}"' in code("c")
    assert f"{PUBLISHED.qk_head_dim} floats for each group" in code("c")


def test_how_a_prompt_is_cut() -> None:
    assert f"const val TAIL_SHARE = {TAIL_SHARE}\n" in KOTLIN
    assert f"at most 1/{TAIL_SHARE} of that bucket" in PAGE
    assert f"at most 1/{TAIL_SHARE} of the smallest bucket" in KOTLIN
    assert "left * TAIL_SHARE <= fitting" in KOTLIN


def test_bytes_that_a_call_copies() -> None:
    rows = table("context")
    assert [int(context.replace(",", "")) for context, _, _ in rows] == [256, 1024]
    for context, caches, everything in rows:
        made = input_ports(state_specs(PUBLISHED, int(context.replace(",", ""))), 1)
        assert f"{total(tuple(p for p in made if p.name[:2] in ('k_', 'v_'))):,}" == caches
        assert f"{total(made):,}" == everything
    one, longest = (total(output_ports(STATES, VOCAB, n)) for n in (1, max(BUCKETS)))
    assert f"{one:,} bytes a token" in PAGE and longest == max(BUCKETS) * one
    assert f"`{prefill_name(max(BUCKETS))}` returns {max(BUCKETS)} times that" in PAGE
    taps = PUBLISHED.num_heads * PUBLISHED.qk_head_dim, PUBLISHED.num_kv_heads * PUBLISHED.qk_head_dim
    parts = (*taps, PUBLISHED.num_kv_heads * PUBLISHED.v_head_dim)
    assert f"{sum(parts)} is {' + '.join(map(str, parts))}, the channels" in PAGE
    assert f"sliding window ({PUBLISHED.sliding_window:,} positions)" in PAGE


def test_nothing_is_claimed_of_devices() -> None:
    assert "**Nothing here has run on a phone.**" in PAGE
    assert "No latency, memory or energy of any device was measured" in PAGE
    assert "`needle_export/targets/tflite/session.py`" in PAGE


def test_reference_links_are_defined_and_used() -> None:
    defined = re.findall(r"^\[(\w+)\]: https://", PAGE, re.M)
    assert sorted(defined) == defined
    assert set(defined) == set(re.findall(r"\]\[(\w+)\]", PAGE))
