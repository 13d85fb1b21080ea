"""The version, and the oldest Python and torch that it runs on, in a file that packaging reads without any import."""

__version__ = "0.1.0"

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)  # with `torch.accelerator`, FSDP2's public names and `weights_only=True` as the default
