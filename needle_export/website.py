"""From a published ONNX build to a static site that runs it in a browser."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from needle_export import __version__
from needle_export.bundle.publish import publish, stage
from needle_export.bundle.site import FORMAT, SITE_NAME
from needle_export.checkpoint.files import file_sha256
from needle_export.checkpoint.text import Tokenizer
from needle_export.companions import given_or_demos, load_tokenizer_of, load_tools, tokenizer_path
from needle_export.config.progress import Progress
from needle_export.errors import BadInput, Unsupported
from needle_export.generate.constraint import Grammar, need_marker
from needle_export.generate.grammar import compile_grammar
from needle_export.generate.prompt import AFTER_QUERY, IM_END, before_query
from needle_export.generate.schemas import Tool
from needle_export.report.schema import Report, load_report
from needle_export.report.units import size
from needle_export.reuse import open_cache
from needle_export.web.page import Shown, put_static, render_page
from needle_export.web.runtime import MODULE, PACKAGE, put_runtime

#: At most so many tokens answer a request.
_LIMIT = 256

_MANIFEST = "manifest.json"

#: Of gzip: what static servers use most.
_LEVEL = 6


@dataclass(frozen=True)
class SiteFile:
    """A file of a site: its path in it, its bytes, those that gzip makes of them, and its hash."""

    path: str
    bytes: int
    gzip_bytes: int
    sha256: str


@dataclass(frozen=True)
class Site:
    """What was written.

    Attributes:
        out: the folder.
        title: of the page.
        tools: the file of the tools that may be called.
        runtime: name and version of the runtime in it.
        widened: how many matrices of integers a page widens.
        notes: what the grammar doesn't enforce.
        files: all but the list of them.
        bytes, gzip_bytes: of all files.
    """

    out: str
    title: str
    tools: str
    runtime: str
    widened: int
    notes: tuple[str, ...]
    files: tuple[SiteFile, ...]
    bytes: int
    gzip_bytes: int


def make_site(
    dist: Path, out: Path, *, tools: Path | None = None, title: str, system: str, tokenizer: Path | None = None,
    runtime: Path | None, progress: Progress
) -> Site:
    """Write a site that answers requests with an artifact; it appears whole or not at all.

    Args:
        dist: a published ONNX build.
        tools: that may be called, a file; None takes the demo model's for builds of that.
        title: of the page; empty for one after the model.
        system: instructions in front of every request, or empty.
        tokenizer: its file, or None for the one beside the build.
        runtime: folder with onnxruntime-web's files; None to have npm fetch them.

    Raises:
        BadInput: the build or its tokenizer can't be read, or a tool's schema can't be compiled.
        Unsupported: it isn't an ONNX build, or the runtime can't be had.
        UsageError: ``out`` holds anything that this tool didn't make; no tools are given and there are none to take.
    """
    tools = given_or_demos("--tools", tools, [dist])
    known = load_tools(tools)
    report = load_report(dist)
    if [artifact.target for artifact in report.artifacts] != ["onnx"]:
        raise Unsupported(f"a browser runs ONNX, and this is {report.artifacts[0].target}" if report.artifacts
                          else "there is no artifact in it", where=str(dist), fix="build with --target onnx")
    words = load_tokenizer_of(report, tokenizer_path(dist, tokenizer))
    name = title or f"{Path(report.checkpoint.path_name).stem}, in your browser"
    with stage(out) as staging:
        with progress.stage("compile the grammar"):
            grammar = compile_grammar(known)
        with progress.stage("write the graphs"):
            about = _model(dist, staging / "model")
        with progress.stage("write the runtime"):
            (staging / "runtime").mkdir()
            cache = open_cache()
            version = put_runtime(staging / "runtime", runtime, None if cache is None else cache.folder)
        _write_json(staging / "data" / "tokenizer.json", asdict(words.table))
        _write_json(staging / "data" / "grammar.json", grammar.as_dict())
        if (dist / _MANIFEST).is_file():
            shutil.copyfile(dist / _MANIFEST, staging / "data" / _MANIFEST)
        put_static(staging)
        model_bytes = sum(path.stat().st_size for path in (staging / "model").iterdir())
        shown = Shown(
            title=name, model=_described(report), random=report.checkpoint.random, notes=grammar.notes,
            model_bytes=model_bytes, model_size=size(model_bytes),
            tools=tuple((tool.name, tool.description) for tool in known),
            runtime=f"{PACKAGE} {version}", made_by=f"needle-export {__version__}",
        )
        (staging / "index.html").write_text(render_page(shown), encoding="utf-8")
        with progress.stage("measure what a visitor loads"):
            files = tuple(_listed(path, staging) for path in sorted(staging.rglob("*")) if path.is_file())
        listing = {
            "format": FORMAT, "schema": 1, "tool": {"name": "needle-export", "version": __version__}, "title": name,
            "runtime": {"name": PACKAGE, "version": version, "module": f"runtime/{MODULE}"},
            "model": about,
            "prompt": _prompt(known, system) | {"frame": _frame(Grammar(grammar, words), words)},
            "files": [asdict(file) for file in files],
        }
        _write_json(staging / SITE_NAME, listing)
        publish(staging, out)
    return Site(str(out), name, str(tools), shown.runtime, len(about["matrices"]), grammar.notes, files,
                sum(file.bytes for file in files), sum(file.gzip_bytes for file in files))


def _model(dist: Path, out: Path) -> dict[str, Any]:
    """Write the graphs and their weights; what a page must know of them."""
    from needle_export.targets.onnx.widen import widen

    out.mkdir()
    contract = widen(dist, out).as_dict()
    try:
        shutil.copyfile(dist / contract["files"]["weights"], out / contract["files"]["weights"])
    except FileNotFoundError as missing:
        raise BadInput("this file of the artifact is missing", where=str(missing.filename),
                       fix="build it again") from None
    return contract


def _prompt(tools: Sequence[Tool], system: str) -> dict[str, Any]:
    """A prompt's text before and after a request."""
    return {"before": before_query(tools, system), "after": AFTER_QUERY, "max_new_tokens": _LIMIT}


def _frame(grammar: Grammar, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens around the calls of an answer, and those that are no text of it."""
    return {
        "front": grammar.front, "start": grammar.start, "end": grammar.end, "think": grammar.think,
        "thought": grammar.thought, "between": grammar.between, "message_end": need_marker(tokenizer, IM_END),
        "apart": [token for token, piece in enumerate(grammar.pieces) if not piece],
    }


def _described(report: Report) -> str:
    model, artifact = report.checkpoint, report.artifacts[0]
    return f"{model.path_name}, {model.layers} layers, {model.parameters:,} parameters, weights {artifact.weights}"


def _listed(path: Path, root: Path) -> SiteFile:
    data = path.read_bytes()
    return SiteFile(path.relative_to(root).as_posix(), len(data), len(gzip.compress(data, _LEVEL, mtime=0)),
                    file_sha256(path))


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
