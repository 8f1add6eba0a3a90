"""A gate's verdicts as JUnit XML, which every CI system shows."""

from __future__ import annotations

from typing import Any

from needle_export import __version__
from needle_export.report.gate import Gate
from needle_export.report.gate_view import STATUS_WORDS, artifact, sentence


def render_junit(gate: Gate) -> str:
    """The verdicts as a test suite: a case for each, named by its budget, in a class named by its artifact.

    What is exceeded or can't be told is a failure, what nothing matches an error.
    """
    from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

    suite = TestSuite("needle-export budgets")
    suite.add_property("needle-export", __version__)
    for v in gate.verdicts:
        case = TestCase(_xml(v.budget), _xml(artifact(v) or "no artifact"), 0)
        said = _xml(sentence(v))
        if v.status in ("exceeded", "unknown"):
            case.result = [Failure(said, STATUS_WORDS[v.status].lower())]
        elif v.status == "unmatched":
            case.result = [Error(said, STATUS_WORDS[v.status].lower())]
        elif v.status == "skipped":
            case.result = [Skipped(said)]
        suite.add_testcase(case)
    xml: Any = JUnitXml("needle-export")
    xml.add_testsuite(suite)
    xml.update_statistics()
    text: str = xml.tostring().decode()
    return f"{text.rstrip()}\n"


def _xml(text: str) -> str:
    """Text with everything replaced that XML 1.0 has no way to hold, control characters and lone surrogates."""
    return "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" and c not in "\ufffe\uffff"
                   else "\N{REPLACEMENT CHARACTER}" for c in text)
