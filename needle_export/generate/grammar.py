"""The grammar of valid calls: JSON schemas of tools compiled to an automaton over bytes."""

from __future__ import annotations

from collections.abc import Sequence

from needle_export.generate.automaton import Automaton
from needle_export.generate.schemas import Tool


def compile_grammar(tools: Sequence[Tool], *, max_calls: int | None = None) -> Automaton:
    """What may stand between ``<tool_call>`` and ``</tool_call>``: ``[]`` or a compact array of valid calls, in UTF-8.

    Args:
        tools: that may be called.
        max_calls: at most so many; None, any number.

    Raises:
        BadInput: naming the tool: a schema can't be read, admits nothing, or would take too many states.
    """
    raise NotImplementedError
