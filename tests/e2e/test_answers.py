"""The trained model, exported and asked: an exact artifact answers as the float reference does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from needle_export import demo, pipeline
from needle_export.config.options import BuildOptions
from needle_export.config.progress import NullProgress
from needle_export.evaluation import EvaluationOptions, evaluate
from needle_export.report.evaluation import Evaluation
from needle_export.report.schema import load_report

QUIET = NullProgress()
QUERIES = 30


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("answers") / "fp32"
    pipeline.build(BuildOptions("demo:", out, context=640, bench=False), QUIET)
    return out


def asked(dist: Path, **changes: Any) -> Evaluation:
    files = demo.files()
    options = EvaluationOptions(files.heldout, files.tools, QUERIES, tokenizer=files.tokenizer, **changes)
    (found,) = evaluate([dist], options, QUIET)
    return found.evaluation


def test_it_answers_as_the_float_reference(dist: Path) -> None:
    found = asked(dist, checkpoint="demo:")
    assert found.reference is not None
    assert found.reference.same_tokens.count == found.reference.same_calls.count == QUERIES
    assert found.exact_calls == found.reference.exact_calls
    # Of 30 answers by a model that is right nine times of ten, far fewer right ones would be a fault of the way.
    assert found.exact_calls.share > 0.6 and found.invalid.count == 0
    assert load_report(dist).artifacts[0].evaluations == (found,)


def test_without_the_grammar_it_is_another_mode(dist: Path) -> None:
    found = asked(dist, constrained=False)
    assert not found.constrained and found.reference is None
    assert {e.constrained for e in load_report(dist).artifacts[0].evaluations} >= {False}
