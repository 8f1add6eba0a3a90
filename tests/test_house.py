"""The house's own rules: which way imports point, who may load what, who prints, how long a file is.

docs/architecture.md describes the same rules in words, tests/support/house.py has the tables with their exceptions.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.house import (
    ABOVE,
    ALONE,
    COMMON,
    DIRECT,
    GROUND,
    LOADED_LATE,
    MAX_LINES,
    PIPELINE,
    RUNTIMES,
    SHARED,
    STAGES,
    TORCH,
    TYPES_ONLY,
)

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "needle_export"

@dataclass(frozen=True)
class Import:
    """One import: where, of what, and whether it happens when the module is loaded."""

    importer: str
    target: str
    line: int
    at_load: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.target}"


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _walk(node: ast.AST, at_load: bool, typing_only: bool) -> Iterator[tuple[ast.stmt, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_load, typing_only
            continue
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statement in child.body:
                yield from _walk(ast.Module([statement], []), at_load, True)
            for statement in child.orelse:
                yield from _walk(ast.Module([statement], []), at_load, typing_only)
            continue
        yield from _walk(child, at_load and not inside, typing_only)


@cache
def imports() -> tuple[Import, ...]:
    """Every import of the package; our own modules without ``needle_export.``, others in angle brackets."""
    ours = {module_of(p) for p in sources(PACKAGE)}
    found = []
    for path in sources(PACKAGE):
        importer = module_of(path)
        for node, at_load, typing_only in _walk(ast.parse(path.read_text(encoding="utf-8")), True, False):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                assert isinstance(node, ast.ImportFrom)
                assert node.level == 0, f"{importer}, line {node.lineno}: a relative import"
                base = node.module or ""
                # ``from a import b`` names a module where b is one, and a name in module a where it isn't.
                wholes = [f"{base}.{alias.name}" for alias in node.names]
                names = [
                    whole if base == "needle_export" or whole.removeprefix("needle_export.") in ours else base
                    for whole in wholes
                ]
            found += [
                Import(importer, name.removeprefix("needle_export."), node.lineno, at_load, typing_only)
                if name.split(".")[0] == "needle_export"
                else Import(importer, f"<{name}>", node.lineno, at_load, typing_only)
                for name in names
            ]
    return tuple(found)


def own() -> list[Import]:
    return [i for i in imports() if not i.target.startswith("<")]


def foreign() -> list[tuple[Import, str]]:
    return [(i, i.target.strip("<>").split(".")[0]) for i in imports() if i.target.startswith("<")]


def room(module: str) -> str:
    return module.split(".")[0]


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def listed(i: Import, table: dict[tuple[str, str], str]) -> bool:
    return any(within(i.importer, a) and within(i.target, b) for a, b in table)


def allowed(i: Import) -> bool:
    """Whether an import of our own points the right way."""
    here, there = room(i.importer), room(i.target)
    if here == there or there in GROUND or (i.typing_only and listed(i, TYPES_ONLY)):
        return True
    if here == "cli":
        return there in PIPELINE or listed(i, DIRECT)
    if here in PIPELINE:
        return there in STAGES or there in ABOVE.get(here, ())
    if here in STAGES:
        return listed(i, SHARED)
    return here == ""  # the package itself


def test_imports_point_one_way() -> None:
    assert not [str(i) for i in own() if not allowed(i)]


@pytest.mark.parametrize(
    ("importer", "target"),
    [
        ("model.block", "targets.base"),
        ("graph.trace", "model.step"),
        ("checkpoint.sample", "pipeline"),
        ("targets.onnx.target", "checkpoint.geometry"),
        ("measure.parity", "report.schema"),
        ("cli.build", "graph.trace"),
        ("report.view", "inspection"),
        ("compile", "pipeline"),
        ("pipeline", "batch"),
        ("errors", "cli.output"),
        ("targets.base", "cli"),
    ],
)
def test_the_rule_can_refuse(importer: str, target: str) -> None:
    assert not allowed(Import(importer, target, 1, True, False))


def test_the_ground_stands_on_nothing() -> None:
    assert not [str(i) for i in own() if room(i.importer) in GROUND and room(i.target) not in GROUND]


def test_every_room_is_known() -> None:
    rooms = {room(module_of(p)) for p in sources(PACKAGE)} - {""}
    assert rooms - STAGES - PIPELINE - GROUND == {"cli"}


@pytest.mark.parametrize("table", [SHARED, DIRECT, TYPES_ONLY], ids=["shared", "direct", "types"])
def test_every_exception_is_in_use(table: dict[tuple[str, str], str]) -> None:
    unused = [pair for pair in table if not any(listed(i, {pair: ""}) for i in own())]
    assert not unused


def test_only_a_target_imports_its_runtime() -> None:
    strays = [str(i) for i, name in foreign() if name in RUNTIMES and not within(i.importer, RUNTIMES[name])]
    assert not strays


def test_runtimes_are_imported_late() -> None:
    """Importing a target's module loads no runtime, unless the module is itself imported late."""
    early = [
        str(i)
        for i, name in foreign()
        if name in RUNTIMES and i.at_load and not i.typing_only and i.importer not in LOADED_LATE
    ]
    leading = [
        str(i)
        for i in own()
        if i.target in LOADED_LATE and i.importer not in LOADED_LATE and i.at_load and not i.typing_only
    ]
    assert not early + leading


