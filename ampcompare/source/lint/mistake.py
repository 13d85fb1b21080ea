"""One mistake, with its code, its texts and an example with a harmless twin, and a finding of it in a script."""

from __future__ import annotations

from dataclasses import dataclass, field

from ampcompare.source.edits import Edit

__all__ = ["Finding", "Mistake"]


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalog.

    Attributes:
        code: `AMP1..` misuse of Apex, `AMP2..` of `torch.amp`, `AMP3..` removed or deprecated, `AMP4..` style; empty
            for what only a guard sees at run time.
        name: in messages of guards and in the documentation.
        mistake: what the script does.
        matters: what that does to the training.
        remedy: what to write instead.
        example: code with the mistake, on each line that ends in a comment with the code.
        harmless: code that looks like it and is right.
        fixable: whether `lint --fix` can correct it where it is sure.
        by_default: whether `lint` reports it unless it is asked not to.
        guard: the guard of `exec` that sees the same mistake at run time, if it has another name.
    """

    code: str
    name: str
    mistake: str
    matters: str
    remedy: str
    example: str = ""
    harmless: str = ""
    fixable: bool = False
    by_default: bool = True
    guard: str = ""


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
