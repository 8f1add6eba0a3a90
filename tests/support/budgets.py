"""Gates to test with: a report, budgets as TOML, and what comes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from needle_export.config.budget import Budget, BudgetFile
from needle_export.config.strict import validate
from needle_export.report.gate import Entry, Gate, Verdict, check
from needle_export.report.schema import Artifact, Report
from tests.support.reports import make_artifact, make_report

LOSS = {"kl": 0.08, "argmax_equal": 0.75, "max_abs": 1.0}


def budget(metric: str, **fields: Any) -> Budget:
    """An entry as a file has it."""
    return validate(BudgetFile, {"budget": [{"metric": metric, **fields}]}, "budgets.toml").budget[0]


def artifact(**changes: Any) -> Artifact:
    """An artifact with every figure; of 2,148 bytes, 537 of them routing."""
    made = make_artifact()
    parity = {**made.parity, "scheme_loss": LOSS, "cache_loss": None, **changes.pop("parity", {})}
    return dataclasses.replace(made, parity=parity, **changes)


def gate(*budgets: Budget, reports: list[Report] | None = None, baselines: list[Report] | None = None,
         device: str | None = None) -> Gate:
    """The budgets against one report with every figure, or against reports named a, b, and so on."""
    found = [make_report(artifact())] if reports is None else reports
    entries = [Entry(b, "budgets.toml", 5 * i + 1) for i, b in enumerate(budgets)]
    return check(entries, list(zip("abcdef", found, strict=False)),
                 [(f"base {i}", report) for i, report in enumerate(baselines or [])], device)


def verdict(*budgets: Budget, **around: Any) -> Verdict:
    """The only verdict."""
    (found,) = gate(*budgets, **around).verdicts
    return found
