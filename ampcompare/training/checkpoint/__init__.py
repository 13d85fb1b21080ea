"""Checkpoints as files: written so that none is ever half there, read without running what they hold, converted."""
