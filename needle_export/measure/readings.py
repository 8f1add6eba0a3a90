"""Times that other programs measured, read from what they print: benchmark_model, onnxruntime_perf_test, or a CSV.

docs/latency.md describes the formats and the columns.
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass

from needle_export.errors import BadInput

FORMATS = ("benchmark_model", "onnxruntime_perf_test", "csv")

COLUMNS = ("phase", "tokens", "ms", "statistic", "runs", "ms_min", "ms_max", "ms_std", "first_ms", "load_ms",
           "threads", "device", "date")  # fmt: skip
"""Of a CSV; ``phase`` and ``ms`` must be there."""

_MAX_BYTES, _MAX_ROWS = 4 << 20, 1000

_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)"

#: The summary of benchmark_model, in microseconds; older releases have no "First inference".
_TIMINGS = re.compile(
    rf"Inference timings in us: Init: {_NUMBER},(?: First inference: {_NUMBER},)? Warmup \(avg\): {_NUMBER},"
    rf" Inference \(avg\): {_NUMBER}"
)
_OLD_TIMINGS = re.compile(rf"Average inference timings in us: Warmup: {_NUMBER}, Init: {_NUMBER}, [a-z ]+: {_NUMBER}")
_RUNS = re.compile(
    rf"count=(\d+) (?:first={_NUMBER} curr={_NUMBER} min={_NUMBER} max={_NUMBER} avg={_NUMBER} std={_NUMBER}"
    rf"|curr={_NUMBER})"
)
_THREADS = re.compile(r"(?:Num threads: \[(\d+)\]|#threads used for CPU inference: \[(\d+)\])")

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Reading:
    """What a file says of one phase; times in milliseconds, None where it doesn't tell."""

    ms: float
    statistic: str
    phase: str | None = None
    tokens: int | None = None
    runs: int | None = None
    ms_min: float | None = None
    ms_max: float | None = None
    ms_std: float | None = None
    first_ms: float | None = None
    load_ms: float | None = None
    threads: int | None = None
    device: str | None = None
    date: str | None = None


def read(data: bytes, where: str, format: str | None = None) -> tuple[str, list[Reading]]:
    """What a file holds, and in which format.

    Args:
        where: the file, for messages.
        format: one of :data:`FORMATS`; None recognises it.

    Raises:
        BadInput: it isn't text of such a program, or it is damaged.
    """
    if len(data) > _MAX_BYTES:
        raise BadInput("this is far too large for the output of a benchmark", where=where)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput("this isn't UTF-8 text", where=where, fix="save the program's output as text") from None
    format = format or _recognised(text)
    if format is None:
        raise BadInput("this is neither the output of benchmark_model or onnxruntime_perf_test nor a CSV with a phase"
                       " and an ms column", where=where, fix="see docs/latency.md, or name the --format")
    readers = {"benchmark_model": _benchmark_model, "onnxruntime_perf_test": _perf_test, "csv": _csv}
    return format, readers[format](text, where)


def _recognised(text: str) -> str | None:
    if "Inference timings in us" in text or "nference timings in us: Warmup" in text:
        return "benchmark_model"
    if re.search(r"Average (?:inference )?time cost", text):
        return "onnxruntime_perf_test"
    head = {name.strip() for name in text.partition("\n")[0].split(",")}
    return "csv" if {"phase", "ms"} <= head else None


def _benchmark_model(text: str, where: str) -> list[Reading]:
    new, old = _TIMINGS.search(text), _OLD_TIMINGS.search(text)
    if new is not None:
        load, first, _, mean = new.groups()
    elif old is not None:
        (_, load, mean), first = old.groups(), None
    else:
        raise BadInput("there is no line of timings in it, as benchmark_model prints at its end", where=where,
                       fix="run it to the end, and keep all that it prints")
    _once(text, new.re if new else _OLD_TIMINGS, where)
    # The last block is that of the runs behind the warm-up; a single number where all runs took the same.
    blocks = _RUNS.findall(text[: (new or old).start()])  # type: ignore[union-attr]  # one of them was found
    runs, _, _, low, high, _, deviation, same = blocks[-1] if blocks else ("", *[""] * 7)
    threads = _THREADS.findall(text)
    count = next((one or two for one, two in reversed(threads)), None)

    def ms(value: str | None) -> float | None:
        return float(value) / 1e3 if value else None

    return [Reading(
        ms=_positive(float(mean) / 1e3, where), statistic="mean", runs=int(runs) if runs else None,
        ms_min=ms(low or same), ms_max=ms(high or same), ms_std=ms(deviation), first_ms=ms(first), load_ms=ms(load),
        threads=int(count) if count and int(count) > 0 else None,
    )]  # fmt: skip


