"""Reads checkpoints of any program without running what they hold."""
