"""What pages say about commands, options, exit codes and targets is what there is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from needle_export import __version__
from needle_export.cli.app import COMMANDS, program
from needle_export.cli.failures import EXIT_CODES
from needle_export.config.options import SCHEMES, TARGETS
from needle_export.graph.passes.base import Fired, Left, Pass
from needle_export.report.schemes import cache_markdown, markdown
from needle_export.targets.base import LoweringOptions, Runner, Target

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def options_of(command: str) -> set[str]:
    found = program.get_command(None, command)  # type: ignore[arg-type]  # the context isn't used
    assert found is not None
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_readme_names_every_command() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \| ", README, re.M)[: len(COMMANDS)] == list(COMMANDS)


def test_readme_names_every_exit_code() -> None:
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*?) \|$", README, re.M))
    codes = {int(code): meaning for codes, meaning in rows.items() for code in codes.split(", ")}
    assert set(codes) == set(EXIT_CODES)
    assert all(EXIT_CODES[code] == meaning for code, meaning in codes.items() if code < 128)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_commands_in_pages_exist(page: Path) -> None:
    """Every ``needle-export COMMAND --option`` in a code block or in backticks."""
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"^ {4}(.*)$", text, re.M) + re.findall(r"`([^`]+)`", text)
    for span in spans:
        for call in re.findall(r"(?<!/)needle-export ([a-z][a-z-]*(?: [^|#;\n]*)?)", span):
            command, *rest = call.split()
            assert command in COMMANDS, call
            unknown = {word for word in rest if word.startswith("--")} - options_of(command) - {"--help"}
            assert not unknown, call


def test_readme_names_every_target_and_its_schemes() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+)` \| ((?:`[a-z0-9]+`(?:, )?)+) \| ", README, re.M))
    assert {target: tuple(re.findall(r"`([a-z0-9]+)`", schemes)) for target, schemes in rows.items()} == SCHEMES


def test_the_tables_of_schemes_are_the_commands() -> None:
    page = (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")
    assert markdown(TARGETS) in page and cache_markdown(TARGETS) in page


def test_make_targets_in_readme() -> None:
    listing = subprocess.run(["make", "-s", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^  make ([a-z-]+) ", listing, re.M))
    assert targets == {"help", "setup", "demo", "train-demo", "test", "test-slow", "lint", "type", "bench", "clean"}
    line = next(p for p in README.split("\n\n") if p.startswith("`make` lists all targets"))
    assert set(re.findall(r"`([a-z-]+)`", line)) - {"make"} == targets - {"help"}


def test_every_option_of_build_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    unsaid = {o for o in options_of("build") if o.startswith("--") and o not in guide}
    assert not unsaid - {"--bench", "--help"}


def test_changelog_has_this_version() -> None:
    assert re.search(rf"^## {re.escape(__version__)}\b", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)


def test_contributing_names_what_exists() -> None:
    """The contracts that CONTRIBUTING and the architecture page lean on."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    members = {
        "folds_into_matrices",
        "activations",
        "half",
        "chunk_multiple",
        "compile",
        "open",
        "examine",
        "other_runtimes",
    }
    facts = {"name", "status", "runtime", "fixed_shapes"}
    assert members <= set(dir(Target)) and facts <= set(Target.__annotations__)
    assert all(f"`{name}`" in text for name in members | facts)
    assert {"reset", "feed", "state", "streams"} <= set(dir(Runner))
    assert set(LoweringOptions.__annotations__) == {
        "weights",
        "context",
        "opset",
        "max_chunk",
        "metadata",
        "buckets",
        "heads",
        "system",
    }
    assert set(SCHEMES) == set(TARGETS) and "`SCHEMES`" in text
    assert {"places", "left"} <= set(Fired.__annotations__)
    assert {"op", "layer", "node", "reason"} == set(Left.__annotations__)
    assert {"name", "needs", "leaves", "run"} == set(Pass.__annotations__)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_files_named_in_pages_exist(page: Path) -> None:
    """Paths in backticks, from the root or from the package."""
    for name in re.findall(r"`([a-z_]+(?:/[A-Za-z_]+)+\.(?:py|md|toml))`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or (ROOT / "needle_export" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
