"""What a backend says of an arm."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """The parts of an explanation, in the order in which they are read.

    Attributes:
        summary: one sentence.
        does: (what, how) pairs: weights, casts, batch norm, loss scale, ...
        twin: the arm to compare it with; None where there is none.
        twin_is: how near that twin is, in one sentence.
        differs: a sentence for each difference between the two.
        script: lines of Python that do what the arm does.
        twin_script: the same for its twin.
    """

    summary: str
    does: tuple[tuple[str, str], ...]
    twin: str | None
    twin_is: str
    differs: tuple[str, ...]
    script: tuple[str, ...]
    twin_script: tuple[str, ...]
