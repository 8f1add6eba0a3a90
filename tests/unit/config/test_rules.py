"""Rules: what matches, what wins, and what is refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from needle_export.config.rules import Rule, Rules
from needle_export.errors import UsageError


class Share(NamedTuple):
    source: str
    role: str


Q, V = Share("stack/layers/block/self_attn/q_proj/kernel", "routing"), Share("a/v_proj/kernel", "content")
TABLE = Share("engrams/embedding", "memory")
ONES = Share("ones", "constant")


def rules(base: str, *texts: str) -> Rules:
    return Rules(base, tuple(Rule.parse(text) for text in texts))


@pytest.mark.parametrize(("texts", "share", "scheme"), [
    ((), Q, "int4"),
    (("content=int8",), Q, "int4"),
    (("routing=int8",), Q, "int8"),
    (("*/q_proj/*=fp16",), Q, "fp16"),
    (("engrams/embedding=int2",), TABLE, "int2"),
    (("routing=int8", "*/q_proj/*=int2"), Q, "int2"),
    (("*/q_proj/*=int2", "routing=int8"), Q, "int8"),
    (("*=fp32", "content=int8"), V, "int8"),
    # A name is a name as a whole, and letters count as they are.
    (("q_proj=int8",), Q, "int4"),
    (("Routing=int8",), Q, "int4"),
])
def test_the_last_that_matches_wins(texts: tuple[str, ...], share: Share, scheme: str) -> None:
    made = rules("int4", *texts)
    assert made.scheme(*share) == made.of([share]) == made.of_matrix([share, ONES]) == scheme


def test_what_is_made_of_several() -> None:
    made = rules("int4", "content=int8")
    assert made.of([Q, V]) == "int4" and made.of([ONES]) == "int4" and made.of_matrix([]) == "int4"
    assert made.schemes == ("int4", "int8") and str(made) == "int4, content=int8"
    with pytest.raises(UsageError, match=r"stored as one matrix .*q_proj/kernel=int4, a/v_proj/kernel=int8") as caught:
        made.of_matrix([Q, V])
    assert "role" in caught.value.fix


@pytest.mark.parametrize("text", ["", "content", "=int8", "content=", "=", " = int8"])
def test_what_is_no_rule(text: str) -> None:
    with pytest.raises(UsageError, match="isn't a rule; write PATTERN=SCHEME"):
        Rule.parse(text)


def test_an_equals_sign_may_be_in_a_pattern() -> None:
    assert Rule.parse(" a=b = int8 ") == Rule("a=b", "int8")


@pytest.mark.parametrize(("text", "fix"), [
    ("contnt=int8", "did you mean content?"),
    ("engrams/embeding=int8", "did you mean engrams/embedding?"),
    ("zzz=int8", "name a tensor, or one of the roles content, memory, routing"),
])
def test_a_rule_for_nothing_is_refused(text: str, fix: str) -> None:
    known: list[Any] = [Q, V, TABLE]
    with pytest.raises(UsageError, match="no weight of this checkpoint is") as caught:
        rules("fp32", "content=int8", text).check(known)
    assert caught.value.where == "--rule" and caught.value.fix == fix
    rules("fp32", "content=int8", "*/q_proj/*=int8").check(known)
