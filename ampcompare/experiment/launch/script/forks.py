"""Runs of a script, one after another, each in a process that has torch loaded and in a sandbox."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from ampcompare.base.errors import LaunchError
from ampcompare.base.processes.client import ProcessServer, ServerLost
from ampcompare.base.processes.sandbox import open_sandbox
from ampcompare.base.processes.script_environment import ONE_THREAD
from ampcompare.base.processes.start import environment_without_working_directory


class ScriptForkServer:
    """Forks the processes of runs: a process that imports torch for each of them would take seconds.

    They have one thread, and strings that hash alike. The script's output is dropped.
    """

    def __init__(self) -> None:
        self._server = ProcessServer([], {**environment_without_working_directory(), **ONE_THREAD})

    def __enter__(self) -> ScriptForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()

    def run_function(self, function: str, words: Sequence[str], folder: Path, root: Path) -> int:
        """Call `module:function` with words in a process, and return its exit code when it has ended.

        Args:
            folder: where it writes; what it writes elsewhere is dropped.
            root: the folder of the script.

        Raises:
            LaunchError: no process can be started.
        """
        store = folder.parent / f"{folder.name}.store"
        with (
            open_sandbox(store, shared_paths=[folder], roots=[root]) as sandbox,
            open(os.devnull, "wb") as null,
        ):
            environment = {**os.environ, **ONE_THREAD, **sandbox.environment}
            try:
                self._server.wait_until_ready(lambda: False)
                fork = self._server.start_fork(
                    function,
                    list(map(sandbox.path_seen_in_sandbox, words)),
                    output=null.fileno(),
                    environment=environment,
                )
            except ServerLost:
                raise LaunchError(f"the process server {self._server.exit_phrase()}") from None
            return fork.wait()
