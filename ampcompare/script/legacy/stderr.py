"""Lines on stderr: one for each thing that is not as the script asked, the first time that it matters."""

from __future__ import annotations

import sys

from ampcompare.guards import Violation

__all__ = ["note", "print_violation"]

_printed: set[str] = set()


def note(text: str) -> None:
    """Print `ampcompare: TEXT` on stderr, once per text and process."""
    if text not in _printed:
        _printed.add(text)
        print(f"ampcompare: {text}", file=sys.stderr, flush=True)


def print_violation(violation: Violation) -> None:
    """Print `ampcompare guard NAME: FILE:LINE: WHAT; REMEDY` on stderr."""
    print(f"ampcompare {violation}", file=sys.stderr, flush=True)
