"""Run a command until it ends, or until standard input does, as it does when the launcher is killed.

`python -m ampcompare.experiment.launch.script.supervise COMMAND...` ends as the command does, by the same signal.
Signals that ask to end are left to the command, which is in the same process group.
"""

import os
import signal
import subprocess
import sys
import threading

from ampcompare.base.processes.start import kill_with_descendants


def _kill_process_at_end_of_input() -> None:
    while os.read(0, 4096):
        pass
    kill_with_descendants(os.getpid())  # the last that it kills is this process


def main(command: list[str]) -> int:
    """Return the exit code of the command."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            # not ignored: children would inherit that
            signal.signal(getattr(signal, name), lambda number, frame: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_kill_process_at_end_of_input, daemon=True).start()
    code = process.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
