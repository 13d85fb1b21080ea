"""One line on stderr for everything that is not as the script asked, the first time it matters."""

from __future__ import annotations

import sys

from ampcompare.guards import Finding

__all__ = ["note", "say_finding"]

_said: set[str] = set()


def note(text: str) -> None:
    """Print `ampcompare: TEXT` on stderr, once per text and process."""
    if text not in _said:
        _said.add(text)
        print(f"ampcompare: {text}", file=sys.stderr, flush=True)


def say_finding(finding: Finding) -> None:
    """Print `ampcompare guard NAME: FILE:LINE: WHAT; REMEDY` on stderr."""
    print(f"ampcompare {finding}", file=sys.stderr, flush=True)
