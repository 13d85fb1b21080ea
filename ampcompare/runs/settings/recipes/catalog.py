"""The recipes that ship with this package, by name."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, close_matches
from ampcompare.runs.settings.file import SettingsFile, read_settings

__all__ = ["list_recipes", "load_recipe", "recipe_names"]

OLD_FOLDERS = {"seeds/": "articles/"}
FOLDER = Path(__file__).resolve().parent


@cache
def _paths() -> dict[str, Path]:
    """Return the file of each recipe, those of the top folder first."""
    named = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in FOLDER.rglob("*.yaml")}
    return dict(sorted(named.items(), key=lambda item: (item[0].count("/"), item[0])))


def load_recipe(name: str) -> SettingsFile:
    """Read a recipe by its name, such as `articles/r50-imagenet-apex`; its old name is read too.

    Raises:
        ConfigError: there is none of that name; the nearest is named.
    """
    import yaml

    known = _paths()
    for old, new in OLD_FOLDERS.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    if name not in known:
        last = {full.rpartition("/")[2]: full for full in known}
        close = close_matches(name, [*known, *last])
        hint = f"did you mean {last.get(close[0], close[0])!r}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"there is no recipe {name!r}; {hint}")
    values: dict[str, Any] = yaml.safe_load(known[name].read_text(encoding="utf-8"))
    return read_settings(values, f"recipe {name}")


def recipe_names() -> list[str]:
    """Return the name of each recipe."""
    return list(_paths())


def list_recipes() -> list[tuple[str, bool, str]]:
    """Return (name, available, title) of each recipe."""
    return [(name, True, load_recipe(name).matrix.title) for name in _paths()]
