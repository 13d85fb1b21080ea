"""Prepare the processes that a script starts as their parent was prepared.

A forked child inherits everything. One that multiprocessing spawns first unpickles a message of its parent and then
imports the script; the message carries the settings, so that `import apex` is resolved before the script is imported.
A rank that a launcher in this process starts by a command of Python, as Lightning, `accelerate launch` and torchrun do,
gets `ampcompare exec` into its command.
"""

import dataclasses
import functools
import multiprocessing
import multiprocessing.process
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.script.invocation.exec_settings import ExecSettings

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


class _BootstrapMessage:
    """Unpickles by running the bootstrap in the child."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, (self._source, {})


def call_first_in_children(values: dict[str, Any], target: str) -> None:
    """Let every process of multiprocessing call `MODULE:FUNCTION` first, with `values` and its name."""
    original = multiprocessing.spawn.get_preparation_data
    module, _, function = target.partition(":")

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        # The name is the only value that is unique to a child and known before the child exists.
        source = BOOTSTRAP.format(root=ROOT, module=module, function=function, values=values, name=name)
        data["ampcompare"] = _BootstrapMessage(source)
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def put_exec_before_started_ranks(settings: ExecSettings) -> None:
    """Let every rank that is started by a command of Python from now on run under the settings."""
    start: Any = subprocess.Popen.__init__

    @functools.wraps(start)
    def init(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        global _started
        environment = options.get("env")
        if environment is not None and (command := _command_under_exec(args, environment, settings)):
            args = command
            _started += 1
        start(process, args, *rest, **options)

    subprocess.Popen.__init__ = init  # type: ignore[assignment, method-assign]


def _command_under_exec(args: Any, environment: Mapping[str, str], settings: ExecSettings) -> list[str]:
    """Return the command of a rank with `ampcompare exec` in it; empty for any other command.

    A rank has a place in its group that this process lacks; what a rank starts inherits its own.
    """
    rank = environment.get("LOCAL_RANK")
    if rank is None or rank == os.environ.get("LOCAL_RANK") or isinstance(args, str | bytes | os.PathLike):
        return []
    words = [os.fspath(word) for word in args]
    place = _find_script_index(words)
    if place is None or words[0] != sys.executable or words[place : place + 1] == ["ampcompare"]:
        return []
    is_module = words[place - 1] == "-m"
    flags = words[1 : place - is_module]
    return [
        *(
            words[0],
            *flags,
            "-m",
            "ampcompare",
            "exec",
            *_words_of_exec_options(settings, rank),
            *["-m"] * is_module,
        ),
        *words[place:],
    ]


def _find_script_index(words: Sequence[str]) -> int | None:
    """Return the index of the script or module in a command of Python; None if it runs neither."""
    place = 1
    while place < len(words) and words[place].startswith("-"):
        if words[place] == "-m":
            return place + 1
        if words[place] in ("-", "-c"):
            return None
        place += 1 + (words[place] in ("-W", "-X"))
    return place if place < len(words) else None


def _words_of_exec_options(settings: ExecSettings, rank: str) -> list[str]:
    """Return the options of `exec`; each rank that is started records into a file of its own."""
    if settings.record is not None:
        record = Path(settings.record)
        own = record.with_name(f"{record.stem}.started{rank}{record.suffix}")
        settings = dataclasses.replace(settings, record=str(own))
    return settings.exec_options


def start_counting_child_processes() -> None:
    """Count what multiprocessing starts from now on, workers of data loaders aside."""
    processes: Any = multiprocessing.process.BaseProcess
    start = processes.start

    def start_counted(process: Any) -> None:
        global _started
        module = getattr(process._target, "__module__", None) or ""
        _started += not module.startswith("torch.utils.data.")
        start(process)

    processes.start = start_counted


def num_started_processes() -> int:
    """Return how many processes were started, each of which may train."""
    return _started
