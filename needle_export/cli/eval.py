"""needle-export eval"""

from __future__ import annotations

from pathlib import Path

import click

from needle_export.cli.output import emit
from needle_export.cli.shared import artifact_folder, define, json_option, new_file, progress_of


@define("eval", "eval dist/ --tokens ids.npy --out logits.npy")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.option("--tokens", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="Token ids: a .npy file of whole numbers, [T], at most as many as the context.")
@click.option("--out", type=new_file, required=True, metavar="FILE",
              help="Where to write the logits: a .npy file, float32 [T, vocabulary].")
@json_option
def command(folder: Path, tokens: Path, out: Path, as_json: bool) -> None:
    """Write the logits of a published build.

    DIR is a folder that a build has written. The artifact's own prefill and decode compute the logits:
    row t is the answer to tokens 0 to t.
    """
    from needle_export import pipeline
    from needle_export.bundle.arrays import read_tokens, write_array
    from needle_export.report.codec import to_json
    from needle_export.report.schema import load_report

    ids = read_tokens(tokens, load_report(folder))
    with progress_of(silent=as_json) as progress:
        logits = pipeline.logits(folder, ids, progress)
    write_array(out, logits)
    steps, words = logits.shape
    emit(to_json({"path": str(out), "shape": [steps, words]}) if as_json else
         f"{out}: logits [{steps}, {words}]\n")
