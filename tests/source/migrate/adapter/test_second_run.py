"""A project that has taken the adapter: another run changes nothing, and has nothing to say."""

from pathlib import Path

import pytest

from ampcompare.cli import main

LOOP = """\
import argparse

import torch
from apex import amp


def train(model, optimizer, batches):
    model, optimizer = amp.initialize(model, optimizer, opt_level=argparse.level)
    for x in batches:
        loss = model(x).sum()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        print(optimizer._amp_stash)
"""
BESIDE = "import train\nimport torch as pt\n\npt.backends.cuda.matmul.allow_tf32 = True\n"
FUSED = "from apex.optimizers import FusedLAMB\n"


@pytest.mark.parametrize("head", ["", FUSED], ids=["whole", "with a part of Apex"])
def test_a_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str) -> None:
    """Functions of the adapter are no calls of what nothing names, and what it leaves stays as it is."""
    files = {
        "train.py": LOOP + (f"\n\n{head}made = FusedLAMB" if head else ""),
        "main.py": BESIDE,
        "README.md": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    main(["migrate", "--write", str(tmp_path)])
    assert "torch_amp_adapter" in (tmp_path / "train.py").read_text(encoding="utf-8")
    first = {name: (tmp_path / name).read_text(encoding="utf-8") for name in files}
    capsys.readouterr()
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in files} == first
    assert "by hand" not in capsys.readouterr().err