def test_only_the_model_and_the_compiler_know_torch() -> None:
    strays = [str(i) for i, name in foreign() if name == "torch" and room(i.importer) not in TORCH]
    assert not strays


def test_a_target_does_not_import_another() -> None:
    names = {p.name for p in (PACKAGE / "targets").iterdir() if p.is_dir() and p.name != "__pycache__"}
    crossed = [
        str(i)
        for i in own()
        for name in names
        if within(i.importer, f"targets.{name}")
        and i.target.startswith("targets.")
        and not within(i.target, f"targets.{name}")
        and not any(within(i.target, f"targets.{module}") for module in COMMON)
    ]
    assert not crossed


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_help_loads_nothing_heavy() -> None:
    heavy = [
        "numpy",
        "torch",
        "onnx",
        "onnx_ir",
        "onnxruntime",
        "huggingface_hub",
        "safetensors",
        "ml_dtypes",
    ]
    code = (
        "import sys\n"
        "from needle_export.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    run = python(code)
    assert "Commands:" in run.stdout
    assert run.stderr == "[]\n"


def test_opening_an_artifact_needs_no_torch() -> None:
    """Whoever only runs what was built shouldn't pay for the compiler."""
    code = (
        "import sys\n"
        "from needle_export import pipeline\n"
        "from needle_export.targets import find_target\n"
        "find_target('onnx'), find_target('tflite')\n"
        f"print([m for m in ('torch', *{sorted(RUNTIMES)}) if m in sys.modules])"
    )
    assert python(code).stdout == "[]\n"


@pytest.mark.parametrize("module", ALONE)
def test_what_lies_beside_a_build_needs_nothing_of_this_package(module: str) -> None:
    assert not [str(i) for i in own() if i.importer == module]
    others = {name for i, name in foreign() if i.importer == module and not i.typing_only}
    assert others - set(sys.stdlib_module_names) == set(ALONE[module])


def test_only_the_command_line_prints() -> None:
    talkers = []
    for path in sources(PACKAGE):
        module = module_of(path)
        if room(module) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Name) and node.id in ("print", "input")
            stream = (
                isinstance(node, ast.Attribute)
                and node.attr in ("stdout", "stderr")
                and isinstance(node.value, ast.Name)
                and node.value.id == "sys"
            )
            # The worker's answer to its parent goes to its standard output; the loop beside a build is a program.
            if (named or stream) and module not in ("measure.worker", "generate.loop"):
                talkers.append(f"{module}, line {node.lineno}")
    assert not talkers


def test_files_stay_readable() -> None:
    long = {
        str(p.relative_to(ROOT)): count
        for folder in (PACKAGE, ROOT / "tests", ROOT / "docs")
        for p in sources(folder)
        if (count := len(p.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


#: Written in pieces, so that this file passes its own test.
FOREIGN_TEXT = {
    "a path of somebody's machine": re.compile(
        "/(?:" + "|".join(["ho" + "me/", "ro" + "ot/", "Us" + "ers/", "wo" + "rk/"]) + r")\w"
    ),
    "a package registry": re.compile(
        "|".join(["py" + r"pi\.org", "python" + r"hosted\.org", "index" + "-url", r"download\.py" + "torch"])
    ),
}


def test_no_file_names_a_machine_or_a_registry() -> None:
    found = []
    for path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # data
        for number, line in enumerate(lines, 1):
            found += [
                f"{path.relative_to(ROOT)}, line {number}: {what}"
                for what, text in FOREIGN_TEXT.items()
                if text.search(line)
            ]
    assert not found


def test_every_module_says_what_it_is_for() -> None:
    trees = {module_of(p): ast.parse(p.read_text(encoding="utf-8")) for p in sources(PACKAGE)}
    assert not [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


def test_no_notes_to_self() -> None:
    """Open ends belong into the tracker."""
    words = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]))
    notes = []
    for path in sources(PACKAGE):
        with tokenize.open(path) as handle:
            hits = [n for n, line in enumerate(handle, 1) if words.search(line)]
        notes += [f"{module_of(path)}, line {n}" for n in hits]
    assert not notes
