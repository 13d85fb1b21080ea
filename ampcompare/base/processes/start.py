"""Start a module in a separate process whose import path lacks the working directory.

`python PACKAGE/processes/start.py -m MODULE ARGUMENTS` is `python -P -m MODULE ARGUMENTS`, which finds the package in
a checkout too, whose folder comes last: a file of the working directory with the name of a library, such as `json.py`,
is never imported.
"""

import contextlib
import os
import runpy
import signal
import sys

import psutil

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs `module` with `arguments`."""
    return [sys.executable, os.path.abspath(__file__), "-m", module, *arguments]


def environment_without_working_directory() -> dict[str, str]:
    """Return the environment of a child, whose own children do not get the working directory on their path either.

    An empty entry of PYTHONPATH, as `PYTHONPATH=$PYTHONPATH:/folder` leaves one, would stand for that directory.
    """
    isolated = dict(os.environ)
    isolated["PYTHONSAFEPATH"] = "1"
    folders = [folder for folder in isolated.pop("PYTHONPATH", "").split(os.pathsep) if folder]
    if folders:
        isolated["PYTHONPATH"] = os.pathsep.join(folders)
    return isolated


def add_working_directory_first() -> None:
    """Put the working directory first into `sys.path`, as `python -m` does, in a process that has no such entry."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())


def exit_code_text(code: int) -> str:
    """Return the end of a sentence about a process with an exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    cause = " (probably the out-of-memory killer)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{cause}"


def kill_process_group(pid: int) -> None:
    """Kill a process and its group, if it runs; without process groups, as on Windows, its children one by one."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in [*leader.children(recursive=True), leader]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def kill_with_descendants(pid: int) -> None:
    """Kill a process, its group and its descendants, of which some may lead groups of their own, as torchrun's do."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    kill_process_group(pid)


def _run_named_module() -> None:
    if not sys.flags.safe_path:
        del sys.path[0]  # Python puts the folder of a script first, and this one holds `call.py`
    index = sys.argv.index("-m") + 1  # options of Python itself may come before it
    module, sys.argv = sys.argv[index], sys.argv[index:]
    root = os.path.dirname(
        PACKAGE
    )  # never the package itself, whose modules are no `apex` and `settings` of a script
    if root not in sys.path:
        sys.path.append(root)
    if "AMPCOMPARE_SANDBOX" in os.environ:  # `variables.SANDBOX`; nothing of the package is imported above
        from ampcompare.base.processes.overlay import enter_sandbox_if_asked

        enter_sandbox_if_asked()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_named_module()
