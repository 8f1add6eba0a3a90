"""The manifest: what an app needs to know of a build, beside the model's files.

docs/manifest.md describes every field; a test keeps the two in step. Unlike the report it says nothing about how the
build was made or how fast it is, and nothing in it changes once it is published.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from needle_export.errors import BadInput
from needle_export.report.codec import decode, parse_json, read_file, to_json
from needle_export.report.schema import CheckpointInfo, FileInfo, RuntimeCheck, Status, Tool

FORMAT = "needle-export manifest"
"""What a manifest begins with."""

MANIFEST_SCHEMA = 1
"""The version of the schema that this package writes and reads."""

MANIFEST_NAME = "manifest.json"
"""The manifest's file name inside a published folder."""

TOKENIZER_NAME, DUMP_NAME = "tokenizer.model", "tokenizer.bin"
"""Of the tokenizer's file beside a build: a SentencePiece model, and the table of a container."""

Role = Literal["model", "tokenizer", "decoder"]
"""What a file is: part of the artifact, the tokenizer, or Python that shows how they are used."""


@dataclass(frozen=True)
class ManifestFile:
    """A file beside the manifest; ``name`` is relative to its folder, with forward slashes."""

    name: str
    role: Role
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        FileInfo(self.name, self.bytes, self.sha256)  # whose checks these need too


@dataclass(frozen=True)
class TokenizerInfo:
    """How text becomes tokens.

    Attributes:
        file: that holds it.
        format: ``sentencepiece``, a SentencePiece model; or ``dump``, the table of a container.
        source: ``given`` to the build, ``beside`` the checkpoint, or the ``container``'s own.
        dump: file with the container's own table, where it came from one.
        pieces: ids run from 0 to below this number.
        add_dummy_prefix: whether text is encoded with a space in front.
        byte_fallback: whether what has no piece is encoded byte by byte.
        remove_extra_whitespaces: whether spaces in a row become one.
    """

    file: str
    format: Literal["sentencepiece", "dump"]
    source: Literal["given", "beside", "container"]
    dump: str | None
    pieces: int
    add_dummy_prefix: bool
    byte_fallback: bool
    remove_extra_whitespaces: bool


@dataclass(frozen=True)
class SpecialIds:
    """Tokens with a meaning of their own; ``markers`` by the text of their pieces, none without a tokenizer."""

    pad: int
    eos: int
    bos: int
    unk: int
    markers: dict[str, int]


@dataclass(frozen=True)
class PromptPart:
    """A piece of a prompt: either ``text``, or what is to be put in there, by name."""

    text: str | None
    insert: Literal["system", "tools", "query"] | None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.insert is None):
            raise ValueError("a part is either a text or something to insert")


@dataclass(frozen=True)
class Prompt:
    """How a request becomes tokens: ``begin``, then those of the text of all parts, encoded as one.

    Attributes:
        begin: tokens in front.
        system: parts in front of the request, where there are instructions.
        request: parts of the request, up to where the answer begins.
        calls_front, calls_behind: text around an answer's calls, which are a JSON list of name and arguments.
    """

    begin: tuple[int, ...]
    system: tuple[PromptPart, ...]
    request: tuple[PromptPart, ...]
    calls_front: str
    calls_behind: str


@dataclass(frozen=True)
class Generation:
    """How an answer is made.

    Attributes:
        method: ``greedy``: the most likely token is taken, the lowest id among equals.
        max_new_tokens: at most so many.
        stop: tokens that end an answer and aren't part of it.
    """

    method: Literal["greedy"]
    max_new_tokens: int
    stop: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """A build's manifest. It carries no time stamp: the same build has the same."""

    format: str
    schema: int
    tool: Tool
    checkpoint: CheckpointInfo
    target: str
    weights: str
    cache: str
    context: int
    status: Status
    files: tuple[ManifestFile, ...]
    io: dict[str, Any]
    tokenizer: TokenizerInfo | None
    special_ids: SpecialIds
    prompt: Prompt
    generation: Generation
    runtimes: tuple[RuntimeCheck, ...]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if self.format != FORMAT or self.schema != MANIFEST_SCHEMA:
            raise ValueError(f"it is {self.format[:40]!r} of schema {self.schema}, not {FORMAT!r} of {MANIFEST_SCHEMA}")
        names = [file.name for file in self.files]
        if len(set(names)) != len(names) or MANIFEST_NAME in names:
            raise ValueError("a file is listed twice, or is the manifest itself")


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as UTF-8 JSON, the same bytes for the same manifest."""
    return to_json(manifest).encode()


def load_manifest(folder: str | PathLike[str]) -> Manifest:
    """Read the manifest of a published folder.

    Raises:
        BadInput: there is none, or it isn't one of this schema; names the key path.
    """
    path = Path(folder) / MANIFEST_NAME
    raw = _raw(path)
    if raw.get("schema") != MANIFEST_SCHEMA:
        raise BadInput(f"the manifest has schema {str(raw.get('schema'))[:20]}, and this version reads "
                       f"{MANIFEST_SCHEMA}", where=f"{path}: schema",
                       fix="build again, or use the version of needle-export that wrote it")
    try:
        return decode(Manifest, raw)
    except BadInput as error:
        raise BadInput(error.what.replace("a report", "a manifest"), where=f"{path}: {error.where}",
                       fix=error.fix) from None


def listed_by_manifest(folder: str | PathLike[str]) -> frozenset[str]:
    """Names of the files that a folder's manifest lists, itself included, whatever its schema; none without one.

    Raises:
        BadInput: it can't be read, or isn't one of this tool.
    """
    path = Path(folder) / MANIFEST_NAME
    if not path.is_file():
        return frozenset()
    files = _raw(path).get("files")
    names = (f.get("name") for f in files if isinstance(f, dict)) if isinstance(files, list) else ()
    return frozenset(name for name in names if isinstance(name, str)) | {MANIFEST_NAME}


def _raw(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(read_file(path, "manifest").decode("utf-8"), str(path))
    except UnicodeDecodeError:
        raw = None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BadInput("this isn't a manifest of needle-export", where=str(path))
    return raw
