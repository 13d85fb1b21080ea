"""What the files around a module say about it: whether training begins in one of them and goes on in another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["trains_across_files"]

IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import\b|import[ \t]+([\w.]+))", re.MULTILINE)
# Of Apex, or of files that are migrated already.
INITIALIZES = re.compile(r"\bamp\.initialize\(|\.(?:grad_scaler|precision) = ")
NEEDS = re.compile(
    r"\bamp\.(?:scale_loss|master_params|state_dict|load_state_dict)\(|\.(?:grad_scaler|precision)(?:\.| if )"
)
LEVELS = 3  # folders above a module in which the modules that it imports are looked for


def trains_across_files(path: Path, text: str) -> bool:
    """Return whether a module that initializes gives its optimizer to functions of another module that need the scaler.

    They train, or save it. That is so if it imports from such a module, or if another script next to it initializes and
    imports from it.
    """
    if INITIALIZES.search(text) is None:
        return False
    if any(NEEDS.search(_text(each)) for each in _imported(path, text)):
        return True
    if NEEDS.search(text) is None:
        return False
    for folder in (path.parent, path.parent.parent):
        for other in sorted(folder.glob("*.py")):
            if other != path and INITIALIZES.search(content := _text(other)) and path in _imported(other, content):
                return True
    return False


def _imported(path: Path, text: str) -> Iterator[Path]:
    """Yield the files around a module that it imports."""
    for match in IMPORT.finditer(text):
        name = match.group(1) or match.group(2)
        parts = [part for part in name.split(".") if part]
        folders = [path.parent, *path.parent.parents][:LEVELS]
        if name.startswith(".") and len(name) - len(name.lstrip(".")) <= len(folders):
            folders = [folders[len(name) - len(name.lstrip(".")) - 1]]
        for folder in folders if parts else ():
            found = folder.joinpath(*parts).with_suffix(".py")
            if found != path and found.is_file():
                yield found
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
