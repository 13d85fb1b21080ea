"""Checkpoints as files: written whole, read without running anything, inspected and converted."""
