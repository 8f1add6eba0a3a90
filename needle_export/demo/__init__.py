"""A small trained Needle that ships with the package: its files, and how they were made.

``files()`` says where they lie; everything else here trains the model and needs torch and sentencepiece.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from needle_export.checkpoint.resolve import DEMO_FILE, demo_folder
from needle_export.errors import BadInput

CHECKPOINT, TOKENIZER, TOOLS = DEMO_FILE, "tokenizer.model", "tools.json"
HELDOUT, CARD = "heldout.jsonl", "MODEL_CARD.md"


@dataclass(frozen=True)
class Files:
    """Where the demo model lies: checkpoint, tokenizer, its tools, the held-out requests and the model card."""

    checkpoint: Path
    tokenizer: Path
    tools: Path
    heldout: Path
    card: Path


def files() -> Files:
    """The demo model's files in this installation.

    Raises:
        BadInput: one is missing, so that the installation is incomplete.
    """
    folder = demo_folder()
    for name in (TOKENIZER, TOOLS, HELDOUT, CARD):
        if not (folder / name).is_file():
            raise BadInput("this file of the demo model is missing", where=str(folder / name),
                           fix="install needle-export again, or make it with: make train-demo")
    return Files(*(folder / name for name in (CHECKPOINT, TOKENIZER, TOOLS, HELDOUT, CARD)))
