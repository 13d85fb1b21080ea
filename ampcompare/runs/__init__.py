"""Runs as data: how they are asked for, what they leave, what several of them say, and how that is shown."""