def _perf_test(text: str, where: str) -> list[Reading]:
    mean = re.search(rf"Average (?:inference )?time cost: ?{_NUMBER} ms", text)
    if mean is None:
        raise BadInput("there is no average time in milliseconds in it, as onnxruntime_perf_test prints at its end",
                       where=where, fix="run it to the end, and keep all that it prints")
    _once(text, mean.re, where)

    def seconds(pattern: str) -> float | None:
        found = re.search(pattern + rf" ?{_NUMBER} (?:s|sec)\b", text)
        return None if found is None else float(found[1]) * 1e3

    runs = re.search(r"Total (?:inference requests|iterations): ?(\d+)", text)
    threads = re.search(r"[Ss]etting intra_op_num_threads to (\d+)", text)
    median = seconds("P50 Latency(?: is|:)")
    return [Reading(
        ms=_positive(median if median is not None else float(mean[1]), where),
        statistic="mean" if median is None else "median",
        runs=int(runs[1]) if runs else None, ms_min=seconds("Min Latency(?: is|:)"),
        ms_max=seconds("Max Latency(?: is|:)"), first_ms=seconds("First inference time cost:"),
        load_ms=seconds("Session creation time cost:"), threads=int(threads[1]) or None if threads else None,
    )]  # fmt: skip


def _once(text: str, pattern: re.Pattern[str], where: str) -> None:
    if len(pattern.findall(text)) > 1:
        raise BadInput("the output of several runs is in it", where=where, fix="keep one run in a file")


def _csv(text: str, where: str) -> list[Reading]:
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
    found = []
    try:
        names = [name.strip() for name in rows.fieldnames or ()]
        unknown = [name for name in names if name not in COLUMNS]
        if unknown or len(set(names)) != len(names) or not {"phase", "ms"} <= set(names):
            wanted = "the columns phase and ms must be there, once"
            what = f"there is no column {unknown[0][:60]!r}" if unknown else wanted
            raise BadInput(what, where=f"{where}: line 1", fix=f"columns may be {', '.join(COLUMNS)}")
        rows.fieldnames = names
        for row in rows:
            found.append(_row(row, f"{where}: line {rows.line_num}"))
            if len(found) > _MAX_ROWS:
                raise BadInput(f"there are more than {_MAX_ROWS} rows in it", where=where)
    except csv.Error as error:
        raise BadInput(f"this isn't a CSV ({error})", where=where) from None
    if not found:
        raise BadInput("there is no row in it", where=where)
    return found


def _row(row: dict[str | None, str | None], where: str) -> Reading:
    if None in row or any(value is None for value in row.values()):
        raise BadInput("the row has more or fewer cells than there are columns", where=where)
    cells = {str(key): (value or "").strip() for key, value in row.items()}

    def number(name: str) -> float | None:
        if not cells.get(name):
            return None
        try:
            value = float(cells[name])
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise BadInput(f"{cells[name][:40]!r} isn't a number from 0 on", where=f"{where}, {name}")
        return value

    def whole(name: str) -> int | None:
        value = number(name)
        if value is not None and (value != int(value) or value < 1 or value > 1e9):
            raise BadInput(f"{cells[name][:40]!r} isn't a whole number above 0", where=f"{where}, {name}")
        return None if value is None else int(value)

    phase, statistic, date = cells["phase"], cells.get("statistic") or "mean", cells.get("date") or None
    if phase not in ("decode", "prefill"):
        raise BadInput(f"{phase[:40]!r} is neither decode nor prefill", where=f"{where}, phase")
    if statistic not in ("mean", "median"):
        raise BadInput(f"{statistic[:40]!r} is neither mean nor median", where=f"{where}, statistic")
    if date is not None and not _DAY.fullmatch(date):
        raise BadInput(f"{date[:40]!r} isn't a date such as 2026-11-30", where=f"{where}, date")
    tokens = whole("tokens")
    if (tokens is None) == (phase == "prefill") or (phase == "decode" and tokens not in (None, 1)):
        raise BadInput("a prefill says of how many tokens, a decode step is of one", where=f"{where}, tokens")
    return Reading(
        ms=_positive(number("ms") or 0.0, where), statistic=statistic, phase=phase, tokens=tokens or 1,
        runs=whole("runs"), ms_min=number("ms_min"), ms_max=number("ms_max"), ms_std=number("ms_std"),
        first_ms=number("first_ms"), load_ms=number("load_ms"), threads=whole("threads"),
        device=cells.get("device") or None, date=date,
    )  # fmt: skip


def _positive(ms: float, where: str) -> float:
    if not 0 < ms < math.inf:
        raise BadInput(f"{ms:g} ms is no time that a model takes", where=where)
    return ms
