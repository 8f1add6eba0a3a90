"""What docs/ios.md and the Swift files say of a Core ML package is what the exporter writes and host.py computes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from needle_export.checkpoint.geometry import PUBLISHED
from needle_export.config.options import BUCKETS, DEFAULT_SYSTEM, SYSTEMS
from needle_export.model.state import state_specs
from needle_export.targets.coreml import contract as c
from needle_export.targets.coreml.host import PRIME, TAIL_SHARE
from needle_export.targets.ports import CONTRACT_KEY, DECODE, Port, prefill_name
from tests.support.coreml_contracts import contract_of, ngram_facts

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ios.md").read_text(encoding="utf-8")
FOLDER = ROOT / "needle_export" / "targets" / "coreml"
HOST = (FOLDER / "NeedleHost.swift").read_text(encoding="utf-8")
MODEL = (FOLDER / "NeedleModel.swift").read_text(encoding="utf-8")
PYTHON = (FOLDER / "host.py").read_text(encoding="utf-8")

CONTEXT = 2048
STATES = state_specs(PUBLISHED, CONTEXT)
VOCAB = PUBLISHED.head_vocab
TABLES = len(ngram_facts(PUBLISHED)["seeds"])
WINDOW = PUBLISHED.sliding_window
ROWS = (1, *BUCKETS)

Shape = tuple[int, ...]


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, title
    return found[1]


def table(head: str, text: str = PAGE) -> list[list[str]]:
    """Cells of the one table whose head begins with a word."""
    found = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.M)
    assert len(found) == 1, head
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def names_of(cell: str) -> list[str]:
    """``a``, ``b``, or every name from ``a_00`` to ``a_19`` with whatever stands around the number."""
    names = quoted(cell)
    if "…" not in cell:
        return names
    (first, low), (last, high) = ((n, re.search(r"\d\d", n)) for n in names)
    assert low and high and first.replace(low[0], high[0]) == last
    return [first.replace(low[0], f"{number:02d}") for number in range(int(low[0]), int(high[0]) + 1)]


def shape_of(cell: str, rows: int) -> Shape:
    letters = {"T": rows, "S": CONTEXT, "W": WINDOW}
    dims = []
    for dim in quoted(cell)[0].strip("[]").split(", "):
        parts = [letters[p] if p in letters else int(p) for p in re.split(r" [/+] ", dim)]
        dims.append(parts[0] // parts[1] if "/" in dim else sum(parts))
    return tuple(dims)


def described(cells: list[list[str]], rows: int) -> Iterator[tuple[str, Shape, str]]:
    """Name, shape and type of every row that is of this function; "all other" leaves out what was named before."""
    seen: set[str] = set()
    for name, shape, kind, *_ in cells:
        if ("of prefills" in name and rows == 1) or ("of `decode`" in name and rows > 1):
            continue
        stem = re.sub(r" of (prefills|`decode`)$", "", name)
        for one in names_of(stem):
            if not (stem.startswith("all other") and one in seen):
                yield one, shape_of(shape, rows), kind
            seen.add(one)


def on_page(cells: list[list[str]], rows: int, real: str) -> dict[str, tuple[Shape, str]]:
    return {name: (shape, real if kind == "float" else kind) for name, shape, kind in described(cells, rows)}


def made(ports: tuple[Port, ...]) -> dict[str, tuple[Shape, str]]:
    return {p.name: (p.shape, p.dtype) for p in ports}


def total(ports: tuple[Port, ...]) -> int:
    return sum(2 * math.prod(p.shape) for p in ports)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_inputs_states_and_output(rows: int, half: bool) -> None:
    real = "float16" if half else "float32"
    given = c.input_ports(STATES, rows, TABLES, half, True)
    assert on_page(table("input", section("Inputs")), rows, real) == made(given)
    assert on_page(table("output", section("Output")), rows, real) == made(
        c.output_ports(STATES, VOCAB, rows, half, True)
    )


def test_states() -> None:
    cells = [[name, shape, "float16"] for name, shape, _ in table("state", section("States"))]
    assert on_page(cells, 1, "") == made(c.state_ports(STATES, True))
    assert "all are float16" in section("States")
    for name, shape, kind in described(cells, 1):
        assert kind == "float16" and (shape[-1] % c.WIDTH == 0), name
    assert f"A key is {PUBLISHED.qk_head_dim} wide" in PAGE
    assert f"multiple of {c.WIDTH}" in PAGE
    assert {f"`k_{g:02d}`" for g in PUBLISHED.global_layers} == {
        f"`{n}`" for n in quoted(table("state", section("States"))[0][0])
    }


@pytest.mark.parametrize("rows", ROWS)
def test_packages_without_states(rows: int) -> None:
    text = section("iOS 17")
    same = quoted(re.search(r"^(.*) are as above\.$", text, re.M)[1])  # type: ignore[index]
    before = on_page(table("input", section("Inputs")), rows, "float16")
    page = {n: before[n] for n in same if n in before} | on_page(table("input", text), rows, "float16")
    assert page == made(c.input_ports(STATES, rows, TABLES, True, False))
    assert on_page(table("output", text), rows, "float16") == made(c.output_ports(STATES, VOCAB, rows, True, False))
    assert "`slots`" in text and "there is\nno `slots`" in text


def test_bytes_of_the_states() -> None:
    for context, size in table("context"):
        ports = c.state_ports(state_specs(PUBLISHED, int(context.replace(",", ""))), True)
        assert f"{total(ports):,}" == size


def test_names_of_functions_packages_and_files() -> None:
    found = {
        name: int(rows)
        for names, counts in table("function")
        for name, rows in zip(quoted(names), counts.split(", "), strict=True)
    }
    assert found == {DECODE: 1, **{prefill_name(b): b for b in BUCKETS}}
    assert f"{' and '.join(map(str, BUCKETS))} are the default buckets" in PAGE
    packages = {c.package_name(name, c.stateful(system)) for name in found for system in SYSTEMS}
    files = {name for cell, _ in table("file") for name in quoted(cell)}
    assert packages <= files
    assert {"NeedleHost.swift", "NeedleModel.swift", "host.py"} <= files
    assert all((FOLDER / name).is_file() for name in ("NeedleHost.swift", "NeedleModel.swift", "host.py"))
    assert f'return bucket == 1 ? "{DECODE}" : "{prefill_name(0)[:-1]}\\(bucket)"' in HOST
    assert c.package_name(DECODE, False) == "model.mlpackage"
    assert c.package_name("X", False) == "model_X.mlpackage"
    assert '? "model" : "model_" + NeedleHost.function(bucket)' in HOST
    assert tuple(c.SPECIFICATIONS) == SYSTEMS
    assert f"`--os {SYSTEMS[0]}` writes packages without states" in PAGE and f"--os {DEFAULT_SYSTEM} " in PAGE


def test_the_swift_files_ship_with_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"needle_export.targets.coreml" = ["*.swift"]' in text


def test_keys_of_the_contract() -> None:
    facts, _ = contract_of("small", "ios18")
    page = {key for cell, _ in table("key") for key in quoted(cell)}
    assert page == set(facts) - {"needle.tool"}
    rows = {quoted(cell)[0]: meaning for cell, meaning in table("key")}
    assert set(quoted(rows["state"])) == set(facts["state"][0])
    assert set(quoted(rows["ngrams"])) == set(facts["ngrams"])
    assert f"-{-c.MASKED:,.0f}" in PAGE
    assert f"`{CONTRACT_KEY}`" in PAGE and f'"{CONTRACT_KEY}"' in MODEL


def fields(kind: str) -> dict[str, str]:
    """Stored properties of a struct in NeedleHost.swift, with their types."""
    body = re.search(rf"struct {kind}: Decodable {{\n(.*?)^ *}}\n", HOST, re.M | re.S)
    assert body
    return dict(re.findall(r"^ *let (\w+): (.+)$", body[1], re.M))


def test_swift_decodes_what_the_host_reads() -> None:
    """Every key that host.py reads, and none that no contract has; lists as lists and words as words."""
    facts, _ = contract_of("small", "ios17")
    read = set(re.findall(r"""\bs\[["'](\w+)["']\]""", PYTHON))
    assert set(fields("State")) == read <= set(facts["state"][0])
    ngrams = set(re.findall(r'\bfacts\["(\w+)"\]', PYTHON))
    assert set(fields("Ngrams")) == ngrams == set(facts["ngrams"])
    body = HOST.split("struct NeedleContract", 1)[1].split("static func", 1)[0]
    top = dict(re.findall(r"^    let (\w+): (.+)$", body, re.M))
    assert set(top) == set(facts) - {"needle.tool"}
    kinds = {bool: "Bool", int: "Int", float: "Float", list: r"\[\w+\]", str: "NeedleType", dict: "Ngrams"}
    for key, swift in top.items():
        assert re.fullmatch(kinds[type(facts[key])], swift), key
    for key, swift in fields("State").items():
        assert re.fullmatch({**kinds, str: "String"}[type(facts["state"][0][key])], swift), key
    assert all(swift.endswith("?") for swift in fields("Ngrams").values()), "ngrams may be empty"
    assert {"float16", "float32", "int32"} == set(re.findall(r"^    case (\w+)$", HOST, re.M))


def test_swift_makes_the_inputs_of_the_host() -> None:
    python = set(re.findall(r'given\["(\w+)"\]', PYTHON)) | {"tokens", "position"}
    swift = set(re.findall(r'given\["(\w+)"\]', HOST))
    assert python == swift
    assert swift == set(made(c.input_ports(STATES, BUCKETS[0], TABLES, True, True)))
    assert set(re.findall(r'kind == "(\w+)"', HOST)) == {"keys", "values"}
    assert '+ "_rows"' in HOST and '+ "_next"' in HOST


def test_constants_of_the_host() -> None:
    found = re.findall(r"static let (\w+).* = (\w+)", HOST)
    assert {name: int(value.replace("_", ""), 0) for name, value in found} == {"prime": PRIME, "tailShare": TAIL_SHARE}
    assert f"at most 1/{TAIL_SHARE} of that\n   bucket" in PAGE
    methods = set(re.findall(r"^    def ([a-z]\w+)", PYTHON, re.M))
    assert methods <= set(re.findall(r"^    func (\w+)", HOST, re.M))


def test_code_on_the_page_uses_what_there_is() -> None:
    blocks = re.findall(r"^```swift\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 2
    functions = set(re.findall(r"func (\w+)\(", HOST + MODEL))
    for owner in ("host", "model", "NeedleHost", "NeedleContract", "tensor"):
        for used in re.findall(rf"\b{owner}\.(\w+)\(", "".join(blocks)):
            assert used in functions, (owner, used)
    assert f'load("{DECODE}")' in blocks[1] and f'"{CONTRACT_KEY}"' in blocks[1]
    assert "init(folder: URL = Bundle.main.bundleURL, computeUnits: MLComputeUnits = .cpuOnly)" in MODEL
    assert "func greedy(_ prompt: [Int32], count: Int, stop: Set<Int32> = [])" in MODEL
    assert re.findall(r"^#(?:if|endif).*$", MODEL, re.M) == ["#if canImport(CoreML)", "#endif"]
    assert "CoreML" not in re.sub(r"//.*", "", HOST)


def test_nothing_is_claimed_of_devices() -> None:
    flat = " ".join(PAGE.split())
    assert "**Nothing here has run on an Apple device, nor in a simulator, nor on a Mac.**" in flat
    assert "**None of this is measured.**" in flat
    assert "`NeedleHost.swift` was compiled by Swift 6.0.3 on Linux" in flat
    assert "never compiled, never run" in flat


def test_reference_links_are_defined_and_used() -> None:
    defined = re.findall(r"^\[(\w+)\]: https://", PAGE, re.M)
    assert sorted(defined) == defined
    assert set(defined) == set(re.findall(r"\]\[(\w+)\]", PAGE))
    links = dict(re.findall(r"^\[(\w+)\]: (\S+)$", PAGE, re.M))
    for text, key in re.findall(r"\[[\w-]+#(\d+)\]\[(\w+)\]", PAGE):
        assert links[key].endswith(f"/{text}")
