"""needle-export run"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from needle_export.cli.output import emit
from needle_export.cli.shared import artifact_folder, define, json_option, progress_of
from needle_export.errors import UsageError

if TYPE_CHECKING:
    from needle_export.answering import Answered, Session

#: Bytes of a request that is read from stdin; no context holds more.
_MAX_BYTES = 1 << 20


@define("run", 'run dist/ --tools tools.json "turn on the kitchen lights"',
        'run build/demo/onnx "dim the study lights to 20 %"',
        'run dist/ --tools tools.json --tokenizer tokenizer.model --unconstrained "is it raining in Lagos" --json',
        "run dist/ --tools tools.json - < request.txt")
@click.argument("folder", type=artifact_folder, metavar="DIR")
@click.argument("queries", metavar="QUERY...", nargs=-1, required=True)
@click.option("--tools", type=click.Path(path_type=Path), metavar="FILE",
              help="Tools that may be called: a JSON file of schemas, flat or OpenAI-style. Builds of the model that "
                   "comes along have its own if left out; any other needs it.")
@click.option("--system", default="", metavar="TEXT", help="Instructions in front of the request.")
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE",
              help="The model's tokenizer; the one that lies beside the build if left out.")
@click.option("--unconstrained", is_flag=True,
              help="Let the model write what it likes, instead of valid calls only.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N",
              help="Tokens that an answer may have.")
@click.option("--max-calls", type=click.IntRange(min=1), metavar="N",
              help="Calls that an answer may have; as many as fit if left out.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Threads of the runtime.")
@json_option
def command(folder: Path, queries: tuple[str, ...], tools: Path | None, system: str, tokenizer: Path | None,
            unconstrained: bool, max_new_tokens: int, max_calls: int | None, threads: int, as_json: bool) -> None:
    """Ask a published build for calls.

    DIR is a folder that a build has written; each QUERY is a request, and - reads one from stdin. The artifact runs in
    its own runtime (a Core ML build in the evaluator). An answer that isn't valid calls is told and is no error: the
    exit code says whether the model ran, not whether it is right.
    """
    from needle_export.answering import answer
    from needle_export.report.codec import to_json

    if queries.count("-") > 1:
        raise UsageError("stdin holds one request", where="QUERY", fix="give - once")
    asked = [_from_stdin() if query == "-" else query for query in queries]
    with progress_of(silent=as_json) as progress:
        session = answer(folder, asked, tools, tokenizer=tokenizer, system=system, constrained=not unconstrained,
                         max_new_tokens=max_new_tokens, max_calls=max_calls, threads=threads, progress=progress)
    emit(to_json(session) if as_json else _text(session))


def _from_stdin() -> str:
    data = sys.stdin.buffer.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UsageError("this is far too large for a request", where="stdin")
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise UsageError("this isn't UTF-8 text", where="stdin") from None


def _text(session: Session) -> str:
    from needle_export.report.view import RANDOM_ANSWERS

    lines = [f"! {RANDOM_ANSWERS}"] if session.random else []
    for found in session.answers:
        lines += [f"> {found.query}"] if len(session.answers) > 1 else []
        lines += [*_calls(found), f"  {_speed(found)}", ""]
    # The runtime is named whatever the answers are: no number of the lines above stands without it.
    where = f"in {session.runtime}, {session.target} {session.weights}"
    if session.evaluator:
        lines.append(f"{where}: an evaluator of ours, whose speed says nothing about a device")
    else:
        lines.append(f"{where}, {session.threads} thread{'s' if session.threads > 1 else ''}, on this machine")
    lines.append(f"tools: {session.tools}")
    kind = "the grammar admits more, or less, than the schemas" if session.constrained else "not checked, or narrower"
    lines += [f"note ({kind}): {note}" for note in session.notes]
    return "\n".join(lines) + "\n"


def _calls(found: Answered) -> list[str]:
    from needle_export.generate.prompt import compact

    if not found.valid:
        return [f"no valid calls: {found.problem}", f"  {found.answer}"]
    return [f"{call.name} {compact(call.arguments)}" for call in found.calls] or ["calls nothing"]


def _speed(found: Answered) -> str:
    first = f"first token after {found.first_token_ms:.1f} ms ({found.prompt_tokens} tokens of prompt)"
    rate = "" if found.tokens_per_s is None else f", then {found.tokens_per_s:.1f} tokens/s"
    return f"{found.tokens} tokens, {first}{rate}"
