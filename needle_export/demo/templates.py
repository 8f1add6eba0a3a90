"""The wordings of the demo's requests, by split and by what is asked.

A template is a sentence with alternatives in parentheses, ``(a|b|)``, and values in braces. The splits share no
template, in the strictest sense: no sentence with its alternatives chosen and its values left open is in two of them.
"""

from __future__ import annotations

import re
from random import Random

from needle_export.demo.refusals import BEFORE, BEHIND, JOINERS, NEGATIONS, NOTHING, ORDERS
from needle_export.demo.requests import CORES

__all__ = ["BEFORE", "BEHIND", "CORES", "JOINERS", "NEGATIONS", "NOTHING", "ORDERS", "SPLITS",
           "skeletons", "spell", "tidy"]

SPLITS = ("train", "validation", "heldout")

_CHOICE = re.compile(r"\(([^()]*)\)")


def spell(template: str, rng: Random) -> str:
    """The template with each alternative chosen at random; values stay open."""
    return tidy(_CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), template))


def skeletons(template: str) -> set[str]:
    """Every sentence that a template can be, with its values left open."""
    found = _CHOICE.search(template)
    if found is None:
        return {tidy(template)}
    out: set[str] = set()
    for choice in found.group(1).split("|"):
        out |= skeletons(template[: found.start()] + choice + template[found.end() :])
    return out


def tidy(text: str) -> str:
    """One space between words, none before punctuation."""
    return re.sub(r" ([,.?!:])", r"\1", " ".join(text.split()))
