"""A newcomer with a script of Apex reaches a migrated, verified and resumed training by the proposed commands."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = """
import sys, torch
from apex import amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
start = 0
if len(sys.argv) > 1:
    checkpoint = torch.load(sys.argv[1])
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["KEY"])
    start = checkpoint["step"]
for step in range(start, start + 20):
    x = torch.randn(8, 4).cuda()
    loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "KEY": amp.state_dict(), "step": step + 1}
torch.save(state, "last.pt")
print("from", start, "to", step + 1)
"""


def proposed(text: str, start: str) -> list[str]:
    """Return the words of the last command in a text that begins like this, without `ampcompare`."""
    return shlex.split(re.findall(rf"ampcompare {start}.*", text)[-1].strip("`"))[1:]


@pytest.mark.parametrize("key", ["amp", "scaler", "mixed"])
def test_the_proposed_commands_lead_out_of_apex(
    call: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    forked_runs: None,
    forked_python: Any,
    key: str,
) -> None:
    """With the state of amp under the name of Apex, of torch's scaler, or of the script's own."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("KEY", key))

    def train(*words: str) -> Any:
        command = ["-m", "ampcompare", "exec", "--device", "cpu", "train.py", *words]
        done = forked_python.run(command, tmp_path, os.environ)
        assert done.returncode == 0, done.stderr
        return done

    first = train()
    assert "from 0 to 20" in first.stdout
    assert "`ampcompare migrate`" in call("lint", "train.py").out
    patch = call("migrate", "--rewrite", "train.py")
    assert proposed(patch.err, "migrate --rewrite")[:4] == ["migrate", "--rewrite", "--verify", "train.py"]
    verified = call("migrate", "--rewrite", "--verify", "train.py")
    assert verified.code == 0, verified.out
    assert proposed(verified.out, "compare")[:3] == ["compare", "--reference", "O2"]
    written = call(*proposed(verified.out, "migrate --rewrite --write"))
    assert "apex" not in Path("train.py").read_text()
    words = [
        {"OLD": "last.pt", "NEW": "native.pt"}.get(word, word) for word in proposed(written.err, "convert")
    ]
    converted = call(*words)
    assert converted.code == 0, converted.err
    for file in ("last.pt", "native.pt"):
        assert "from 20 to 40" in train(file).stdout


def test_the_default_leads_to_the_adapter_whose_files_are_those_of_apex(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_runs: None, forked_python: Any
) -> None:
    """O2 has no equivalent to be rewritten to."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("KEY", "amp"))
    command = ["-m", "ampcompare", "exec", "--device", "cpu", "train.py"]
    first = forked_python.run(command, tmp_path, os.environ)
    verified = call(*proposed(first.stderr, "migrate --verify"))
    assert verified.code == 0, verified.out
    assert "train.py takes the adapter: line 8: amp.initialize gets opt_level='O2'" in verified.out
    assert "you can go on with the adapter:" in verified.out
    written = call(*proposed(verified.out, "migrate --write"))
    assert "added torch_amp_adapter.py" in written.err
    assert "import torch_amp_adapter as amp" in Path("train.py").read_text()
    again = forked_python.run([*command, "last.pt"], tmp_path, os.environ)
    assert "from 20 to 40" in again.stdout, again.stderr
