"""What the page about run says of fields, options and limits is what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from needle_export.answering import Answered, Session
from needle_export.cli.app import program
from needle_export.generate import build_states, fragments, numbers, shapes
from needle_export.generate.assistant import MAX_NEW_TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "run.md").read_text(encoding="utf-8")


def table(head: str, part: str = PAGE) -> list[list[str]]:
    """The cells of the first table that begins so."""
    _, found, rest = part.partition(f"{head}\n|---")
    assert found, head
    rows = rest.split("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def names(rows: list[list[str]]) -> list[str]:
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_field_is_there_in_order() -> None:
    first, _, second = PAGE.partition("and for each of `answers`:")
    head = "| field | what it is |"
    assert names(table(head, first)) == [field.name for field in fields(Session)]
    assert names(table(head, second)) == [field.name for field in fields(Answered)]


def test_every_option_is_there() -> None:
    command = program.get_command(None, "run")  # type: ignore[arg-type]  # the context isn't used
    assert command is not None
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert set(names(table("| option | what it does |"))) == options - {"--debug", "--help"}
    assert f"{MAX_NEW_TOKENS} unless given" in PAGE


def test_the_limits_are_those_of_the_grammar() -> None:
    rows = table("| what | limit | beyond it |")
    found = [int(re.sub(r"[^0-9]", "", row[1])) for row in rows]
    assert found[:-1] == [fragments.MAX_STATES, build_states.ANY_ORDER_STATES, shapes.REF_DEPTH, shapes.ANY_DEPTH,
                          numbers.MAX_STEP]
    assert found[-1] == 2  # as tests/unit/generate/test_schemas.py tries it


def test_every_keyword_that_it_calls_enforced_is() -> None:
    said = PAGE.partition("By default only valid")[2].partition("are enforced.")[0]
    keywords = set(re.findall(r"`(\$?[a-zA-Z]+)`", said))
    assert keywords <= shapes._ENFORCED | {"allOf", "anyOf", "oneOf", "$ref"} and len(keywords) > 10
