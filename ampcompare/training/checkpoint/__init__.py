"""Checkpoints as files: the state of a run, written whole, read without running anything, converted."""
