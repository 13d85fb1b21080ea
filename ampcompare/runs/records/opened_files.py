"""Which files the processes of a cell have opened: a list in its folder, one JSON object a line.

`{"wrote": FILE}`, `{"read": FILE, "sha256": ...}`, `{"resumed": FILE, ...}` for one in the folder of the cell that an
earlier attempt has left there, and `{"made": FILE, ...}`, the content of one before anything was computed under an arm.
A file that another cell wrote is data all the same if it was read with such a content: no arm and no training is in it,
whichever cell wrote it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.files.run_files import CellFile, RunFile

__all__ = ["OpenedFiles", "forget_reads", "read_opened"]


@dataclass(frozen=True)
class OpenedFiles:
    """What a cell has opened outside of its own folder.

    Attributes:
        written: in the order of their first opening.
        inherited: files that it read before it wrote them itself, or that another cell of the run directory wrote,
            except for data.
        resumed: files in its own folder that an earlier attempt has left and that it read.
    """

    written: list[str]
    inherited: list[str]
    resumed: list[str]


def read_opened(folder: Path) -> OpenedFiles:
    """Return what the processes of a cell have opened."""
    rows = list(_rows(folder))
    order = {
        kind: {file: at for at, (one, file, _) in reversed(list(enumerate(rows))) if one == kind} for kind in KINDS
    }
    wrote, read = order["wrote"], order["read"]
    others: set[str] = set()
    data: set[tuple[str, str]] = set()
    if read and folder.parent.name == RunFile.CELLS:
        for path in folder.parent.glob(f"*/{CellFile.OPENED}"):
            if path.parent.name != folder.name:
                for kind, file, content in _rows(path.parent):
                    others.update([file] if kind == "wrote" else [])
                    data.update([(file, content)] if kind == "made" else [])
    inherited = [
        file
        for file, at in read.items()
        if (file in others and (file, rows[at][2]) not in data) or at < wrote.get(file, at)
    ]
    return OpenedFiles(sorted(wrote, key=wrote.__getitem__), sorted(inherited), sorted(order["resumed"]))


def forget_reads(folder: Path) -> None:
    """Keep of the list what other cells look for: what was written, and which of it is data.

    Of a cell that read what another one wrote nothing is data: it may have written that again.
    """
    opened = read_opened(folder)
    kinds = ("wrote",) if opened.inherited or opened.resumed else ("wrote", "made")
    kept = [
        {kind: file} | ({"sha256": content} if content else {})
        for kind, file, content in _rows(folder)
        if kind in kinds
    ]
    with contextlib.suppress(OSError):
        if kept:
            (folder / CellFile.OPENED).write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        else:
            (folder / CellFile.OPENED).unlink(missing_ok=True)


KINDS = ("wrote", "read", "resumed", "made")


def _rows(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield of each row its kind, the file, and the digest of its content, "" where it has none."""
    try:
        lines = (folder / CellFile.OPENED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, StopIteration):  # cut off
            row = json.loads(line)
            yield next((kind, row[kind], row.get("sha256", "")) for kind in KINDS if kind in row)
