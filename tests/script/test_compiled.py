"""torch.compile in scripts under arms."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import torch
from torch import nn

graphs = []


def count(graph, _):
    graphs.append(graph)
    return graph.forward


net = torch.compile(nn.Sequential(nn.Linear(8, 2)), backend=count)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
print("compiled", len(graphs))
"""


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("arm", ["script", "fp32"])
def test_a_network_is_compiled_once(tmp_path: Path, arm: str) -> None:
    """What is called in the place of a module asks nothing whose answer is another one while torch compiles.

    In a process of its own, since nothing is compiled in a fork of the tests.
    """
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "ampcompare", "exec", "--no-guards", "--device", "cpu", "--arm", arm, "train.py"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "compiled 1\n" in done.stdout
