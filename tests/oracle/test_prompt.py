"""Prompts are the package's, byte for byte, whatever tools and requests hold."""

from __future__ import annotations

from random import Random
from typing import Any

from needle.model.finetune import render_example

from needle_export.generate.prompt import render
from needle_export.generate.schemas import read_tools


def test_prompts_are_the_packages() -> None:
    rng = Random(0)

    def word() -> str:
        return "".join(rng.choice('ab "\\\n\té𝄞</{}:,\u2028\x00\x7f漢') for _ in range(rng.randint(0, 8)))

    for _ in range(1000):
        tools: list[dict[str, Any]] = [
            {"name": f"t{i}{word()}", "description": word(), "triggers": [word()],
             "parameters": {"type": "object", "properties": {word(): {"type": "string", "description": word()}}}}
            for i in range(rng.randint(0, 3))]
        given = [{"type": "function", "function": tool} if rng.random() < 0.5 else tool for tool in tools]
        query, system = word(), word()
        wanted, _ = render_example({"query": query, "tools": tools, "system": system})
        assert render(query, read_tools(given), system) == wanted
