"""What an app needs beside a model: its tokenizer, a manifest, and Python that shows how they are used.

They are written when an artifact is finished and verified, and are no part of it: its size, its budgets and the cache
of earlier builds know nothing of them.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from needle_export.assemble import check_file, file_info
from needle_export.checkpoint.checkpoint import Checkpoint
from needle_export.checkpoint.files import map_file, naming
from needle_export.checkpoint.resolve import resolve, resolve_tokenizer
from needle_export.checkpoint.sentencepiece_file import BOS_ID, EOS_ID, PAD_ID, UNK_ID, write_model
from needle_export.checkpoint.text import Tokenizer, load_tokenizer
from needle_export.checkpoint.tokenizer import is_dump
from needle_export.config.options import BuildOptions
from needle_export.config.progress import Progress
from needle_export.errors import BadInput, Unsupported, VerificationFailed
from needle_export.generate import loop
from needle_export.generate.assistant import MAX_NEW_TOKENS
from needle_export.generate.prompt import CALLS_END, CALLS_START, IM_END, MARKERS, PARTS, SYSTEM_PARTS
from needle_export.report.manifest import (
    DUMP_NAME,
    FORMAT,
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    TOKENIZER_NAME,
    Generation,
    Manifest,
    ManifestFile,
    Prompt,
    PromptPart,
    Role,
    SpecialIds,
    TokenizerInfo,
    dump_manifest,
    load_manifest,
)
from needle_export.report.schema import FileInfo, Report
from needle_export.targets import find_target

log = logging.getLogger(__name__)

LOOP_NAME, DECODER_NAME = "loop.py", "decoder.py"
"""Of the reference loop: what is the same for all targets, and what isn't."""

#: Of a build without a tokenizer, in its report.
NO_TOKENIZER = "no tokenizer lies beside this artifact: none came with the checkpoint, and --tokenizer named none"


@dataclass(frozen=True)
class AppTokenizer:
    """A tokenizer for a build.

    Attributes:
        source: where it is from, as :class:`TokenizerInfo` has it.
        name: of the file that it was read from.
        files: contents by the names that they get beside the artifact; the first is the one to read.
    """

    source: Literal["given", "beside", "container"]
    name: str
    files: dict[str, bytes]
    read: Tokenizer


def find_tokenizer(options: BuildOptions, checkpoint: Checkpoint, progress: Progress) -> AppTokenizer | None:
    """The tokenizer of a build: the one that is given, the container's own, or the one beside the checkpoint.

    Raises:
        BadInput: it can't be read, or has more pieces than the model has tokens.
        Unsupported: the one that is given can't be fetched.
    """
    path: Path | None = None
    source: Literal["given", "beside", "container"]
    with progress.stage("read the tokenizer"):
        if options.tokenizer is not None:
            path, source = resolve(options.tokenizer), "given"
        elif checkpoint.tokenizer is not None:
            source = "container"
        else:
            path, source = _beside(options.checkpoint), "beside"
            if path is None:
                return None
        data = map_file(path).tobytes() if path is not None else checkpoint.tokenizer
        assert data is not None
        name = checkpoint.source.path_name if path is None else path.name
        with naming(str(path or name)):
            tokenizer = load_tokenizer(data, checkpoint.geometry.vocab_size)
        return AppTokenizer(source, name, _files(data, tokenizer), tokenizer)


def _beside(spec: str) -> Path | None:
    try:
        return resolve_tokenizer(spec)
    except Unsupported as absent:
        # The checkpoint is here, so the build needn't end for it; the report says that there is none.
        log.warning("%s", absent.sentence)
        return None


def _files(data: bytes, tokenizer: Tokenizer) -> dict[str, bytes]:
    """What is written: a SentencePiece model as it is; a dump as it is, and as a model where one can stand for it."""
    if not is_dump(data):
        return {TOKENIZER_NAME: data}
    try:
        return {TOKENIZER_NAME: write_model(tokenizer.table), DUMP_NAME: data}
    except BadInput as refusal:
        log.warning("the container's tokenizer can't be written as a SentencePiece model: %s", refusal.what)
        return {DUMP_NAME: data}


