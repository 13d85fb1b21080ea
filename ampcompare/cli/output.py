"""What a command says on stdout when its reader may have gone."""

from __future__ import annotations

import os

import click

__all__ = ["drop_output", "say"]


def say(text: str, *, nl: bool = True) -> None:
    """Write a result to stdout; where nobody reads on, the command goes on all the same, to its exit code."""
    try:
        click.echo(text, nl=nl)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Send what is still buffered nowhere: flushing it at the end would fail again, with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
