"""needle-export train-demo"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit
from needle_export.cli.shared import define, json_option, progress_of
from needle_export.config.options import MAX_SEED


@define("train-demo", "train-demo --out build/train-demo", "train-demo --out quick/ --steps 200 --json")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, metavar="DIR",
              help="Where the model goes; an interrupted run goes on from there.")
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=7, show_default=True, metavar="S",
              help="Of everything that is drawn.")
@click.option("--steps", type=click.IntRange(min=1), metavar="N",
              help="Training steps; fewer make a worse model sooner.")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, metavar="N",
              help="Of torch. Sums depend on their order: another number gives another model.")
@json_option
def command(out: Path, seed: int, steps: int | None, threads: int, as_json: bool) -> None:
    """Train the demo model from nothing.

    It is the small model that ships with needle-export: this makes its tokenizer, its weights, its
    held-out requests and its model card, and says how many of these requests it answers exactly.
    Interrupt it whenever you like; the same command goes on.
    """
    import dataclasses

    from needle_export.demo.make import make
    from needle_export.demo.training import Schedule
    from needle_export.report.codec import to_json

    schedule = Schedule() if steps is None else Schedule(steps=steps, warmup=min(Schedule.warmup, max(1, steps // 20)))
    with progress_of(silent=as_json) as progress:
        made = make(out, seed, schedule, progress, threads=threads)
    if as_json:
        shares = {str(depth): share for depth, share in made.accuracy.items()}
        emit(to_json(dataclasses.asdict(made) | {"folder": str(out), "accuracy": shares}))
        return
    lines = [f"{out}: {made.parameters:,} parameters, trained in {made.seconds / 60:.0f} min with {threads} threads",
             *(f"  {name}  {size:,} bytes" for name, size in made.files.items()),
             "exact answers to held-out requests, by layers:",
             *(f"  {depth}  {100 * share:.1f} %" for depth, share in made.accuracy.items()),
             f"confidence head: right above wrong in {100 * made.auc:.1f} % of pairs"]
    emit("\n".join(lines) + "\n")
