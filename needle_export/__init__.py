"""needle-export: Needle 3 checkpoints in, verified on-device artifacts and their reports out."""

__version__ = "0.1.0"
