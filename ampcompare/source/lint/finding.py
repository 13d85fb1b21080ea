"""What lint reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcompare.source.edits import Edit

__all__ = ["Finding"]


@dataclass(frozen=True, eq=False)
class Finding:
    """A mistake at a place.

    Attributes:
        code: of the mistake.
        line: from 1, in the text of the document.
        column: from 0, in characters.
        message: what was seen here, without the remedy.
        edits: of the fix, which belong together; none where no fix is sure.
        last_line: of the statement, whose comments may silence it.
    """

    code: str
    line: int
    column: int
    message: str
    edits: tuple[Edit, ...] = field(default=())
    last_line: int = 0
