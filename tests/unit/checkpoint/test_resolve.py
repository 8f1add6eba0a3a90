"""``hf:`` names, through the real client against a server on loopback.

The client reads its environment when it is imported, so every case runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from needle_export.checkpoint import resolve as module
from needle_export.checkpoint.resolve import DEMO_FILE, resolve, resolve_tokenizer
from needle_export.errors import BadInput, UsageError

COMMIT = "a" * 40
# The client waits between its retries, up to half a minute in all; its waiting isn't under test.
SCRIPT = """
import sys, time
time.sleep = lambda seconds: None
from needle_export.checkpoint import resolve as module
from needle_export.errors import NeedleExportError
try:
    sys.stdout.write("path " + str(getattr(module, sys.argv[2])(sys.argv[1])))
except NeedleExportError as error:
    sys.stdout.write(f"{type(error).__name__} {error.sentence}")
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of a hub that a download of one file needs."""

    files: dict[str, bytes]
    requests: list[str]
    missing_code: dict[str, tuple[int, str]]
    truncate: bool

    def respond(self, with_body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        owner, name, resolve_word, revision, *rest = self.path.strip("/").split("/")
        repo, file = f"{owner}/{name}", "/".join(rest)
        assert (resolve_word, revision) in (("resolve", "main"), ("resolve", COMMIT))
        body = self.files.get(f"{repo}/{file}")
        if body is None:
            status, code = self.missing_code.get(repo, (404, "RepoNotFound"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body[:len(body) // 2] if self.truncate else body)

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def log_message(self, *args: object) -> None:
        """Keeps the server quiet."""


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("Handler", (Hub,), {"files": {}, "requests": [], "missing_code": {}, "truncate": False})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(spec: str, endpoint: str, home: Path, *, function: str = "resolve", **environment: str) -> str:
    env = {key: value for key, value in os.environ.items()
           if not key.lower().endswith("_proxy") and not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_ETAG_TIMEOUT": "3", "HF_HUB_DOWNLOAD_TIMEOUT": "3", "NO_PROXY": "*"} | environment
    done = subprocess.run([sys.executable, "-c", SCRIPT, spec, function], env=env, capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "\n" not in done.stdout
    return done.stdout


def test_the_tokenizer_beside_a_checkpoint(tmp_path: Path) -> None:
    spec = str(tmp_path / "m.safetensors")
    assert resolve_tokenizer(spec) is None
    (tmp_path / "tokenizer.model").mkdir()
    assert resolve_tokenizer(spec) is None
    (tmp_path / "tokenizer.model").rmdir()
    (tmp_path / "tokenizer.model").touch()
    assert resolve_tokenizer(spec) == tmp_path / "tokenizer.model"
    assert resolve_tokenizer("demo:") == resolve("demo:").with_name("tokenizer.model")


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.model", "tokenizer.model"])
def test_the_tokenizer_of_a_repository(hub: tuple[type[Hub], str], tmp_path: Path, name: str) -> None:
    handler, endpoint = hub
    handler.missing_code["o/r"] = (404, "EntryNotFound")
    assert ask("hf:o/r/a/b.cact", endpoint, tmp_path, function="resolve_tokenizer") == "path None"
    handler.files[f"o/r/{name}"] = b"model"
    found = ask("hf:o/r/a/b.cact", endpoint, tmp_path, function="resolve_tokenizer")
    assert Path(found.removeprefix("path ")).read_bytes() == b"model"
    # Fetched once, it is there without a network too; one that never was is told.
    offline = ask("hf:o/r", endpoint, tmp_path, function="resolve_tokenizer", HF_HUB_OFFLINE="1")
    assert offline == found
    absent = ask("hf:o/other", endpoint, tmp_path, function="resolve_tokenizer", HF_HUB_OFFLINE="1")
    assert absent.startswith("Unsupported hf:o/other: its tokenizer: it isn't in the cache") and "--tokenizer" in absent


def test_paths_are_left_alone() -> None:
    assert resolve("some/where.safetensors") == Path("some/where.safetensors")
    assert resolve("./hf:odd") == Path("./hf:odd")


def test_the_model_that_comes_along(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, work = tmp_path / "package", tmp_path / "work"
    model = package / "demo" / "model" / DEMO_FILE
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr(module, "__file__", str(package / "checkpoint" / "resolve.py"))
    with pytest.raises(BadInput, match=r"lacks the demonstration's model; install the package whole") as missing:
        resolve("demo")
    assert missing.value.where == str(model)
    model.parent.mkdir(parents=True)
    model.touch()
    assert resolve("demo") == resolve("demo:") == model
    # What the user has wins, and the other name goes past it; of ours there is one.
    for own in (work / "demo").mkdir, (work / "demo").rmdir, (work / "demo").touch:
        own()
        assert resolve("demo") == (Path("demo") if (work / "demo").exists() else model)
        assert resolve("demo:") == model and resolve("./demo") == Path("demo")
    with pytest.raises(UsageError, match="'demo:small' names nothing"):
        resolve("demo:small")


@pytest.mark.parametrize("spec", ["hf:", "hf:x", "hf:/x", "hf:x/", "hf:a/b/", "hf:a/../c", "hf:a/b/../c",
                                  "hf:a b/c", "hf:a/b//c", "hf:-a/b", "hf:a/b/.hidden"])
def test_names_of_another_form(spec: str) -> None:
    with pytest.raises(UsageError, match="hf:<owner>/<repo>"):
        resolve(spec)


def test_the_default_files_are_tried_in_order(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.missing_code["o/r"] = (404, "EntryNotFound")
    handler.files["o/r/needle3.cact"] = b"container"
    path = Path(ask("hf:o/r", endpoint, tmp_path).removeprefix("path "))
    assert path.read_bytes() == b"container" and path.name == "needle3.cact"
    assert tmp_path in path.parents
    heads = [request for request in handler.requests if request.startswith("HEAD")]
    assert [request.rsplit("/main/", 1)[1] for request in heads] == [
        "checkpoints/needle3.safetensors", "needle3.safetensors", "needle3.cact"]
    handler.files["o/r/needle3.safetensors"] = b"flat"
    handler.files["o/r/checkpoints/needle3.safetensors"] = b"nested"
    assert Path(ask("hf:o/r", endpoint, tmp_path).removeprefix("path ")).read_bytes() == b"nested"


def test_a_named_file_and_its_cache(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.missing_code["o/r"] = (404, "EntryNotFound")
    handler.files["o/r/sub/my.cact"] = b"x" * 100000
    path = Path(ask("hf:o/r/sub/my.cact", endpoint, tmp_path).removeprefix("path "))
    assert path.read_bytes() == b"x" * 100000
    count = len(handler.requests)
    offline = ask("hf:o/r/sub/my.cact", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert Path(offline.removeprefix("path ")) == path
    assert len(handler.requests) == count
    answer = ask("hf:o/r/other.cact", endpoint, tmp_path)
    assert answer.startswith("BadInput hf:o/r/other.cact: the repository has no file other.cact")


def test_what_does_not_exist(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.missing_code["o/empty"] = (404, "EntryNotFound")
    handler.missing_code["o/gated"] = (403, "GatedRepo")
    handler.missing_code["o/bare"] = (404, "RevisionNotFound")
    assert ask("hf:o/absent", endpoint, tmp_path).startswith(
        "BadInput hf:o/absent: there is no such repository")
    assert ask("hf:o/empty", endpoint, tmp_path).startswith(
        "BadInput hf:o/empty: the repository has none of checkpoints/needle3.safetensors")
    assert ask("hf:o/gated", endpoint, tmp_path).startswith("BadInput hf:o/gated: the repository is gated")
    assert "no main branch" in ask("hf:o/bare", endpoint, tmp_path)
    handler.missing_code["o/broken"] = (500, "")
    assert ask("hf:o/broken", endpoint, tmp_path).startswith("Unsupported hf:o/broken: it isn't in the cache")
    # After a failure on the wire the other default names are looked up in the cache only.
    assert {request.rsplit("/main/", 1)[1] for request in handler.requests if "broken" in request} == {
        "checkpoints/needle3.safetensors"}


def test_offline_and_not_cached(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    answer = ask("hf:o/r", endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith("Unsupported hf:o/r: it isn't in the cache, and offline mode")
    assert "unset HF_HUB_OFFLINE" in answer
    assert handler.requests == []


def test_no_network(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        answer = ask("hf:o/r", nowhere, tmp_path)
        assert answer.startswith("Unsupported hf:o/r: it isn't in the cache and couldn't be fetched")
        assert "check the network" in answer
        # A file cached under a later default name is still found.
        handler.missing_code["o/r"] = (404, "EntryNotFound")
        handler.files["o/r/needle3.cact"] = b"container"
        path = ask("hf:o/r", endpoint, tmp_path)
        assert path.startswith("path ")
        assert ask("hf:o/r", nowhere, tmp_path) == path
        assert ask("hf:o/r", nowhere, tmp_path, HF_HUB_OFFLINE="1") == path


def test_a_download_that_breaks_off(hub: tuple[type[Hub], str], tmp_path: Path) -> None:
    handler, endpoint = hub
    handler.files["o/r/my.cact"] = b"x" * 100000
    handler.truncate = True
    answer = ask("hf:o/r/my.cact", endpoint, tmp_path)
    assert answer.startswith("Unsupported hf:o/r/my.cact: it isn't in the cache and couldn't be fetched")
    assert not [path for path in tmp_path.rglob("my.cact") if path.is_file()]
