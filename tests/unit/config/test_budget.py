"""Budget files: what an entry may say, and the sentence for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from needle_export.config.budget import Bound, Budget, parse_bound, parse_budgets
from needle_export.config.metrics import METRICS, Unit
from needle_export.errors import BadInput


def read(tmp_path: Path, text: str) -> tuple[Budget, ...]:
    path = tmp_path / "budgets.toml"
    path.write_text(text, encoding="utf-8")
    return parse_budgets(path)


def test_entries_in_order(tmp_path: Path) -> None:
    first, second = read(tmp_path, """
        [[budget]]
        metric = "size"
        target = "tflite"
        weights = "int4*"
        role = "routing"
        max = "35.5 MB"

        [[budget]]
        metric = "prefill"
        min = "250 tokens/s"
        prompt = 64
        device = "pixel-8"
        estimated = true
        optional = true
    """)
    assert first.bound == Bound("absolute", 35.5e6, "35.5 MB")
    assert first.upper
    assert first.sentence == "size of routing, tflite int4*: at most 35.5 MB"
    assert second.bound == Bound("absolute", 250, "250 tokens/s")
    assert not second.upper
    assert second.sentence == "prefill of 64 tokens, on pixel-8: at least 250 tokens/s"
    assert (second.estimated, second.optional) == (True, True)


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_every_figure_can_be_bounded(tmp_path: Path, metric: str) -> None:
    unit = next(m.unit for m in METRICS if m.name == metric)
    text = {"bytes": '"4.35 MB"', "ms": '"4.35 ms"', "tokens/s": '"4.35 tokens/s"'}.get(unit, "0.05")
    budget, = read(tmp_path, f'[[budget]]\nmetric = "{metric}"\nmax = {text}\n')
    # Met exactly, not up to the dust of powers of ten.
    assert budget.bound.value in (4.35e6, 4.35, 0.05)


@pytest.mark.parametrize(("written", "unit", "bound"), [
    ("2 MiB", "bytes", Bound("absolute", 2 * 2**20, "2 MiB")),
    ("4 ms", "ms", Bound("absolute", 4, "4 ms")),
    ("0.5 s", "ms", Bound("absolute", 500, "0.5 s")),
    (0.05, "nats", Bound("absolute", 0.05, "0.05")),
    (1, "share", Bound("absolute", 1, "1")),
    ("0.05 nats", "nats", Bound("absolute", 0.05, "0.05 nats")),
    ("99 %", "share", Bound("absolute", 0.99, "99 %")),
    ("99%", "share", Bound("absolute", 0.99, "99%")),
    ("+2 %", "bytes", Bound("share", 0.02, "+2 %")),
    ("+ 2 %", "bytes", Bound("share", 0.02, "+2 %")),
    ("-100 %", "bytes", Bound("share", -1, "-100 %")),
    ("+100 kB", "bytes", Bound("difference", 100_000, "+100 kB")),
    ("-0.5 ms", "ms", Bound("difference", -0.5, "-0.5 ms")),
    ("+0.01", "nats", Bound("difference", 0.01, "+0.01")),
])
def test_a_bound(written: str | float, unit: Unit, bound: Bound) -> None:
    found = parse_bound(written, unit)
    assert (found.kind, found.text) == (bound.kind, bound.text)
    assert found.value == pytest.approx(bound.value, rel=1e-12)


def test_what_a_relative_bound_comes_to() -> None:
    assert parse_bound("+2 %", "bytes").against(1000) == pytest.approx(1020)
    assert parse_bound("-0.1 ms", "ms").against(4) == pytest.approx(3.9)
    assert parse_bound("4 ms", "ms").against(None) == 4
    with pytest.raises(ValueError, match="there is no baseline"):
        parse_bound("+2 %", "bytes").against(None)


SIZE = '[[budget]]\nmetric = "size"\n'


@pytest.mark.parametrize(("text", "said"), [
    ("", "budgets.toml: there is no budget in it"),
    ("budget = []", "there is no budget in it"),
    ('[[budgets]]\nmetric = "size"\nmax = "1 MB"', "budgets.toml: budgets: there is no such key; did you mean budget?"),
    (f'{SIZE}max = "1 MB"\n{SIZE}maks = "2 MB"', "budget[2].maks: there is no such key; did you mean max?"),
    ('[[budget]]\nmetric = "sise"\nmax = "1 MB"', "there is no metric 'sise'; did you mean size?"),
    ('[[budget]]\nmetric = "beauty"\nmax = "1 MB"', "there is no metric 'beauty'; choose from size, compressed,"),
    (f'{SIZE}max = "1 MB"\ntarget = "tflight"', "there is no target 'tflight'; did you mean tflite?"),
    (SIZE, "budget[1]: a budget has either max or min"),
    (f'{SIZE}max = "1 MB"\nmin = "1 kB"', "either max or min, not both"),
    (f"{SIZE}max = 35", "35 needs its unit, as in '35.5 MB'"),
    (f'{SIZE}max = "35"', "'35' is no quantity of bytes, such as 35.5 MB"),
    (f'{SIZE}max = "4 ms"', "'4 ms' is no quantity of bytes"),
    (f'{SIZE}max = "2 %"', "'2 %' is a share of what? Write '+2 %'"),
    (f'{SIZE}max = "-101 %"', "a change of -101 % can't be"),
    (f'{SIZE}max = "+1e999 %"', "can't be"),
    (f"{SIZE}max = true", "budget[1].max: "),
    (f"{SIZE}max = 1979-05-27", "dates and times have no place here"),
    ('[[budget]]\nmetric = "kl"\nmax = inf', "inf is below 0 or not finite"),
    ('[[budget]]\nmetric = "kl"\nmax = nan', "nan is below 0 or not finite"),
    ('[[budget]]\nmetric = "kl"\nmax = -0.01', "a relative bound is text, as in '+0.01'"),
    ('[[budget]]\nmetric = "kl"\nmax = "0.05 nits"', "is no bound in nats, such as 0.05 or 0.05 nats"),
    ('[[budget]]\nmetric = "token_agreement"\nmin = 99', "99 is more than everything"),
    ('[[budget]]\nmetric = "token_agreement"\nmin = "101 %"', "1.01 is more than everything"),
    ('[[budget]]\nmetric = "kl"\nmax = 1\nrole = "routing"', "only size is known by role, not kl"),
    (f'{SIZE}max = "1 MB"\nprompt = 64', "a prompt belongs to prefill, not to size"),
    (f'{SIZE}max = "1 MB"\nestimated = true', "only decode and prefill can be estimated, not size"),
    ('[[budget]]\nmetric = "prefill"\nmin = "1 tokens/s"\nprompt = 0', "budget[1].prompt: "),
])
def test_what_no_budget_can_be(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, text)
    assert said in caught.value.sentence
    assert "\n" not in caught.value.sentence
