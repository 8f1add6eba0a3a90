"""The reference model in plain PyTorch: what every artifact is held against."""