def write_app_files(folder: Path, report: Report, tokenizer: AppTokenizer | None) -> None:
    """Write them beside a finished artifact, the manifest last.

    Args:
        report: of the build, as it is published but for times.
    """
    artifact = report.artifacts[0]
    roles: dict[str, Role] = {file.name: "model" for file in artifact.files}
    for name, data in ({} if tokenizer is None else tokenizer.files).items():
        (folder / name).write_bytes(data)
        roles[name] = "tokenizer"
    for name, source in ((LOOP_NAME, Path(loop.__file__)), (DECODER_NAME, find_target(artifact.target).decoder())):
        shutil.copyfile(source, folder / name)
        roles[name] = "decoder"
    known = {file.name: file for file in artifact.files}
    infos = [(known.get(name) or file_info(folder, name), role) for name, role in roles.items()]
    manifest = Manifest(
        format=FORMAT,
        schema=MANIFEST_SCHEMA,
        tool=report.tool,
        checkpoint=report.checkpoint,
        target=artifact.target,
        weights=artifact.weights,
        cache=str(report.options["cache"]),
        context=int(report.options["context"]),
        status=artifact.status,
        files=tuple(ManifestFile(info.name, role, info.bytes, info.sha256) for info, role in infos),
        io=artifact.io,
        tokenizer=None if tokenizer is None else _described(tokenizer),
        special_ids=_special(tokenizer),
        prompt=Prompt((BOS_ID,), _parts(SYSTEM_PARTS), _parts(PARTS), CALLS_START, CALLS_END),
        generation=Generation("greedy", MAX_NEW_TOKENS, _stops(tokenizer)),
        runtimes=artifact.runtimes,
        versions=artifact.versions,
    )
    (folder / MANIFEST_NAME).write_bytes(dump_manifest(manifest))


def _described(tokenizer: AppTokenizer) -> TokenizerInfo:
    table, first = tokenizer.read.table, next(iter(tokenizer.files))
    return TokenizerInfo(
        file=first,
        format="dump" if first == DUMP_NAME else "sentencepiece",
        source=tokenizer.source,
        dump=DUMP_NAME if DUMP_NAME in tokenizer.files else None,
        pieces=len(table.pieces),
        add_dummy_prefix=table.add_dummy_prefix,
        byte_fallback=table.byte_fallback,
        remove_extra_whitespaces=table.remove_extra_whitespaces,
    )


def _special(tokenizer: AppTokenizer | None) -> SpecialIds:
    """Without a tokenizer, what every model of the family is trained with."""
    if tokenizer is None:
        return SpecialIds(PAD_ID, EOS_ID, BOS_ID, UNK_ID, {})
    read = tokenizer.read
    markers = {text: token for text in MARKERS if (token := read.marker(text)) is not None}
    return SpecialIds(read.pad_id, read.eos_id, read.bos_id, read.unk_id, markers)


def _stops(tokenizer: AppTokenizer | None) -> tuple[int, ...]:
    end = None if tokenizer is None else tokenizer.read.marker(IM_END)
    return (EOS_ID,) if end is None else (end, EOS_ID)


def _parts(parts: tuple[tuple[str, Any], ...]) -> tuple[PromptPart, ...]:
    return tuple(PromptPart(text or None, insert) for text, insert in parts)


def noted(report: Report, tokenizer: AppTokenizer | None) -> Report:
    """A report that says which tokenizer lies beside its artifact, or that there is none."""
    named = None if tokenizer is None else {"name": tokenizer.name, "source": tokenizer.source}
    notes = () if tokenizer is not None else (NO_TOKENIZER,)
    artifacts = tuple(replace(a, notes=(*a.notes, *notes)) for a in report.artifacts)
    return replace(report, options=report.options | {"tokenizer": named}, artifacts=artifacts)


def check_app_files(dist: Path, report: Report) -> None:
    """Whether a published folder has the files that its manifest lists, as it lists them.

    Those of the artifact are held against the report, which says what they are.

    Raises:
        VerificationFailed: one is missing or isn't the same.
        BadInput: there is no manifest, or it can't be read.
    """
    artifacts = {file for artifact in report.artifacts for file in artifact.files}
    for listed in load_manifest(dist).files:
        file = FileInfo(listed.name, listed.bytes, listed.sha256)
        if listed.role != "model":
            check_file(dist, file, "manifest")
        elif file not in artifacts:
            raise VerificationFailed(f"it describes {file.name} otherwise than the report does",
                                     where=str(dist / MANIFEST_NAME), fix="build it again")
