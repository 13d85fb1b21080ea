"""Durations as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_duration"]

UNITS = re.compile(r"(?:(\d+)h)?\s*(?:(\d+)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")


def parse_duration(text: str) -> float | None:
    """Return the seconds of `8h26m45s`, `30m`, `8:26:45` or `7:48`; None for anything else, plain numbers included."""
    for pattern in (UNITS, CLOCK):
        match = pattern.fullmatch(text.strip())
        if match and any(match.groups()):
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return 3600 * hours + 60 * minutes + seconds
    return None
