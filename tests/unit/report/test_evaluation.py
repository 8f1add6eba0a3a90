"""Evaluations in reports: what can't be is refused, and answers to different queries are never compared silently."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from needle_export.config.metrics import ANSWERS
from needle_export.errors import BadInput
from needle_export.report.comparison import Comparison, compare
from needle_export.report.comparison_view import render
from needle_export.report.difference import difference
from needle_export.report.evaluation import Evaluation, Proportion, chosen, shared_key, with_evaluation
from needle_export.report.markdown import render_markdown
from needle_export.report.metrics import NOT_EVALUATED, metrics_of
from needle_export.report.page import prepare
from needle_export.report.schema import Artifact, Report
from needle_export.report.text import render_text
from tests.support.budgets import budget, gate, verdict
from tests.support.reports import make_artifact, make_evaluation, make_report

OTHER = "0123456789abcdef" * 4


def other(exact: int = 100, **changes: Any) -> Evaluation:
    """Of another file of queries."""
    made = make_evaluation(exact)
    return dataclasses.replace(made, data=dataclasses.replace(made.data, sha256=OTHER, file="other.jsonl"), **changes)


def raw(exact: int = 150) -> Evaluation:
    return make_evaluation(exact, constrained=False)


def evaluated(*evaluations: Evaluation, **changes: Any) -> Artifact:
    return make_artifact(evaluations=evaluations, **changes)


def reports(*artifacts: Artifact) -> list[tuple[str, Report]]:
    return [(name, make_report(artifact)) for name, artifact in zip("abcd", artifacts, strict=False)]


@pytest.mark.parametrize(("numbers", "said"), [
    ((3, 2, 1.5, 0.9, 1.0), "3 of 2 is no share"), ((0, 0, 0.0, 0.0, 0.0), "0 of 0 is no share"),
    ((1, 2, 0.6, 0.1, 0.9), "1 of 2 isn't 0.6"), ((1, 2, 0.5, 0.6, 0.9), "doesn't lie in the interval"),
    ((1, 2, 0.5, 0.1, 1.1), "doesn't lie in the interval")])
def test_shares_that_cannot_be(numbers: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Proportion(*numbers)


def test_evaluations_that_cannot_be() -> None:
    made = make_evaluation()
    with pytest.raises(ValueError, match="300 of 200 queries can't be"):
        dataclasses.replace(made.data, queries=300)
    with pytest.raises(ValueError, match="isn't a SHA-256"):
        dataclasses.replace(made.data, tools_sha256="c")
    with pytest.raises(ValueError, match="a count isn't of the 200 queries"):
        dataclasses.replace(made, cut=made.nothing_recall)
    with pytest.raises(ValueError, match="either a reference, or a reason"):
        dataclasses.replace(made, reference=None)


def test_which_evaluation_stands_for_an_artifact() -> None:
    few = make_evaluation(35, 50)
    assert chosen(()) is None and chosen([raw()]) is None
    assert chosen([few, make_evaluation(), raw()]) == make_evaluation()
    assert chosen([make_evaluation(), other()]) == other()
    assert chosen([make_evaluation(), other()], make_evaluation().key) == make_evaluation()
    assert shared_key([[few, other()], [other(7)], []]) == other().key
    assert shared_key([[few], [other()]]) is None and shared_key([]) is None and shared_key([[raw()], [raw()]]) is None


def test_a_new_one_takes_the_place_of_the_same() -> None:
    known = (make_evaluation(1), other(), raw())
    assert with_evaluation(known, make_evaluation(2)) == (make_evaluation(2), other(), raw())
    longer = make_evaluation(max_new_tokens=9)
    assert with_evaluation(known, longer) == (*known, longer)


def test_what_was_not_counted_has_a_reason() -> None:
    def whys(*evaluations: Evaluation) -> dict[str, str]:
        artifact = evaluated(*evaluations)
        found = metrics_of(make_report(artifact), artifact)
        assert all((found[name].value is None) == bool(found[name].why) for name in ANSWERS)
        return {name: found[name].why for name in ANSWERS if found[name].why}

    assert whys() == dict.fromkeys(ANSWERS, NOT_EVALUATED)
    assert whys(raw()) == dict.fromkeys(ANSWERS, "evaluated on other data, or without the grammar")
    bare = make_evaluation(nothing_precision=None, nothing_recall=None, reference=None, reference_why="not asked")
    assert whys(bare) == {"nothing_precision": "no answer calls nothing", "reference_agreement": "not asked",
                          "nothing_recall": "no query calls for nothing"}


@pytest.mark.parametrize("view", [render_text, render_markdown])
def test_views_tell_counts_and_intervals(view: Any) -> None:
    text = " ".join(view(make_report(evaluated(make_evaluation(), raw()))).split()).replace("\\", "")
    for said in ("exact calls 90.0 % (180 of 200), 95 % interval 89.0 to 91.0 %",
                 "precision 75.0 % (18 of 24) and recall 90.0 % (18 of 20)", "cut 1.5 % (3 of 200)",
                 "as the float reference 97.5 % (195 of 200), which has 91.0 % (182 of 200) exact",
                 "200 queries, with the grammar", "200 queries, WITHOUT the grammar", "Answers to queries (evaluated)"):
        assert said in text, said
    assert "Answers to queries" not in view(make_report(evaluated()))


def notes(comparison: Comparison) -> str:
    return "\n".join(comparison.notes)


def test_alike_they_compare() -> None:
    found = compare(reports(evaluated(make_evaluation(), other()), evaluated(make_evaluation(190)), evaluated()))
    values = {row.folder: row.metrics["exact_call_accuracy"].value for row in found.rows}
    assert values == {"a": 0.9, "b": 0.95, "c": None}
    assert {row.answers.sha256 for row in found.rows if row.answers} == {"f" * 64}
    assert "of heldout.jsonl ffffffff with tools cccccccc, 200 queries, with the grammar" in notes(found)
    assert "exact calls, 95 % interval: 89.0 to 91.0 % (a); 94.0 to 96.0 % (b)" in notes(found)
    assert f"{NOT_EVALUATED}: exact calls" in notes(found) and "ALIKE" not in notes(found)
    assert "calls %" in " ".join(render(found, "text").splitlines()[3].split())


def test_of_other_queries_they_are_marked() -> None:
    found = compare(reports(evaluated(make_evaluation()), evaluated(other())))
    assert "NOT EVALUATED ALIKE, so exact calls, nothing: precision" in notes(found)
    assert "heldout.jsonl ffffffff" in notes(found) and "other.jsonl 01234567" in notes(found)


def test_where_nothing_was_evaluated_nothing_is_said() -> None:
    found = compare(reports(evaluated(), evaluated()))
    assert "evaluate" not in notes(found) and "calls" not in render(found, "text").split("\n  - ")[0]


def figure(old: Artifact, new: Artifact) -> Any:
    (artifact,) = difference(("old", make_report(old)), ("new", make_report(new))).artifacts
    return next(f for f in artifact.figures if f.metric == "exact_call_accuracy")


def test_differences_are_of_the_same_queries() -> None:
    assert figure(evaluated(make_evaluation()), evaluated(make_evaluation(190), other())).delta == pytest.approx(0.05)
    found = figure(evaluated(make_evaluation()), evaluated(other()))
    assert found.delta is None and found.why.startswith("evaluated on heldout.jsonl ffffffff")
    assert "and then on other.jsonl 01234567" in found.why


def judged(artifact: Artifact, baseline: Artifact | None = None, **fields: Any) -> Any:
    given = {"min": "90 %", **fields}
    return verdict(budget("exact_call_accuracy", **given), reports=[make_report(artifact)],
                   baselines=[] if baseline is None else [make_report(baseline)])


def test_budgets_say_what_they_rest_on() -> None:
    found = judged(evaluated(make_evaluation()))
    assert (found.status, found.basis, found.why) == ("within", "evaluated", "95 % interval 89.0 to 91.0 %")
    assert found.where.startswith("on heldout.jsonl ffffffff") and found.where.endswith("at most 256 tokens")
    assert judged(evaluated(make_evaluation(179))).status == "exceeded"
    assert (judged(evaluated()).status, judged(evaluated()).why) == ("unknown", NOT_EVALUATED)


def test_of_several_files_a_budget_names_one() -> None:
    several = evaluated(make_evaluation(), other(), raw())
    found = judged(several)
    assert found.status == "unknown" and "evaluated several times with the grammar" in found.why
    assert "say data = ... in the budget" in found.why
    assert judged(several, data="heldout.jsonl").status == "within"
    assert judged(several, data="other.jsonl").status == "exceeded"
    lost = judged(several, data="third.jsonl")
    assert lost.status == "unknown" and "not evaluated with the grammar on third.jsonl; there is" in lost.why
    assert judged(several, unconstrained=True, min="75 %").status == "within"
    assert judged(evaluated(make_evaluation()), unconstrained=True).status == "unknown"


def test_against_a_baseline_of_other_queries_nothing_is_decided() -> None:
    now = evaluated(make_evaluation())
    assert judged(now, evaluated(make_evaluation(182)), min="-2 %").status == "within"
    assert judged(now, evaluated(make_evaluation(190)), min="-2 %").status == "exceeded"
    found = judged(now, evaluated(other(1)), min="-2 %")
    assert found.status == "unknown" and found.why.startswith("the baseline's is evaluated on other.jsonl")
    shorter = make_evaluation(data=dataclasses.replace(make_evaluation().data, lines=400))
    assert judged(now, evaluated(shorter), min="-2 %").status == "unknown"


@pytest.mark.parametrize("fields", [{"data": "x.jsonl"}, {"unconstrained": True}])
def test_other_figures_are_of_no_queries(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="only answers are of data, not size"):
        budget("size", max="1 MB", **fields)


def test_the_gate_says_the_queries() -> None:
    assert gate(budget("nothing_recall", min="50 %", data="heldout.jsonl")).exit_code == 0
    told = verdict(budget("nothing_recall", min="50 %", data="heldout.jsonl")).budget
    assert told == "nothing_recall, on heldout.jsonl: at least 50 %"


def test_the_chart_holds_only_what_was_asked_alike() -> None:
    alike = prepare(reports(evaluated(make_evaluation()), evaluated(make_evaluation(190)), evaluated()))
    assert alike.answers is not None and len(alike.answers.marks) == 2 and len(alike.unevaluated) == 1
    low, high = sorted(alike.answers.marks, key=lambda mark: -mark.y)
    assert "exact calls 90.0 %, 95 % interval 89.0 % to 91.0 %" in low.title and high.y < low.y
    # The whiskers reach from end to end, and the chart holds them.
    for mark, whisker in zip(alike.answers.marks, alike.answers.segments, strict=True):
        assert 0 <= whisker.y2 < mark.y < whisker.y1 <= alike.answers.height and whisker.x1 == whisker.x2 == mark.x
    assert alike.answers.y_ticks[0].text == "100 %"
    assert prepare(reports(evaluated(make_evaluation()), evaluated(other()))).answers is None
    assert prepare(reports(evaluated(make_evaluation()))).answers is None
