"""The child process: `child.py PROGRAM FILE REQUEST` calls a function of PROGRAM and writes its answer into FILE.

It imports nothing of this package, so that a broken installation fails in the function that is asked, not before.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def end_process_at_hangup(descriptor: int) -> None:
    """Let the system end this process when the other end of a pipe or socket is closed, whatever it is doing.

    No thread could: an import of a large library holds the interpreter for seconds. What the other end writes ends
    this process as well. Windows cannot do it.
    """
    if not hasattr(os, "O_ASYNC"):
        return
    import fcntl

    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([descriptor], [], [], 0.0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def end_process_at_hangup_in_block(descriptor: int) -> Iterator[None]:
    """Let `end_process_at_hangup` hold in a block; needs POSIX."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    end_process_at_hangup(descriptor)
    yield
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def answer_request(program: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a program's function or what it raised, and the warnings that were given."""
    sys.path[:] = request["path"]
    if "AMPCOMPARE_SANDBOX" in os.environ:  # `variables.SANDBOX`; nothing of the package is imported above
        importlib.import_module("ampcompare.base.processes.overlay").enter_sandbox_if_asked()
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[program.stem] = importlib.util.module_from_spec(spec)  # dataclasses look there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            spec.loader.exec_module(module)
            result: dict[str, Any] = {"value": getattr(module, request["function"])(**request["options"])}
        except BaseException as error:  # a package may raise anything when it is imported, SystemExit too
            text = " ".join(str(error).split())
            result = {"failure": f"{type(error).__name__}: {text}" if text else type(error).__name__}
    return {**result, "warnings": [" ".join(str(warning.message).split()) for warning in caught]}


def _end_when_caller_ends() -> None:
    """End when the caller is gone, which holds the other end of standard input; the function reads an empty one."""
    end_process_at_hangup(os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


if __name__ == "__main__":
    _end_when_caller_ends()
    Path(sys.argv[2]).write_text(
        json.dumps(answer_request(Path(sys.argv[1]), json.loads(sys.argv[3]))), encoding="utf-8"
    )
    os._exit(0)  # a crash or a hang while Python shuts down does not change the answer
