"""Checkpoints as files and folders, written atomically and verified when read."""
