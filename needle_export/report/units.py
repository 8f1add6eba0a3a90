"""Numbers as people read them. Sizes are decimal: 1 MB is 1,000,000 bytes, as stores and phones count."""

from __future__ import annotations


def size(count: int) -> str:
    """Bytes in the largest fitting unit, three or four digits: 532 B, 35.3 kB, 242.0 MB."""
    magnitude = abs(count)
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if magnitude >= factor * 0.9995:
            value = count / factor
            return f"{value:,.2f} {unit}" if abs(value) < 10 else f"{value:,.1f} {unit}"
    return f"{count} B"


def signed_size(count: int) -> str:
    """A difference in bytes, always with its sign; zero has none."""
    return "0 B" if not count else f"{'+' if count > 0 else '-'}{size(abs(count))}"


def whole(count: int) -> str:
    """A count with thousands separated."""
    return f"{count:,}"


def percent(part: int, total: int) -> str:
    """A share with one decimal; 0 of nothing is 0 %."""
    return f"{100 * part / total:.1f} %" if total else "0.0 %"


def milliseconds(value: float) -> str:
    """A time to three significant digits at least: 0.412 ms, 4.21 ms, 42.1 ms, 1.24 s."""
    if value >= 1000:
        return f"{value / 1000:,.2f} s"
    digits = 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f} ms"


def rate(value: float) -> str:
    """Tokens per second, without decimals that would be noise."""
    return f"{value:,.0f} tokens/s" if value >= 10 else f"{value:.1f} tokens/s"


def small(value: float) -> str:
    """An error: 0, or two significant digits in the shortest form."""
    return f"{value:.2g}"


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 file, 2 files."""
    return f"{whole(count)} {noun}" if count == 1 else f"{whole(count)} {noun}s"


def threads(count: int) -> str:
    """Of a runtime; 0 where it chooses."""
    return plural(count, "thread") if count else "threads as the runtime chooses"


def bar(part: int, total: int, width: int) -> str:
    """A horizontal bar of at most ``width`` cells; anything above nothing shows at least a sliver."""
    if not total or not part:
        return ""
    eighths = max(1, round(8 * width * part / total))
    full, rest = divmod(eighths, 8)
    return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
