"""Refuse a comparison whose code changes while its cells run."""

from __future__ import annotations

from pathlib import Path

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.loaded_code import CODE, DIGITS, SETTINGS, Names, changed_code, differing
from ampcompare.records.run import RunRecord
from ampcompare.settings.config import RunConfig

__all__ = ["SameCode", "code_folder"]


def code_folder(config: RunConfig) -> Path:
    """Return the folder to which the names of a run's own files are relative."""
    return Path.cwd() if config.script is None else config.script.folder


class SameCode:
    """What the cells of a plan have loaded so far.

    Args:
        config: of any cell: all train the same script or recipe.
    """

    def __init__(self, config: RunConfig) -> None:
        self._folder = code_folder(config)
        self._known: dict[str, str] = {}
        self._cells: dict[str, str] = {}
        script = config.script
        if script is not None and script.sha256 is not None and not script.is_module:
            path = Path(script.name).resolve()
            self._known[path.name] = script.sha256[:DIGITS]

    def check(self) -> None:
        """Compare the files on disk with those that cells have loaded.

        Raises:
            ConfigError: one has changed.
        """
        changed = changed_code(self._known, self._folder)
        for name, how in changed.items():
            self._refuse(name, f"is {how}")

    def add(self, record: RunRecord, cell: str) -> None:
        """Add what a cell has loaded.

        Raises:
            ConfigError: it is not what earlier cells have loaded, or what lies on the disk.
        """
        # Files of data may change: a script often writes what another cell reads, and then the cells are no pairs.
        found = (record.code or {}).items()
        code = {name: digest for name, digest in found if name.endswith((*CODE, *SETTINGS))}
        for name in differing(code, self._known):
            self._refuse(name, f"was changed before {cell}")
        names = Names(self._folder)
        for name, digest in code.items():
            if names.path(name) is not None:  # what was removed cannot be loaded in another form
                self._known.setdefault(name, digest)
                self._cells.setdefault(name, cell)
        self.check()

    def _refuse(self, name: str, how: str) -> None:
        since = f"since {self._cells[name]} loaded it" if name in self._cells else "since the command began"
        raise ConfigError(
            f"{name} {how}, {since}: cells of other code are not comparable. Leave the code as it is while a "
            "comparison runs, and run the same command again: cells of earlier code are trained again"
        )
