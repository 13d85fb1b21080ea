"""Which codes are reported: prefixes that are selected and ignored, from the command line or pyproject.toml."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, did_you_mean
from ampcompare.base.files.read import FileFault, read_text
from ampcompare.source.lint.catalog import CODES

__all__ = ["Selection", "read_selection"]

KEYS = ("select", "ignore", "exclude")
TABLE = "tool.ampcompare.lint"


@dataclass(frozen=True)
class Selection:
    """What is reported, and which files are left out.

    Attributes:
        select: prefixes of codes; empty for all codes that are reported by default.
        ignore: prefixes of codes. Of two prefixes that fit a code the longer one decides, of equal ones this.
        exclude: patterns of files and folders.

    Raises:
        ConfigError: a prefix of no code.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for prefix in (*self.select, *self.ignore):
            if not any(code.startswith(prefix) for code in CODES):
                raise ConfigError(f"no lint code begins with {prefix!r}; {did_you_mean(prefix, CODES)}")

    def reports(self, code: str) -> bool:
        """Return whether findings of a code are reported."""
        return code in _reported(self.select, self.ignore)


@functools.cache
def _reported(select: tuple[str, ...], ignore: tuple[str, ...]) -> frozenset[str]:
    def longest(prefixes: Iterable[str], code: str) -> int:
        return max((len(prefix) for prefix in prefixes if code.startswith(prefix)), default=0)

    chosen = set()
    for code, mistake in CODES.items():
        selected = longest(select, code) if select else int(mistake.by_default)
        if selected > longest(ignore, code):
            chosen.add(code)
    return frozenset(chosen)


def read_selection(paths: Sequence[Path]) -> Selection:
    """Return the table `[tool.ampcompare.lint]` of the nearest pyproject.toml above the first path that has it.

    Raises:
        ConfigError: a key or a value that cannot be used, or a file that cannot be read.
    """
    start = (paths[0] if paths else Path()).absolute()
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file():
            table = _read_table(file)
            if table is not None:
                return _checked(file, table)
    return Selection()


def _read_table(file: Path) -> Any:
    parser = next((name for name in ("tomllib", "tomli") if importlib.util.find_spec(name)), None)
    if parser is None:  # Python 3.10
        if TABLE not in file.read_text(encoding="utf-8", errors="replace"):
            return None
        raise ConfigError(f"{file} cannot be read by Python 3.10 alone; run: pip install tomli")
    tomllib = importlib.import_module(parser)
    try:
        table: Any = tomllib.loads(read_text(file))
    except (FileFault, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from None
    for key in TABLE.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _checked(file: Path, table: Any) -> Selection:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {TABLE} is not a table")
    values = {}
    for key, value in table.items():
        if key not in KEYS:
            raise ConfigError(f"{file}: {TABLE} has no key {key!r}; it has {', '.join(KEYS)}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{file}: {TABLE}.{key} must be a list of strings")
        values[key] = tuple(one if key == "exclude" else one.upper() for one in value)
    try:
        return Selection(**values)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
