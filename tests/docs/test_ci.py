"""The workflow and the hook of docs/ci.md, run step by step as they stand, on a small sample."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import junitparser
import pytest
import yaml

from needle_export.checkpoint.geometry import SMALL
from needle_export.checkpoint.sample import write_sample

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text()

#: What the runner puts in; any other expression in the page fails the test.
EXPRESSIONS = {"github.token": "not-a-token", "github.event.number": "7"}

#: The page's own steps that need an action, which isn't here.
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


WORKFLOW, HOOK = (yaml.safe_load(text) for text in blocks("yaml"))


def git(folder: Path, *arguments: str) -> None:
    settings = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


class Runner:
    """Runs ``run:`` steps as GitHub does: ``bash -e`` in the checkout, later ones only where none failed."""

    def __init__(self, home: Path) -> None:
        self.checkout, self.tools = home / "checkout", home / "tools"
        self.summary, self.said = home / "summary.md", home / "gh.txt"
        self.tools.mkdir()
        tool(self.tools, "needle-export", f'exec {shlex.quote(sys.executable)} -c '
             f'"from needle_export.cli import main; main()" "$@"')
        tool(self.tools, "pip", 'test "$1" = install')
        # The comment's text is kept, so that a test can read what was said.
        tool(self.tools, "gh", f'printf "%s\\n" "$*" > {self.said}; while [ "$1" != --body-file ]; do shift; done; '
             f'cat "$2" >> {self.said}')
        self.environment = {
            **os.environ, "PATH": f"{self.tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "GITHUB_ACTIONS": "true", "GITHUB_EVENT_NAME": "pull_request", "GITHUB_BASE_REF": "main",
            "GITHUB_REF": "refs/pull/7/merge", "GITHUB_STEP_SUMMARY": str(self.summary),
            "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
        }

    def step(self, step: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **{key: self._expand(value) for key, value in step.get("env", {}).items()}}
        return subprocess.run(["bash", "-e", "-c", self._expand(step["run"])], cwd=self.checkout, env=environment,
                              capture_output=True, text=True)

    def job(self, steps: list[dict[str, Any]]) -> dict[str, subprocess.CompletedProcess[str]]:
        """Results by name of the steps that ran."""
        done: dict[str, subprocess.CompletedProcess[str]] = {}
        for step in steps:
            if "run" not in step:
                assert step["uses"].split("@")[0] in ACTIONS
                continue
            failed = any(result.returncode for result in done.values())
            if failed and not step.get("if", "").startswith("always()"):
                continue
            if "hashFiles" in step.get("if", "") and not (self.checkout / "comment.md").exists():
                continue
            done[step["name"]] = self.step(step)
        return done

    @staticmethod
    def _expand(text: str) -> str:
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: EXPRESSIONS[found[1]], text)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A pull request that makes a small model deeper, checked out beside the repository that it goes to."""
    home = tmp_path_factory.mktemp("ci")
    origin = home / "origin"
    (origin / "model").mkdir(parents=True)
    script = blocks("sh")[0]
    assert " --weights int4 " in script
    # The sample was made for shorter texts than a build holds by default.
    (origin / "model" / "build.sh").write_text(script.replace(" --weights int4 ", " --weights int4 --context 64 "))
    (origin / "budgets.toml").write_text(blocks("toml")[0])
    write_sample(origin / "model" / "needle.safetensors", SMALL.with_layers(2), 0)
    git(origin, "init", "--quiet", "--initial-branch", "main")
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "-m", "the model")
    git(home, "clone", "--quiet", origin.as_uri(), "checkout")
    runner = Runner(home)
    git(runner.checkout, "checkout", "--quiet", "-b", "deeper")
    write_sample(runner.checkout / "model" / "needle.safetensors", SMALL.with_layers(3), 0)
    git(runner.checkout, "commit", "--quiet", "-a", "-m", "a deeper model")
    return runner


STEPS = WORKFLOW["jobs"]["budgets"]["steps"]


