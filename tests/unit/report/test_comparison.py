"""Comparisons: what no other beats, what is said about figures that don't compare, and how it all looks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from needle_export.config.metrics import METRICS
from needle_export.errors import BadInput
from needle_export.report.comparison import SORTS, Comparison, Model, Origin, Row, compare, read, unbeaten
from needle_export.report.comparison_view import render
from needle_export.report.markdown import escape
from needle_export.report.measured import Latency, Memory
from needle_export.report.metrics import Value
from needle_export.report.schema import FileInfo, Report
from tests.support.reports import make_artifact, make_report, make_size, write_artifact

DOC = (Path(__file__).parents[3] / "docs" / "report.md").read_text()


def built(size: int, kl: float | None, **changes: Any) -> Report:
    """A report over one artifact of a size in bytes and with a scheme's loss; None: the report doesn't tell."""
    plain = make_artifact()
    files = (FileInfo("model.onnx", size, "d" * 64),)
    loss = {} if kl is None else {"scheme_loss": {"kl": kl, "argmax_equal": 1 - kl, "max_abs": 10 * kl}}
    own = ("latency", "memory", "weights", "status", "target")
    fields = {name: changes.pop(name) for name in own if name in changes}
    parity = {**plain.parity, **loss, **changes.pop("parity", {})}
    made = dataclasses.replace(plain, files=files, size=make_size(size, {}), parity=parity, **fields)
    return make_report(made, **changes)


def latency(**changes: Any) -> Latency:
    made = make_artifact().latency
    assert made is not None
    return dataclasses.replace(made, **changes)


def memory(**changes: Any) -> Memory:
    made = make_artifact().memory
    assert made is not None
    return dataclasses.replace(made, **changes)


def marks(comparison: Comparison) -> dict[str, bool | None]:
    return {row.folder: row.unbeaten for row in comparison.rows}


def note(comparison: Comparison, start: str) -> str:
    (found,) = [text for text in comparison.notes if text.startswith(start)]
    return found


@pytest.mark.parametrize(("points", "expected"), [
    ([(1, 1)], [True]),
    ([(1, 2), (2, 1)], [True, True]),
    ([(1, 1), (2, 2)], [True, False]),
    ([(1, 1), (1, 2), (2, 1)], [True, False, False]),  # better in one, equal in the other
    ([(1, 1), (1, 1)], [True, True]),  # a tie in both beats nobody
    ([(1, 1), (1, 1), (0.5, 1)], [False, False, True]),
    ([None, (1, 1)], [None, True]),
    ([(5, 5), None, (4, 6), (6, 4), (5, 4.5)], [False, None, True, True, True]),
    ([None], [None]),
    ([], []),
])
def test_what_no_other_beats(points: list[Any], expected: list[bool | None]) -> None:
    assert unbeaten(points) == expected
    assert unbeaten(points[::-1]) == expected[::-1]


def test_artifacts_are_marked_by_size_and_scheme_loss_alone() -> None:
    # The export error and the speed of c are the best by far, and count for nothing.
    fast = latency(decode=dataclasses.replace(latency().decode or None, ms_p50=0.01))
    found = compare([("a", built(100, 0.2)), ("b", built(200, 0.1)),
                     ("c", built(200, 0.2, latency=fast, parity={"max_abs": 0.0, "kl": 0.0}))])
    assert marks(found) == {"a": True, "b": True, "c": False}


def test_a_float_build_is_without_loss_and_is_beaten_by_a_smaller_one_without() -> None:
    found = compare([("fp32", built(400, None, parity={"scheme_loss": None})), ("fp16", built(200, 0.0))])
    assert marks(found) == {"fp16": True, "fp32": False}
    assert note(found, "no scheme: no weight was rounded: ") == \
        "no scheme: no weight was rounded: KL, tokens equal of fp32"


def test_an_unknown_loss_is_not_marked_and_said_so() -> None:
    found = compare([("a", built(1, None)), ("b", built(2, 0.1))])
    assert marks(found) == {"a": None, "b": True}
    assert note(found, "can't be marked") == "can't be marked, as the loss is unknown: a"
    assert note(found, "the report doesn't tell what the scheme").endswith(": KL, tokens equal of a")
    assert not any("can't be marked" in text for text in compare([("b", built(2, 0.1))]).notes)


def other_model(report: Report, **changes: Any) -> Report:
    return dataclasses.replace(report, checkpoint=dataclasses.replace(report.checkpoint, **changes))


@pytest.mark.parametrize("changes", [{"sha256": "c" * 64}, {"layers": 2}, {"lora": ()}])
def test_the_loss_of_another_model_beats_nobody(changes: dict[str, Any]) -> None:
    tiny = other_model(built(1, 0.0), **changes)
    found = compare([("a", built(100, 0.2)), ("b", built(200, 0.3)), ("tiny", tiny)])
    assert marks(found) == {"a": True, "b": False, "tiny": True}
    told = note(found, "several models: ")
    assert "needle3.safetensors aaaaaaaa, 3 layers + 1 adapter bbbbbbbb (a, b)" in told
    assert "(tiny); " in told and "no other of the same model" in found.notes[0]


def test_one_model_under_two_names_is_one_model() -> None:
    renamed = other_model(built(1, 0.0), path_name="renamed.safetensors")
    found = compare([("a", built(100, 0.2)), ("b", renamed)])
    assert marks(found) == {"a": False, "b": True}
    assert not any("several models" in text for text in found.notes)


def test_other_machines_threads_and_estimates_are_named() -> None:
    alike = compare([("a", built(1, 0.1)), ("b", built(2, 0.1))])
    assert note(alike, "decode, prefill, load RSS") == \
        "decode, prefill, load RSS: measured on Imaginary 9000, 2 cores, Linux, 1 thread"
    assert not any("NOT MEASURED ALIKE" in text for text in alike.notes)
    found = compare([
        ("a", built(1, 0.1)),
        ("b", built(2, 0.1, latency=latency(threads=2), memory=memory(threads=2))),
        ("c", built(3, 0.1, latency=latency(kind="estimated", host="Pixel 8"), memory=None)),
        ("d", built(4, 0.1, latency=latency(threads=0), memory=None)),
        ("e", built(5, 0.1, latency=None, memory=None)),
        ("f", built(6, 0.1)),
    ])
    told = note(found, "NOT MEASURED ALIKE")
    for part in ("Linux, 1 thread (a, f)", "Linux, 2 threads (b)", "estimated on Pixel 8, 1 thread (c)",
                 "threads as the runtime chooses (d)"):
        assert part in told, part
    assert "(e)" not in told and any(text.endswith("decode, prefill of e") for text in found.notes)
    elsewhere = compare([("a", built(1, 0.1, memory=memory(host="Another")))])
    assert "measured on Another, 1 thread and measured on Imaginary" in note(elsewhere, "decode, prefill, load RSS")


def test_other_contexts_prompts_and_positions_are_named() -> None:
    short = latency(prefill=latency().prefill[:1], decode=dataclasses.replace(latency().decode or None, position=4))
    found = compare([("a", built(1, 0.1)), ("b", built(2, 0.1, latency=short, options={"context": 96}))])
    assert note(found, "contexts differ").endswith("1,024 tokens (a); 96 tokens (b)")
    assert note(found, "decode is of") == "decode is of a step after 256 tokens (a); 4 tokens (b)"
    assert note(found, "prefill is of") == "prefill is of a prompt of 64 tokens"
    assert [row.prefill_tokens for row in found.rows] == [64, 64]
    other = latency(prefill=(dataclasses.replace(latency().prefill[0], tokens=32),))
    apart = compare([("a", built(1, 0.1)), ("b", built(2, 0.1, latency=other))])
    assert note(apart, "prefill is of") == "prefill is of a prompt of 256 tokens (a); 32 tokens (b)"
    assert all(row.metrics["prefill"].value == 3200.0 for row in apart.rows)
    unknown = compare([("a", built(1, 0.1)), ("b", built(2, 0.1, options={}))])
    assert note(unknown, "contexts differ").endswith("1,024 tokens (a); unknown (b)")


def test_memory_says_what_it_holds() -> None:
    found = compare([("a", built(1, 0.1)), ("b", built(2, 0.1)), ("c", built(3, 0.1, memory=None))])
    assert note(found, "load RSS: ").endswith("of it, before loading: 49.0 MB (a, b)")
    assert note(found, "load RSS with").endswith("a prompt of 64 tokens: 221.0 MB (a, b)")


def test_warnings_come_first() -> None:
    lesser = other_model(built(2, 0.1, status="verified-by-evaluator"), random=True)
    found = compare([("a", built(1, 0.1)), ("b", lesser)])
    assert found.warnings == (
        "RANDOM WEIGHTS, made for tests: sizes and speeds are real, losses mean nothing (b)",
        "verified by our evaluator, not on the runtime: b",
    )
    rounded = built(1, 0.1, parity={"rounded": {"max_abs": 0.03}})
    assert note(compare([("a", rounded)]), "a: the export error").endswith("rounded as declared it is 0.03")


def test_several_artifacts_of_one_folder_have_names() -> None:
    one, two = built(1, 0.1).artifacts[0], built(2, None, weights="int8").artifacts[0]
    found = compare([("a", make_report(one, two))])
    assert [row.name for row in found.rows] == ["a onnx fp32", "a onnx int8"]
    assert note(found, "can't be marked").endswith(": a onnx int8")


@pytest.mark.parametrize("sort", SORTS)
def test_the_best_come_first_and_the_missing_last(sort: str) -> None:
    slow = latency(decode=dataclasses.replace(latency().decode or None, ms_p50=9.0))
    reports = [("z", built(1, 0.3, latency=None, memory=None)), ("y", built(3, 0.2, latency=slow)),
               ("x", built(2, 0.1, weights="fp16")), ("w", built(4, None, target="coreml"))]
    for given in (reports, reports[::-1]):
        order = [row.folder for row in compare(given, sort).rows]
        assert order == {
            "size": ["z", "x", "y", "w"], "compressed": ["z", "x", "y", "w"], "folder": ["w", "x", "y", "z"],
            "target": ["w", "x", "y", "z"],
            "weights": ["x", "w", "y", "z"], "kl": ["x", "y", "z", "w"], "token_agreement": ["x", "y", "z", "w"],
            "decode": ["w", "x", "y", "z"], "prefill": ["w", "x", "y", "z"],
        }.get(sort, ["w", "x", "y", "z"]), sort


def test_text_has_all_in_100_columns() -> None:
    reports = [("dist/int4", built(66_508_545, 0.0797, weights="int4")), ("dist/fp32", built(484_214_628, 0.0))]
    text = render(compare(reports), "text", width=100)
    assert max(len(line) for line in text.splitlines()) <= 100
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("*  dist/int4")]
    assert line.split() == ["*", "dist/int4", "onnx", "int4", "66.5", "700", "128.0", "2.50", "3,200", "0.08", "92.0",
                            "1.3e-06", "90.0"]
    missing = render(compare([("a", built(10, 0.1, latency=None, memory=None))]), "text")
    assert "* a onnx fp32 10 700 - - - 0.1 90.0 1.3e-06 90.0" in " ".join(missing.split())
    # A column without a figure has no unit.
    heads = " ".join(missing.splitlines()[3].split())
    assert heads == "folder artifact B B RSS decode prefill KL equal % error calls %"


def test_what_rounded_caches_cost_has_a_column_where_any_are() -> None:
    def caches(cost: object) -> Comparison:
        return compare([("a", built(10, 0.1, parity={"cache_loss": None})),
                        ("b", built(20, 0.1, parity={"cache_loss": cost}))])

    plain, rounded = render(caches(None), "text", width=100), render(caches({"kl": 0.0025}), "text", width=100)
    assert "cache" not in plain.split("\n  - ")[0]
    assert max(len(line) for line in rounded.splitlines()) <= 100
    assert rounded.splitlines()[2].split()[-4:] == ["tokens", "cache", "export", "exact"]
    ends = [line.split()[-4:-1] for line in rounded.splitlines() if " onnx fp32 " in line]
    assert ends == [["90.0", "0", "1.3e-06"], ["90.0", "0.0025", "1.3e-06"]]


def test_a_figure_without_a_column_has_one_when_sorted_by() -> None:
    reports = [("a", built(10, 0.1))]
    assert "zipped" not in render(compare(reports), "text").split("\n  - ")[0]
    assert "zipped" in render(compare(reports, "compressed"), "text").split("\n  - ")[0]


def test_markdown_escapes_and_has_the_same_cells() -> None:
    found = compare([("a|b_c", built(10, 0.1)), ("d", built(20, 0.1))])
    page = render(found, "markdown")
    assert r"| \* | a\|b\_c | onnx fp32 | 10 | 700 | 128.0 | 2.50 | 3,200 | 0.1 | 90.0 | 1.3e-06 |" in page
    assert "|  | d | onnx fp32 | 20 |" in page and "| size B |" in page
    assert all(f"\n- {escape(text)}\n" in page for text in found.notes)


def test_a_name_can_not_steer_the_terminal() -> None:
    assert "\x1b" not in render(compare([("a\x1b[2J", built(10, None))]), "text")


def test_json_has_all_and_is_documented() -> None:
    found = compare([("a", built(10, 0.1)), ("b", built(20, None, latency=None, memory=None))])
    raw = json.loads(render(found, "json"))
    assert set(raw) == {"sort", "rows", "warnings", "notes"}
    assert raw["rows"][0]["metrics"]["size"] == {"value": 10, "unit": "bytes", "why": ""}
    assert raw["rows"][1]["unbeaten"] is None and raw["rows"][1]["latency"] is None
    section = DOC.split("\n## compare --json\n")[1].split("\n## ")[0]
    for cls in (Comparison, Row, Model, Origin, Value):
        for field in dataclasses.fields(cls):
            assert f"`{field.name}`" in section or f"`rows[].{field.name}" in section, field.name
    table = {line.split("`")[1]: line.split("`")[3] for line in section.splitlines() if line.startswith("| `")
             and "rows[]" not in line}
    assert table == {metric.name: metric.unit for metric in METRICS}


def test_a_folder_must_hold_what_its_report_lists(tmp_path: Path) -> None:
    report = write_artifact(tmp_path)
    assert read(tmp_path) == read(tmp_path / "report.json") == report
    file = tmp_path / report.artifacts[0].files[0].name
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(BadInput, match=r"model\.onnx: this file has 99 bytes, and the report says 100; build it again"):
        read(tmp_path)
    file.unlink()
    with pytest.raises(BadInput, match=r"model\.onnx: this file of the artifact is missing"):
        read(tmp_path)
    assert read(tmp_path / "report.json") == report
    with pytest.raises(BadInput, match="there is no such report"):
        read(tmp_path / "absent")
