"""torch.compile in scripts under arms."""

import os
from pathlib import Path
from typing import Any

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


@pytest.mark.integration
def test_a_network_is_compiled_once(forked_python: Any, tmp_path: Path) -> None:
    """What is called in the place of a module asks nothing whose answer is another one while torch compiles."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["-m", "ampcompare", "exec", "--no-guards", "--arm", "script", "train.py"]
    done = forked_python.run(words, tmp_path, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "compiled 1\n" in done.stdout
