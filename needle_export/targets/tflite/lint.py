"""What stands between a graph and a GPU delegate, by public sources alone. A lint, never a result.

Nothing here ran on a GPU. The rules were read in LiteRT's sources at commit f67457790c9c and in its issue
tracker, and are meant for the open GPU delegate of TFLite (an OpenCL, OpenGL or Metal backend of the
interpreter). The delegate of ``CompiledModel`` is closed; what its issues report is named by the issue. No
finding doesn't mean that a graph runs there, nor that it runs right.
"""

from __future__ import annotations

from dataclasses import dataclass

from needle_export.targets.tflite.analysis import Graph, Op, between
from needle_export.targets.tflite.gpu_rules import BUILDER, ISSUE, PARSED, RULES, UNPARSED, View


@dataclass(frozen=True)
class Finding:
    """A rule that ops of one kind break.

    Attributes:
        rule: its name.
        op: the kind, or empty for the graph as a whole.
        count: ops that break it.
        why: what is reported to happen.
        source: the public document or issue that says so.
    """

    rule: str
    op: str
    count: int
    why: str
    source: str


def lint(graph: Graph) -> tuple[Finding, ...]:
    """Rules that a graph breaks: by kind of op as they come in the graph, then those of the whole graph."""
    view = View(graph)
    found: dict[tuple[str, str], tuple[int, str, str]] = {}
    refused = set()
    for at, op in enumerate(graph.ops):
        if op.outputs and op.outputs[0] in view.half:
            continue
        for rule, why, source, refuses in _broken(view, op):
            count = found.get((rule, op.name), (0, why, source))[0]
            found[rule, op.name] = count + 1, why, source
            if refuses:
                refused.add(at)
    findings = [Finding(rule, op, *rest) for (rule, op), rest in found.items()]
    unsized = sum(-1 in tensor.shape for tensor in graph.tensors)
    if unsized:
        findings.append(
            Finding(
                "dynamic shapes",
                "",
                unsized,
                "a graph with tensors whose sizes are known only at run time is refused as a whole",
                "google-ai-edge/LiteRT: tflite/core/subgraph.cc; tensorflow/tensorflow: issue 38036",
            )
        )
    cutters = between(graph.ops, set(range(len(graph.ops))) - refused)
    if cutters:
        findings.append(
            Finding(
                "partitions",
                "",
                len(cutters),
                "refused ops stand between others; by default the delegate takes the largest partition alone,"
                " and CompiledModel without a CPU fallback refuses the whole model",
                f"google-ai-edge/LiteRT: tflite/delegates/gpu/delegate_options.h; {ISSUE}9191",
            )
        )
    return tuple(findings)


def _broken(view: View, op: Op) -> list[tuple[str, str, str, bool]]:
    """Rules that an op breaks: name, reason, source, and whether the op stays on the CPU for it."""
    if op.name not in PARSED:
        why, source = UNPARSED.get(op.name, ("the delegate has no parser for the op", f"{BUILDER}, NewOperationParser"))
        return [("unsupported op", why, source, True)]
    most = PARSED[op.name]
    broken = []
    if most and op.version > most:
        why = f"the delegate takes versions of the op up to {most}"
        broken.append(("op version", why, BUILDER, True))
    return broken + [(r.name, r.why, r.source, r.refuses) for r in RULES if r.breaks(view, op)]
