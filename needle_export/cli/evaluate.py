"""needle-export evaluate"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit, page_width, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, progress_of


@define("evaluate", "evaluate dist/ --data heldout.jsonl", "evaluate build/demo/* --checkpoint demo --limit 100",
        "evaluate dist/fp16 dist/int8 dist/int4 --data heldout.jsonl --checkpoint needle3.safetensors",
        "evaluate dist/ --data queries.jsonl --tools tools.json --limit 100 --unconstrained --json")
@click.argument("folders", type=artifact_folder, metavar="DIR...", nargs=-1, required=True)
@click.option("--data", type=click.Path(path_type=Path), metavar="FILE",
              help='Queries with their right calls, one JSON object a line: {"query": "...", "tools": [...], '
                   '"answers": [{"name": "...", "arguments": {...}}]}, or a chat of one turn. Builds of the model that '
                   'comes along have its held-out ones if left out; any other needs it.')
@click.option("--tools", type=click.Path(path_type=Path), metavar="FILE",
              help="Tools of lines that have none: a JSON list of schemas. Builds of the model that comes along have "
                   "its own if left out.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N",
              help="Ask N of the queries: a sample, the same one of the same file.")
@click.option("--constrained/--unconstrained", default=True, show_default=True,
              help="Whether a grammar made of the tools admits valid calls only.")
@click.option("--checkpoint", metavar="CHECKPOINT",
              help="What the builds were made from: their answers are compared with those of the float32 reference.")
@click.option("--lora", metavar="FILE", help="The adapter that the builds merged, for the reference.")
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE",
              help="Tokenizer of the builds; the one beside each when left out.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
              help="Longest answer; one that is cut there counts as wrong.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Threads of the runtime and of the reference.")
@json_option
def command(folders: tuple[Path, ...], data: Path | None, tools: Path | None, limit: int | None, constrained: bool,
            checkpoint: str | None, lora: str | None, tokenizer: Path | None, max_new_tokens: int, threads: int,
            as_json: bool) -> None:
    """Count right answers of published builds.

    Each DIR is a folder that a build has written. Its artifact answers every query in its own runtime (a Core ML build
    in our evaluator), and what is counted goes into its report, where report, compare, check and diff find it.
    """
    from needle_export.evaluation import EvaluationOptions, evaluate
    from needle_export.report.evaluated_view import render_evaluated

    options = EvaluationOptions(data, tools, limit, constrained, max_new_tokens, checkpoint, lora, tokenizer, threads)
    with progress_of(silent=as_json) as progress:
        found = evaluate(folders, options, progress)
    emit(render_evaluated(found, as_json=as_json, color=use_color(), width=page_width()))
