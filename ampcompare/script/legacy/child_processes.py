"""Prepare the processes that a script starts by multiprocessing (spawn, forkserver) as their parent was prepared.

A forked child inherits everything. A spawned one first unpickles a message of its parent and then imports the script;
the message carries the settings, so that `import apex` is resolved before the script is imported.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["count_starts", "pass_on", "started"]

ROOT = str(Path(__file__).resolve().parents[3])
# The child's own sys.path may not contain a checkout that is not installed.
BOOTSTRAP = """\
import importlib, sys
sys.path.insert(0, {root!r})
try:
    module = importlib.import_module({module!r})
finally:
    sys.path.remove({root!r})
module.{function}({values!r}, {name!r})
"""

_started = 0


class _Message:
    """Unpickles by running the bootstrap in the child."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (self._source, {})


def pass_on(values: dict[str, Any], target: str) -> None:
    """Let every process that multiprocessing starts from now on call a function with the settings first.

    Args:
        values: of the settings; each must have a `repr` that Python can read.
        target: "MODULE:FUNCTION"; the function gets `values` and the name of the process, such as "SpawnProcess-1".
    """
    original = multiprocessing.spawn.get_preparation_data
    module, _, function = target.partition(":")

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        # The name is the only value that is unique to a child and known before the child exists.
        source = BOOTSTRAP.format(root=ROOT, module=module, function=function, values=values, name=name)
        data["ampcompare"] = _Message(source)
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def count_starts() -> None:
    """Count what multiprocessing starts from now on, workers of data loaders aside."""
    processes: Any = multiprocessing.process.BaseProcess
    start = processes.start

    def counted(process: Any) -> None:
        global _started
        module = getattr(process._target, "__module__", None) or ""
        _started += not module.startswith("torch.utils.data.")
        start(process)

    processes.start = counted


def started() -> int:
    """Return how many processes were counted, each of which may train."""
    return _started
