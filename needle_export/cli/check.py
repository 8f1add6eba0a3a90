"""needle-export check"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from needle_export.cli.failures import describe
from needle_export.cli.output import emit, page_width, save, use_color
from needle_export.cli.shared import artifact_folder, define, json_option, new_file
from needle_export.report.render import GATE_STYLES, GateStyle

if TYPE_CHECKING:
    from needle_export.config.device import Device
    from needle_export.report.gate import Entry


@define("check", "check dist/ --budgets budgets.toml", "check dist/int4 dist-tflite --budgets budgets.toml "
        "--baseline main/dist", "check dist/ --budgets budgets.toml --format github --junit budgets.xml "
        "--markdown comment.md", "check dist/ --device pixel-8",
        "check dist/ --budgets budgets.toml --json")
@click.argument("reports", type=artifact_folder, metavar="REPORT...", nargs=-1, required=True)
@click.option("--budgets", "files", type=Path, multiple=True, metavar="FILE",
              help="TOML file with [[budget]] entries; may be given several times.")
@click.option("--baseline", "baselines", type=artifact_folder, multiple=True, metavar="REPORT",
              help="What relative budgets refer to; may be given several times.")
@click.option("--device", metavar="ID|FILE",
              help="Check for this device: without --budgets its own; entries for others are skipped.")
@click.option("--format", "style", type=click.Choice(GATE_STYLES), default="text", show_default=True,
              help="How to write it; github is annotations beside the lines of the budgets.")
@click.option("--out", type=new_file, metavar="FILE", help="File to write instead of stdout.")
@click.option("--markdown", type=new_file, metavar="FILE", help="File for the same as Markdown, for a comment.")
@click.option("--junit", type=new_file, metavar="FILE", help="File for the same as JUnit XML.")
@json_option
@click.pass_context
def command(ctx: click.Context, reports: tuple[Path, ...], files: tuple[Path, ...], baselines: tuple[Path, ...],
            device: str | None, style: GateStyle, out: Path | None, markdown: Path | None, junit: Path | None,
            as_json: bool) -> None:
    """Hold published builds against budgets.

    Each REPORT is a folder that a build has written, or a report alone. Nothing is run. Ends with 0 when every budget
    is kept, with 1 when one is exceeded or its figure can't be told, and with 2 when one is about no artifact that
    there is. --json is --format json.
    """
    from needle_export.report.comparison import read
    from needle_export.report.gate import check, recorded
    from needle_export.report.gate_view import render_gate

    chosen = None if device is None else _device(device)
    found = [(str(path), read(path)) for path in reports]
    entries = _entries(files, chosen) or [entry for name, report in found for entry in recorded(name, report)]
    gate = check(entries, found, [(str(path), read(path)) for path in baselines], chosen.id if chosen else None)
    # Every file first: whoever reads stdout may go at any time.
    if markdown is not None:
        save(markdown, render_gate(gate, "markdown"))
    if junit is not None:
        from needle_export.report.junit import render_junit

        save(junit, render_junit(gate))
    text = render_gate(gate, "json" if as_json else style, color=out is None and use_color(), width=page_width())
    if out is None:
        emit(text)
    else:
        save(out, text)
    failure = gate.failure()
    if failure is not None:
        # Not raised: with --json, stdout has the verdicts already.
        click.echo(f"error: {describe(failure).sentence}", err=True)
        ctx.exit(failure.exit_code)


def _device(name: str) -> Device:
    from needle_export.config.device import load_device

    return load_device(name)


def _entries(files: tuple[Path, ...], device: Device | None) -> list[Entry]:
    """The budgets to check, in order, with their places: of files, or else of the device."""
    from needle_export.config.budget import entry_lines, parse_budgets
    from needle_export.report.gate import Entry

    if not files and device is not None:
        return [Entry(budget, device.id, in_file=False) for budget in device.budgets]
    entries = []
    for path in files:
        budgets = parse_budgets(path)
        lines = entry_lines(path, len(budgets))
        entries += [Entry(budget, str(path), line) for budget, line in zip(budgets, lines, strict=True)]
    return entries
