"""Colors of a terminal, and whether one has them."""

from __future__ import annotations

import os
from typing import Literal, TextIO

__all__ = ["Tone", "has_color", "paint"]

Tone = Literal["", "good", "bad", "open", "muted", "strong"]
CODES: dict[Tone, str] = {"good": "32", "bad": "31", "open": "33", "muted": "2", "strong": "1"}


def has_color(stream: TextIO) -> bool:
    """Return whether text for a stream is colored: on a terminal, unless NO_COLOR or TERM=dumb say no.

    FORCE_COLOR colors what goes elsewhere too. An empty variable says nothing.

    Source: https://no-color.org, https://force-color.org.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, tone: Tone) -> str:
    """Return text between the codes of a tone."""
    return f"\x1b[{CODES[tone]}m{text}\x1b[0m" if tone and text.strip() else text
