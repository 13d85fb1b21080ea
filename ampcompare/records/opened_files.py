"""Which files the processes of a cell have opened: a list in its folder, one JSON object a line.

`{"wrote": FILE}`, `{"read": FILE}`, and `{"resumed": FILE}` for one in the folder of the cell that an earlier attempt
has left there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OPENED", "OpenedFiles", "forget_reads", "read_opened"]

OPENED = "opened.jsonl"


@dataclass(frozen=True)
class OpenedFiles:
    """What a cell has opened outside of its own folder.

    Attributes:
        written: in the order of their first opening.
        inherited: files that it read before it wrote them itself, or that another cell of the run directory wrote.
        resumed: files in its own folder that an earlier attempt has left and that it read.
    """

    written: list[str]
    inherited: list[str]
    resumed: list[str]


def read_opened(folder: Path) -> OpenedFiles:
    """Return what the processes of a cell have opened."""
    rows = list(_rows(folder))
    order = {kind: {file: at for at, (one, file) in reversed(list(enumerate(rows))) if one == kind} for kind in KINDS}
    wrote, read = order["wrote"], order["read"]
    others: set[str] = set()
    if read and folder.parent.name == "cells":
        for path in folder.parent.glob(f"*/{OPENED}"):
            if path.parent.name != folder.name:
                others.update(file for kind, file in _rows(path.parent) if kind == "wrote")
    inherited = [file for file, at in read.items() if file in others or at < wrote.get(file, at)]
    return OpenedFiles(sorted(wrote, key=wrote.__getitem__), sorted(inherited), sorted(order["resumed"]))


def forget_reads(folder: Path) -> None:
    """Keep of the list what other cells look for: what was written."""
    wrote = [json.dumps({kind: file}) + "\n" for kind, file in _rows(folder) if kind == "wrote"]
    with contextlib.suppress(OSError):
        if wrote:
            (folder / OPENED).write_text("".join(wrote), encoding="utf-8")
        else:
            (folder / OPENED).unlink(missing_ok=True)


KINDS = ("wrote", "read", "resumed")


def _rows(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        lines = (folder / OPENED).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):  # cut off
            yield next(iter(json.loads(line).items()))
