"""The grammar of valid calls: JSON schemas of tools compiled to an automaton over bytes."""

from __future__ import annotations

from collections.abc import Sequence

from needle_export.errors import BadInput, UsageError
from needle_export.generate.automaton import Automaton, Edge
from needle_export.generate.build_states import DEAD, States
from needle_export.generate.fragments import MAX_STATES, TooManyStates
from needle_export.generate.prompt import compact
from needle_export.generate.schemas import Tool
from needle_export.generate.shapes import Reader


def compile_grammar(tools: Sequence[Tool], *, max_calls: int | None = None) -> Automaton:
    """What may stand between ``<tool_call>`` and ``</tool_call>``: ``[]`` or a compact array of valid calls, in UTF-8.

    Args:
        tools: that may be called.
        max_calls: at most so many; None, any number.

    Raises:
        BadInput: naming the tool: a schema can't be read, admits nothing, or would take too many states.
        UsageError: ``max_calls`` is below 0.
    """
    if max_calls is not None and max_calls < 0:
        raise UsageError("an answer has no fewer than 0 calls", where="max_calls")
    states = States()
    notes: dict[str, None] = {}
    arguments = []
    for tool in tools:
        try:
            reader = Reader(tool.name, tool.parameters)
            shape = reader.arguments()
            states.note = reader.note
            if not states.fragment(shape):
                raise BadInput("no arguments are valid", where=f"tool {tool.name!r}: parameters",
                               fix="a required argument admits no value, or none is left by what is asked of it")
        except (TooManyStates, RecursionError):
            raise _too_many(f"tool {tool.name!r}") from None
        except UnicodeEncodeError:
            raise BadInput("it has a lone surrogate, which is no text", where=f"tool {tool.name!r}") from None
        notes |= reader.notes
        arguments.append((tool, shape))
    states.note = None

    def call(follow: int) -> int:
        return states.trie([(f'{{"name":{compact(tool.name)},"arguments":'.encode(),
                             states.value(shape, states.literal(b"}", follow))) for tool, shape in arguments])

    try:
        end = states.state([], True)
        start = states.array(call, 0, max_calls if tools else 0, end)
        notes |= states.notes
        return _numbered(states.edges, states.accept, start, tuple(notes))
    except (TooManyStates, RecursionError):
        raise _too_many("tools") from None


def _too_many(where: str) -> BadInput:
    return BadInput(f"the grammar would have more than {MAX_STATES:,} states", where=where,
                    fix="choose smaller limits for lengths and counts, or fewer tools")


def _numbered(edges: Sequence[Sequence[Edge]], accept: Sequence[bool], start: int, notes: tuple[str, ...]) -> Automaton:
    """The states that the start leads to, numbered as they are met."""
    assert start != DEAD  # [] is always admitted
    ids = {start: 0}
    order = [start]
    rows: list[tuple[Edge, ...]] = []
    for state in order:
        row = []
        for lo, hi, target in edges[state]:
            if target not in ids:
                ids[target] = len(order)
                order.append(target)
            row.append((lo, hi, ids[target]))
        rows.append(tuple(row))
    return Automaton(tuple(rows), frozenset(ids[s] for s in order if accept[s]), notes)
