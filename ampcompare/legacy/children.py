"""Prepare the processes that a script starts by multiprocessing (spawn, forkserver) as their parent was prepared.

A forked child inherits everything. A spawned one first unpickles a message of its parent and then imports the script;
the message is made to carry the settings, so that `import apex` is answered before the script is imported.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.spawn
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampcompare.legacy.settings import ExecSettings

__all__ = ["adopt", "pass_on"]

ROOT = str(Path(__file__).resolve().parent.parent.parent)
# The child's own sys.path may not know a checkout that is not installed.
BOOTSTRAP = """\
import sys
sys.path.insert(0, {root!r})
try:
    from ampcompare.legacy.children import adopt
finally:
    sys.path.remove({root!r})
adopt({settings!r}, {name!r})
"""


class _Message:
    """Unpickles by running the bootstrap in the child."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (self._source, {})


def pass_on(settings: ExecSettings) -> None:
    """Send the settings along with every process that multiprocessing starts from here on."""
    original = multiprocessing.spawn.get_preparation_data
    values = dataclasses.asdict(settings)

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        # The one word that every child has of its own, known before the child exists.
        data["ampcompare"] = _Message(BOOTSTRAP.format(root=ROOT, settings=values, name=name))
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def adopt(values: dict[str, Any], name: str) -> None:
    """Prepare this child.

    Args:
        values: the fields of `ExecSettings`.
        name: of the process, such as "SpawnProcess-1".
    """
    from ampcompare.legacy.settings import ExecSettings

    ExecSettings(**values).apply(child=name)
