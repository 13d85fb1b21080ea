"""The version, the oldest Python and torch that it runs on, and the newest torch; packaging reads these alone."""

__version__ = "0.1.0"

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 6)  # with `torch.accelerator`, FSDP2's public names and `weights_only=True` as the default
NEWEST_TORCH = (2, 14)  # that was run
