"""A process that ends with the one that started it, whatever it is doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "O_ASYNC"), reason="only POSIX has it")
BUSY = """
from ampcompare.base.processes.child import end_process_at_hangup_in_block
with end_process_at_hangup_in_block(0):
    pass
print("ready", flush=True)
print(input(), flush=True)
with end_process_at_hangup_in_block(0):
    print("busy", flush=True)
    sum(range(10**18))  # no other Python code runs meanwhile
"""


@pytest.mark.parametrize("closed_before", [False, True])
def test_a_hangup_ends_code_that_holds_the_interpreter(closed_before: bool) -> None:
    """The end of the other side ends it, also if it came before; outside the block input is read as usual."""
    command = [sys.executable, "-c", BUSY]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    if not closed_before:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("a request\n")
        process.stdin.flush()
        assert [process.stdout.readline() for _ in range(2)] == ["a request\n", "busy\n"]
    process.stdin.close()
    assert process.wait(20) in ((-signal.SIGKILL, -signal.SIGIO) if closed_before else (-signal.SIGIO,))
    process.stdout.close()


def test_a_call_in_a_child_ends_with_its_caller(tmp_path: Path) -> None:
    """SIGKILL to the caller leaves no child, though it holds the interpreter; its standard input is empty."""
    program, pid = tmp_path / "busy.py", tmp_path / "pid"
    program.write_text(CHILD)
    call = "import sys; from pathlib import Path; from ampcompare.base.processes.call import call_in_child\n"
    call += "call_in_child(Path(sys.argv[1]), options={'file': sys.argv[2]})"
    caller = subprocess.Popen([sys.executable, "-c", call, str(program), str(pid)])
    deadline = time.monotonic() + 20
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = psutil.Process(int(pid.read_text()))
    caller.kill()
    caller.wait()
    assert psutil.wait_procs([child], timeout=20)[1] == []


CHILD = """
import os, pathlib, sys

def busy(file):
    assert sys.stdin.read() == ""
    pathlib.Path(file).write_text(str(os.getpid()))
    sum(range(10**18))
"""
