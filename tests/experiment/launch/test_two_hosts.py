"""Two hosts, simulated by network namespaces that a cable joins, where this may be done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampcompare.results.records.run import read_record

ADDRESSES = ("10.77.0.1", "10.77.0.2")
WORDS = [
    *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0]),
    *("--master-port", "29513", "-m", "ampcompare", "run", "--parallel", "ddp"),
    *("--data", "synthetic", "--train-size", "64", "--val-size", "33", "--image-size", "8", "--epochs", "1"),
    *("--device", "cpu", "--batch-size", "8", "--no-progress"),
]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Names of two namespaces, each with one end of a cable."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian: iproute2)")
    names = [f"amp{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    try:
        _ip("link", "add", "end0", "netns", names[0], "type", "veth", "peer", "name", "end1", "netns", names[1])
        for number, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"end{number}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"end{number}", "up")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


@pytest.mark.slow
def test_two_hosts_train_together(hosts: list[str], tmp_path: Path) -> None:
    """torchrun on each of two hosts, told where to meet, trains one cell; the first host alone has the result."""
    started = []
    for number, name in enumerate(hosts):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", *WORDS]
        command[command.index("--nnodes") : command.index("--nnodes")] = ["--node-rank", str(number)]
        command += ["-o", str(tmp_path / name)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"end{number}"}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outcomes = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outcomes
    assert outcomes[0][0].count("top-1 %") == 1
    assert outcomes[1][0] == ""
    record = read_record(next((tmp_path / hosts[0]).glob("cells/*/record.json")))
    assert record.processes is not None
    assert (record.processes.world_size, record.processes.nodes) == (2, 2)
