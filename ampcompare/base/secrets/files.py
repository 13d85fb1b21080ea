"""Find the secrets that stand in the files of a script: in its source, and in the settings that it reads."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ampcompare.base.secrets.masking import MIN_LITERAL, NAME, note_value_if_secret

SETTINGS = {".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".env", ".properties"}
FOLDERS = ("conf", "config", "configs")  # of Hydra, and by habit
MAX_FILES = 200
MAX_BYTES = 2**20  # of a file; a larger one holds data
QUOTED = re.compile(rf"""(?P<name>{NAME})["']?\s*[:=]\s*["'](?P<value>[^"'\n]{{{MIN_LITERAL},}})["']""")
BARE = re.compile(
    rf"""(?m)^\s*(?:export\s+)?(?P<name>{NAME})\s*[:=]\s*(?P<value>[^\s"'{{}}\[\]#,;]{{{MIN_LITERAL},}})\s*(?:#.*)?$"""
)


def note_secrets_in_files(script: str | Path | None, arguments: Sequence[str]) -> None:
    """Take for secrets what has the name of one in a script, or in settings next to it or that its arguments name.

    Values of source code count where they are in quotes. Only memory of this process holds them; `mask` replaces them.

    Args:
        script: its file; None if it cannot be told.
        arguments: of its command line.
    """
    for path in _files_with_settings(script, arguments):
        for name, value in _named_values_in(path):
            note_value_if_secret(name, value)


def _files_with_settings(script: str | Path | None, arguments: Sequence[str]) -> Iterator[Path]:
    named = [Path(word.rpartition("=")[2]) for word in arguments if word]
    found = [path for path in named if path.suffix in SETTINGS | {".py"} or path.name == ".env"]
    if script is not None:
        folder = Path(script).parent
        found += [Path(script), folder / ".env"]
        for name in FOLDERS:
            found += sorted(path for path in (folder / name).rglob("*") if path.suffix in SETTINGS)[
                :MAX_FILES
            ]
    yield from dict.fromkeys([*found, Path(".env")])


def _named_values_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each name with its value; nothing of a file that cannot be read."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for pattern in (QUOTED,) if path.suffix == ".py" else (QUOTED, BARE):
        for match in pattern.finditer(text):
            yield match["name"], match["value"]
