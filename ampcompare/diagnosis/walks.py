"""Walks along the results of a step, from each to those that it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

__all__ = ["walked_back"]


def walked_back(ends: Iterable[int], before: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Yield each place that is reached from `ends` by going to the places before it, once, in no order."""
    seen: set[int] = set()
    todo = list(ends)
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            yield at
            todo += before(at)
