"""From what a user names to a file on this machine: a path, the model that comes along, or a file on Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

from needle_export.errors import BadInput, NeedleExportError, Unsupported, UsageError

DEFAULT_FILES = ("checkpoints/needle3.safetensors", "needle3.safetensors", "needle3.cact")
"""Where a repository keeps its checkpoint, tried in this order."""

DEMO = "demo"
"""The small model that comes along, unless the working folder has something of this name."""

SURELY_DEMO = "demo:"
"""The same, whatever the working folder has."""

DEMO_FILE = "needle-demo.safetensors"
"""The checkpoint in :func:`demo_folder`."""

TOKENIZER_FILES = ("tokenizer/tokenizer.model", "tokenizer.model")
"""Where a repository keeps its tokenizer, tried in this order."""

_PREFIX = "hf:"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def resolve(spec: str) -> Path:
    """The local file of a CHECKPOINT argument.

    Args:
        spec: a path, returned as it is; ``demo`` or ``demo:``; or ``hf:<owner>/<repo>[/<file>]``, downloaded or taken
            from the cache by huggingface_hub, which honours ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT``.

    Raises:
        UsageError: when an ``hf:`` or ``demo:`` name isn't of that form.
        BadInput: when the repository or the file doesn't exist, or needs a login; when no model came along.
        Unsupported: when it isn't cached and can't be fetched now: offline mode, no network.
    """
    if spec == SURELY_DEMO or (spec == DEMO and not Path(spec).exists()):
        return demo_folder() / DEMO_FILE
    if spec.startswith(SURELY_DEMO):
        raise UsageError(f"{spec!r} names nothing", fix=f"the model that comes along is {SURELY_DEMO}")
    if not spec.startswith(_PREFIX):
        return Path(spec)
    parts = spec.removeprefix(_PREFIX).split("/")
    if len(parts) < 2 or not all(_PART.fullmatch(part) for part in parts):
        raise UsageError(f"{spec!r} isn't of the form hf:<owner>/<repo>[/<file>]",
                         fix="for example hf:Cactus-Compute/needle3")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    names = (file,) if file else DEFAULT_FILES
    path, first = _first(spec, repo, names)
    if path is not None:
        return path
    if not file and isinstance(first, BadInput):
        raise BadInput(f"the repository has none of {', '.join(names)}", where=spec,
                       fix="name the file: hf:<owner>/<repo>/<file>")
    assert first is not None
    raise first


def resolve_tokenizer(spec: str) -> Path | None:
    """The ``tokenizer.model`` that lies with the checkpoint of a CHECKPOINT argument, or None if there is none.

    Beside a file in a folder; in a repository, where the public package looks for it, or at the top.

    Raises:
        UsageError: as :func:`resolve`.
        Unsupported: the repository's isn't cached and can't be fetched now.
    """
    if not spec.startswith(_PREFIX):
        beside = resolve(spec).with_name(TOKENIZER_FILES[-1])
        return beside if beside.is_file() else None
    repo = "/".join(spec.removeprefix(_PREFIX).split("/")[:2])
    path, failure = _first(spec, repo, TOKENIZER_FILES)
    if isinstance(failure, Unsupported):
        raise Unsupported(f"its tokenizer: {failure.what}", where=spec, fix="give --tokenizer FILE")
    return path


def demo_folder() -> Path:
    """The folder of the model that comes along: its checkpoint, tokenizer, tools, held-out requests and card.

    Raises:
        BadInput: this installation has no such model.
    """
    folder = Path(__file__).parents[1] / "demo" / "model"
    if not (folder / DEMO_FILE).is_file():
        raise BadInput("this installation lacks the demonstration's model", where=str(folder / DEMO_FILE),
                       fix="install the package whole, or name a checkpoint")
    return folder


def _first(spec: str, repo: str, names: tuple[str, ...]) -> tuple[Path | None, NeedleExportError | None]:
    """The first of several files that a repository has; or why it has none of them, as the first tells."""
    first: NeedleExportError | None = None
    for name in names:
        # Once the network has failed, the other names can only be in the cache.
        path, failure = _fetch(spec, repo, name, cached_only=isinstance(first, Unsupported))
        if path is not None:
            return path, None
        first = first or failure
    return None, first


def _fetch(spec: str, repo: str, name: str,
           cached_only: bool) -> tuple[Path | None, NeedleExportError | None]:
    """A file, or why there is none where another name may still be found; other failures are raised."""
    # The client takes half a second to import, and a plain path never needs it.
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(repo, name, local_files_only=cached_only)), None
    except errors.GatedRepoError:
        raise BadInput("the repository is gated", where=spec,
                       fix="accept its terms on the site and log in with: hf auth login") from None
    except errors.RepositoryNotFoundError:
        raise BadInput("there is no such repository, or it is private", where=spec,
                       fix="check the name, or log in with: hf auth login") from None
    except errors.RevisionNotFoundError:
        raise BadInput("the repository has no main branch", where=spec, fix="give a local path") from None
    except errors.LocalEntryNotFoundError as error:
        return None, _unreachable(spec, error.__cause__)
    except errors.EntryNotFoundError:
        return None, BadInput(f"the repository has no file {name}", where=spec, fix="check the file's name")
    except errors.HFValidationError:
        raise UsageError("this is no repository name", where=spec,
                         fix="use hf:<owner>/<repo>[/<file>]") from None
    except Exception as error:
        # Failures on the wire come from whichever HTTP library the client uses and share no base class.
        raise _unreachable(spec, error) from None


def _unreachable(spec: str, cause: BaseException | None) -> Unsupported:
    from huggingface_hub import errors

    if isinstance(cause, errors.OfflineModeIsEnabled):
        return Unsupported("it isn't in the cache, and offline mode keeps it from being fetched", where=spec,
                           fix="unset HF_HUB_OFFLINE, or give a local path")
    reason = " ".join(str(cause).split())[:160] if cause is not None else "no answer"
    return Unsupported(f"it isn't in the cache and couldn't be fetched ({reason})", where=spec,
                       fix="check the network and HF_ENDPOINT, or give a local path")
