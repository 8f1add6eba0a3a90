"""Shapes of values into states, from the end of a text to its beginning: a value is built onto what follows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from decimal import Decimal

from needle_export.generate.automaton import Edge
from needle_export.generate.fragments import MAX_STATES, Fragment, TooManyStates, combined, joined
from needle_export.generate.numbers import Range, number
from needle_export.generate.prompt import compact
from needle_export.generate.shapes import Array, Choice, Either, Number, Record, Shape, Text

#: No state: nothing that may come next leads to an end.
DEAD = -1

#: States that keys in any order may take in one object, by estimate; with more, keys keep the schema's order.
ANY_ORDER_STATES = 10_000

_HEX, _HEX_BUT_D = ((48, 57), (65, 70), (97, 102)), ((48, 57), (65, 67), (69, 70), (97, 99), (101, 102))
_D = ((68, 68), (100, 100))


class States:
    """States under construction. Equal ones are made once, so that what is alike behind a value is shared.

    Attributes:
        edges, accept: of each state.
        note: takes what is to be told of the tool at hand, if anything listens.
    """

    def __init__(self) -> None:
        self.edges: list[tuple[Edge, ...]] = []
        self.accept: list[bool] = []
        self.note: Callable[[str, str], None] | None = None
        self.notes: dict[str, None] = {}
        self._ids: dict[tuple[tuple[Edge, ...], bool], int] = {}
        self._values: dict[tuple[int, int], int] = {}
        self._characters: dict[int, list[Edge]] = {}
        self._fragments: dict[int, Fragment | None] = {}
        self._numbers: dict[Range, Fragment | None] = {}
        self._kept: list[Shape] = []

    def state(self, edges: Iterable[Edge], accept: bool = False) -> int:
        """The state with these edges; those to nowhere are left out, and without any it is dead."""
        row = joined(edge for edge in edges if edge[2] != DEAD)
        if not row and not accept:
            return DEAD
        if (row, accept) not in self._ids:
            self._ids[row, accept] = self._new(row, accept)
        return self._ids[row, accept]

    def value(self, shape: Shape, follow: int) -> int:
        """Where a value begins that ``follow`` comes after, or DEAD."""
        if follow == DEAD:
            return DEAD
        key = (id(shape), follow)
        if key not in self._values:
            self._kept.append(shape)  # so that its id stays its own
            self._values[key] = self._value(shape, follow)
        return self._values[key]

    def fragment(self, shape: Shape) -> Fragment | None:
        """A shape by itself; None where it admits nothing."""
        if id(shape) not in self._fragments:
            self._kept.append(shape)
            alone = States()
            alone.note, alone._numbers = self.note, self._numbers
            alone._fragments, alone._kept = self._fragments, self._kept
            start = alone.value(shape, alone.state([], True))
            self._fragments[id(shape)] = None if start == DEAD else _from(alone, start)
        return self._fragments[id(shape)]

    def literal(self, data: bytes, follow: int) -> int:
        """Where some bytes begin."""
        for byte in reversed(data):
            follow = self.state([(byte, byte, follow)])
        return follow

    def trie(self, entries: list[tuple[bytes, int]]) -> int:
        """Where one of several texts begins, each with what comes after it. None is there twice."""
        entries = [entry for entry in entries if entry[1] != DEAD]
        if len(entries) == 1:
            return self.literal(*entries[0])
        edges: list[Edge] = []
        accept = False
        groups: dict[int, list[tuple[bytes, int]]] = {}
        for data, follow in entries:
            if data:
                groups.setdefault(data[0], []).append((data[1:], follow))
            else:
                edges += self.edges[follow]
                accept = accept or self.accept[follow]
        return self.state([*edges, *((byte, byte, self.trie(group)) for byte, group in groups.items())], accept)

    def array(self, item: Callable[[int], int], least: int, most: int | None, follow: int) -> int:
        """Where a list begins; ``item`` makes one onto what follows it."""
        if most is not None and most < least:
            return DEAD
        close = (93, 93, follow)
        if most is None:
            # After the last item that is counted, items come round and round.
            again = self._new((), False)
            after = self.state([(44, 44, again), close])
            begin = item(after)
            self.edges[again] = () if begin == DEAD else self.edges[begin]
            if begin == DEAD:
                after = self.state([close])
            count = max(least, 1)
        else:
            after, count = self.state([close]), most
        for n in range(count - 1, 0, -1):
            after = self.state([(44, 44, item(after)), *([close] if n >= least else [])])
        first = item(after) if count else DEAD
        opened = list(self.edges[first]) if first != DEAD else []
        return self.state([(91, 91, self.state([*opened, *([close] if least == 0 else [])]))])

    def _new(self, row: tuple[Edge, ...], accept: bool) -> int:
        if len(self.edges) >= MAX_STATES:
            raise TooManyStates
        self.edges.append(row)
        self.accept.append(accept)
        return len(self.edges) - 1

    def _value(self, shape: Shape, follow: int) -> int:
        match shape:
            case Text():
                return self._text(shape.least, shape.most, follow)
            case Number():
                if shape.within not in self._numbers:
                    self._numbers[shape.within] = number(shape.within)
                return self._attach(self._numbers[shape.within], follow)
            case Choice():
                rest = None if shape.rest is None else self.fragment(shape.rest)
                if shape.rest is not None and rest is None:
                    return DEAD
                texts = dict.fromkeys(compact(value).encode() for value in shape.values
                                      if rest is None or rest.accepts(_plain(value)))
                return self.trie([(text, follow) for text in texts])
            case Array():
                return self.array(lambda after: self.value(shape.items, after), shape.least, shape.most, follow)
            case Either():
                return self._either(shape, follow)
            case Record():
                if shape.others is not None:
                    return self._map(shape.others, follow)
                return self._record(shape, follow)

    def _either(self, shape: Either, follow: int) -> int:
        fragments = [f for f in map(self.fragment, shape.shapes) if f is not None]
        if not fragments:
            return DEAD
        firsts = sorted((lo, hi) for fragment in fragments for lo, hi, _ in fragment.edges[0])
        if all(a[1] < b[0] for a, b in itertools.pairwise(firsts)):
            # The first byte tells them apart, so each can go on by itself.
            starts = [self.value(part, follow) for part in shape.shapes]
            return self.state(edge for start in starts if start != DEAD for edge in self.edges[start])
        return self._attach(combined(fragments, shape.exactly_one), follow)

    def _attach(self, fragment: Fragment | None, follow: int) -> int:
        """A fragment's states anew, going on behind it; what follows begins with no byte that it could go on with."""
        if fragment is None:
            return DEAD
        rows = fragment.edges
        final = [s for s in range(len(rows)) if s in fragment.accept and not rows[s]]
        ids = {s: follow if s in final else self._new((), False) for s in range(len(rows))}
        for s, row in enumerate(rows):
            if s not in final:
                edges = [(lo, hi, ids[target]) for lo, hi, target in row]
                self.edges[ids[s]] = joined([*edges, *(self.edges[follow] if s in fragment.accept else ())])
                self.accept[ids[s]] = s in fragment.accept and self.accept[follow]
        return ids[0]

    def _text(self, least: int, most: int | None, follow: int) -> int:
        if follow == DEAD or (most is not None and most < least):
            return DEAD
        close = (34, 34, follow)
        if most is None:
            inside = self._new((), False)
            self.edges[inside] = joined([close, *self._character(inside)])
            count = least
        else:
            inside, count = self.state([close]), most
        for n in range(count - 1, -1, -1):
            inside = self.state([*self._character(inside), *([close] if n >= least else [])])
        return self.state([(34, 34, inside)])

    def _character(self, follow: int) -> list[Edge]:
        """Edges of one character of a string, as UTF-8 or escaped; a pair of surrogates is one."""
        if follow not in self._characters:
            one = self.state([(0x80, 0xBF, follow)])
            two = self.state([(0x80, 0xBF, one)])
            three = self.state([(0x80, 0xBF, two)])
            hexes = [follow]
            for _ in range(3):
                hexes.append(self.state((lo, hi, hexes[-1]) for lo, hi in _HEX))
            low = self.state((lo, hi, hexes[2]) for lo, hi in ((67, 70), (99, 102)))
            low = self.literal(b"\\u", self.state((lo, hi, low) for lo, hi in _D))
            for _ in range(2):
                low = self.state((lo, hi, low) for lo, hi in _HEX)
            # \uD800 to \uDBFF is the first half of a pair, \uDC00 to \uDFFF a second one without its first.
            halves = self.state([(48, 55, hexes[2]), *((lo, hi, low) for lo, hi in ((56, 57), (65, 66), (97, 98)))])
            code = self.state([*((lo, hi, hexes[3]) for lo, hi in _HEX_BUT_D), *((lo, hi, halves) for lo, hi in _D)])
            escaped = self.state([*((byte, byte, follow) for byte in b'"\\/bfnrt'), (117, 117, code)])
            self._characters[follow] = [
                (0x20, 0x21, follow), (0x23, 0x5B, follow), (0x5C, 0x5C, escaped), (0x5D, 0x7F, follow),
                (0xC2, 0xDF, one), (0xE0, 0xE0, self.state([(0xA0, 0xBF, one)])), (0xE1, 0xEC, two),
                (0xED, 0xED, self.state([(0x80, 0x9F, one)])), (0xEE, 0xEF, two),
                (0xF0, 0xF0, self.state([(0x90, 0xBF, two)])), (0xF1, 0xF3, three),
                (0xF4, 0xF4, self.state([(0x80, 0x8F, two)])),
            ]  # fmt: skip
        return self._characters[follow]

    def _map(self, values: Shape, follow: int) -> int:
        """An object of any keys; it is a list in braces of keys with values."""
        again = self._new((), False)
        after = self.state([(44, 44, again), (125, 125, follow)])
        entry = self._text(0, None, self.literal(b":", self.value(values, after)))
        self.edges[again] = self.edges[entry] if entry != DEAD else ()
        opened = list(self.edges[entry]) if entry != DEAD else []
        return self.state([(123, 123, self.state([*opened, (125, 125, follow)]))])

    def _record(self, shape: Record, follow: int) -> int:
        named = [(compact(key).encode() + b":", value, needed) for key, value, needed in shape.keys]
        keys = [entry for entry in named if self.fragment(entry[1]) is not None or entry[2]]
        if len(keys) < len(named) and self.note:
            self.note(shape.where, "an optional key that no value is valid for is never given")
        close = (125, 125, follow)
        opened = self._any_order(keys, close) if self._orders(shape, keys) else self._in_order(keys, close)
        return self.state([(123, 123, self.state(opened))])

    def _orders(self, shape: Record, keys: list[tuple[bytes, Shape, bool]]) -> bool:
        """Whether keys may come in any order: half of all subsets have a state for each byte of each key's value."""
        sizes = (len(key) + (len(f.edges) if (f := self.fragment(value)) else 0) for key, value, _ in keys)
        fits = len(keys) < 2 or sum(sizes) << (len(keys) - 1) <= ANY_ORDER_STATES
        if not fits and self.note:
            self.note(shape.where, "its keys are admitted in the order of the schema only")
        return fits

    def _any_order(self, keys: list[tuple[bytes, Shape, bool]], close: Edge) -> list[Edge]:
        """What comes behind the brace; a state knows the set of keys that were given."""
        needed = sum(1 << i for i, key in enumerate(keys) if key[2])
        memo: dict[int, int] = {}

        def next_key(given: int) -> int:
            return self.trie([(key, self.value(value, after(given | 1 << i)))
                              for i, (key, value, _) in enumerate(keys) if not given >> i & 1])

        def after(given: int) -> int:
            if given not in memo:
                whole = [close] if given & needed == needed else []
                memo[given] = self.state([(44, 44, next_key(given)), *whole])
            return memo[given]

        first = next_key(0)
        return [*(self.edges[first] if first != DEAD else ()), *([] if needed else [close])]

    def _in_order(self, keys: list[tuple[bytes, Shape, bool]], close: Edge) -> list[Edge]:
        """The same with keys in the schema's order: a state knows the last one that was given."""
        after, starts = [DEAD] * len(keys), [DEAD] * len(keys)

        def next_keys(i: int) -> tuple[int, bool]:
            """Where the keys from i on begin, and whether all of them may be left out."""
            stop = next((j for j in range(i, len(keys)) if keys[j][2]), len(keys))
            return self.trie([(keys[j][0], starts[j]) for j in range(i, min(stop + 1, len(keys)))]), stop == len(keys)

        for i in range(len(keys) - 1, -1, -1):
            begin, free = next_keys(i + 1)
            after[i] = self.state([(44, 44, begin), *([close] if free else [])])
            starts[i] = self.value(keys[i][1], after[i])
        begin, free = next_keys(0)
        return [*(self.edges[begin] if begin != DEAD else ()), *([close] if free else [])]


def _plain(value: object) -> bytes:
    """A value as it is judged: of numbers 1e-07 is 0.0000001, and 2.0 is 2."""
    if not isinstance(value, float):
        return compact(value).encode()
    text = format(Decimal(repr(value)), "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text).encode()


def _from(states: States, start: int) -> Fragment:
    """The part of states under construction that one leads to."""
    ids = {start: 0}
    order = [start]
    rows: list[list[Edge]] = []
    for state in order:
        rows.append([])
        for lo, hi, target in states.edges[state]:
            if target not in ids:
                ids[target] = len(order)
                order.append(target)
            rows[-1].append((lo, hi, ids[target]))
    return Fragment(tuple(map(tuple, rows)), frozenset(i for i, s in enumerate(order) if states.accept[s]))
