"""What a misspelled name was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["close_matches", "did_you_mean"]

MAX_LENGTH = 80  # matching takes time with the square of the length, and a name can come from anywhere
MAX_LISTED = 12


def close_matches(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the `known` names most similar to `name`, best first; empty if none is.

    Args:
        count: how many at most.
        cutoff: similarity, 0 to 1, below which a name is no match.
    """
    from difflib import get_close_matches  # here, since every command line imports this file and few need it

    return get_close_matches(name[:MAX_LENGTH], list(known), n=count, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> str:
    """Return the end of an error sentence: what `name` was probably meant to be, or else which names are known."""
    names = list(known)
    matches = close_matches(name, names, count=count, cutoff=cutoff)
    if matches:
        return f"did you mean {' or '.join(map(repr, matches))}?"
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"known are {', '.join(names[:MAX_LISTED]) or 'none'}{more}"
