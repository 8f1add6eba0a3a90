"""The figures that an artifact can have: names, titles and units, for whoever shows, compares or bounds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "ms", "tokens/s", "nats", "share", "logit"]


@dataclass(frozen=True)
class Metric:
    """A figure that an artifact may have.

    Attributes:
        name: of the figure, a key in JSON.
        title: above a column.
        unit: of its value.
        more_is_better: whether a greater value is the better one.
        meaning: what is counted, and under which conditions.
    """

    name: str
    title: str
    unit: Unit
    more_is_better: bool
    meaning: str


METRICS = (
    Metric("size", "size", "bytes", False, "all files of the artifact"),
    Metric("compressed", "zipped", "bytes", False,
           "all files of the artifact as a zip archive packs them (deflate, level 6), which a download costs"),
    Metric("state", "state", "bytes", False, "what a session keeps between steps, at the built context"),
    Metric("load_rss", "load RSS", "bytes", False,
           "resident memory of a fresh process that has loaded what decoding needs and run one step, runtime included"),
    Metric("load_rss_all", "with prefill", "bytes", False,
           "load RSS with what reads prompts loaded too, after a prompt"),
    Metric("runtime_rss", "runtime alone", "bytes", False,
           "the part of load_rss that was there before anything was loaded: interpreter and runtime"),
    Metric("decode", "decode", "ms", False, "one decode step, median"),
    Metric("prefill", "prefill", "tokens/s", True, "reading a prompt, at the median"),
    Metric("kl", "KL", "nats", False, "float to scheme: mean divergence of the predictions, on the reference"),
    Metric("token_agreement", "tokens equal", "share", True, "float to scheme: equal predictions, on the reference"),
    Metric("cache_kl", "cache KL", "nats", False,
           "scheme with float caches to scheme with its own: mean divergence of the predictions, on the reference"),
    Metric("artifact_error", "export error", "logit", False,
           "scheme to artifact: largest difference of a logit from the reference of the same numbers"),
    Metric("artifact_kl", "export KL", "nats", False,
           "scheme to artifact: mean divergence of the predictions from the reference of the same numbers"),
    Metric("exact_call_accuracy", "exact calls", "share", True,
           "queries answered with exactly the right calls, in order, arguments equal; within the grammar"),
    Metric("nothing_precision", "nothing: precision", "share", True,
           "of answers that call nothing, those to queries that call for nothing"),
    Metric("nothing_recall", "nothing: recall", "share", True,
           "of queries that call for nothing, those answered so"),
    Metric("reference_agreement", "as reference", "share", True,
           "float reference to artifact: queries that both answer with the same calls"),
)
"""Every figure, in the order in which tables show them."""

BY_NAME = {metric.name: metric for metric in METRICS}

MEMORY = ("load_rss", "load_rss_all", "runtime_rss")
"""Figures of processes that were measured."""

ANSWERS = ("exact_call_accuracy", "nothing_precision", "nothing_recall", "reference_agreement")
"""Figures of answers to a file of queries, which ``needle-export evaluate`` counts."""

LATENCIES = ("decode", "prefill")
"""Figures that a device has, and not the artifact alone: they can be estimated or imported for one."""
