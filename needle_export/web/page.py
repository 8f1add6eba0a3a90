"""The page of a site, and the files beside it that are the same in all sites."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path


@dataclass(frozen=True)
class Shown:
    """What a page says of its site.

    Attributes:
        title: of the page.
        model: which it is, in words.
        random: its weights mean nothing.
        model_bytes: of the files that a browser loads for it.
        model_size: the same in words.
        tools: name and description of each.
        notes: what the grammar of their calls doesn't enforce.
        runtime: name and version.
        made_by: tool and version.
    """

    title: str
    model: str
    random: bool
    model_bytes: int
    model_size: str
    tools: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    runtime: str
    made_by: str


def render_page(shown: Shown) -> str:
    """The page as HTML that ends in a newline."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = (resources.files(__package__) / "templates" / "index.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(site=shown) + "\n"


def put_static(out: Path) -> None:
    """Write the style and the scripts into a folder."""
    for entry in (resources.files(__package__) / "static").iterdir():
        (out / entry.name).write_bytes(entry.read_bytes())