@pytest.fixture(scope="module")
def breach(runner: Runner) -> tuple[dict[str, subprocess.CompletedProcess[str]], str, str]:
    """The whole job: results, comment and summary. What it built stays for the tests that take only some steps."""
    done = runner.job(STEPS)
    assert "Comment" in done and not done["Comment"].returncode, [result.stderr for result in done.values()]
    return done, runner.said.read_text(), runner.summary.read_text()


def test_a_breach_fails_the_job_and_is_told(runner: Runner, breach: Any) -> None:
    done, said, summary = breach
    assert list(done) == ["Install", "Build", "Build the baseline", "Check", "Comment"]
    codes = {name: result.returncode for name, result in done.items()}
    assert codes == {"Install": 0, "Build": 0, "Build the baseline": 0, "Check": 1, "Comment": 0}, done["Check"].stderr
    lines = done["Check"].stdout.splitlines()
    at = blocks("toml")[0].split("\n").index('max = "+2 %"') - 1  # two lines above, counted from 1
    (error,) = [line for line in lines if line.startswith("::error ")]
    assert error.startswith(f"::error file=budgets.toml,line={at},title=Budget exceeded%3A size::dist onnx int4: ")
    assert done["Check"].stderr == "error: 1 budget exceeded; see the table\n"
    (suite,) = list(junitparser.JUnitXml.fromfile(str(runner.checkout / "budgets.xml")))
    assert (suite.tests, suite.failures) == (4, 1)
    assert said.startswith("pr comment 7 --edit-last --create-if-none --body-file body.md\n## Budgets: **not met**\n")
    for part in ("| ❌ EXCEEDED | size | dist onnx int4 |", "| ✅ within | size vocabulary | dist onnx int4 |",
                 "<summary>What changed</summary>", "| **layers** | 2 → 3 |", "q\\_proj/kernel | routing | 2 |"):
        assert part in said, part
    assert summary == said.split("\n", 1)[1]


def test_within_passes(runner: Runner, breach: object) -> None:
    path = runner.checkout / "budgets.toml"
    before = path.read_text()
    path.write_text(before.replace('max = "+2 %"', 'max = "+80 %"'))
    names = ("Check", "Comment")
    done = runner.job([step for step in STEPS if step.get("name") in names])
    path.write_text(before)
    assert [done[name].returncode for name in names] == [0, 0], done["Check"].stderr
    assert "## Budgets: within\n" in runner.said.read_text()


def test_a_budget_about_nothing_fails_with_its_own_code(runner: Runner, breach: object) -> None:
    path = runner.checkout / "budgets.toml"
    before = path.read_text()
    path.write_text('[[budget]]\nmetric = "size"\ntarget = "tflite"\nmax = "1 MB"\n')
    done = runner.job([step for step in STEPS if step.get("name") == "Check"])
    path.write_text(before)
    assert done["Check"].returncode == 2
    assert "::error file=budgets.toml,line=1,title=Budget nothing matches%3A size::" in done["Check"].stdout


def test_the_hook(runner: Runner, breach: object) -> None:
    (hook,) = HOOK["repos"][0]["hooks"]
    assert re.search(hook["files"], "model/needle.safetensors") and re.search(hook["files"], "budgets.toml")
    path = runner.checkout / "budgets.toml"
    before = path.read_text()

    def run(budgets: str) -> int:
        path.write_text(budgets)
        return subprocess.run(shlex.split(hook["entry"]), cwd=runner.checkout, env=runner.environment,
                              capture_output=True).returncode

    kept = '[[budget]]\nmetric = "compressed"\nmax = "72 MB"\n'
    codes = [run(kept), run(kept.replace("72 MB", "72 kB")), run(before)]
    path.write_text(before)
    assert codes == [0, 1, 2]  # the last are relative, and the hook has no baseline


def test_the_page_needs_nothing_that_is_not_here() -> None:
    assert shutil.which("git") and shutil.which("bash")
    assert set(re.findall(r"\$\{\{ (.*?) \}\}", PAGE)) == set(EXPRESSIONS)
