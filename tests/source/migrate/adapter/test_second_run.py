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
SNIPPET = """\
model, optimizer = amp.initialize(model, optimizer)
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
"""
RATES = "from apex.parallel import LARC\n\n\ndef wrap(optimizer):\n    return LARC(optimizer)\n"
ASKING = """\
import rates


def is_there():
    has_apex = True
    try:
        import apex
    except ImportError:
        has_apex = False
    return has_apex
"""


@pytest.mark.parametrize(
    ("head", "others"),
    [
        ("", {}),
        (FUSED, {}),
        ("import rates\n", {"rates.py": RATES}),
        ("import rates\n", {"rates.py": RATES, "asking.py": ASKING}),
        ("", {"rates.py": RATES, "asking.py": ASKING}),
        ("", {"snippet.py": SNIPPET}),
    ],
    ids=[
        "whole",
        "with a part of Apex",
        "with a file on Apex",
        "with a question for it",
        "next to a file on Apex",
        "next to an amp of nowhere",
    ],
)
def test_a_second_run_changes_nothing_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str, others: dict[str, str]
) -> None:
    """Functions of the adapter are no calls of what nothing names, and what it leaves stays as it is."""
    files = {
        "train.py": LOOP + (f"\n\n{head}made = 1" if head else ""),
        "main.py": BESIDE,
        "README.md": "",
        **others,
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    code = main(["migrate", "--write", str(tmp_path)])
    assert "torch_amp_adapter" in (tmp_path / "train.py").read_text(encoding="utf-8")
    first = {name: (tmp_path / name).read_text(encoding="utf-8") for name in files}
    said = [line for line in capsys.readouterr().err.splitlines() if "by hand: " in line]
    assert code == bool(said)
    assert main(["migrate", "--write", str(tmp_path)]) == code
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in files} == first
    again = [line for line in capsys.readouterr().err.splitlines() if "by hand: " in line]
    assert [line.partition("by hand: ")[2] for line in again] == [
        line.partition("by hand: ")[2] for line in said
    ]


def test_a_second_run_leaves_an_adapter_that_a_text_names(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    own = 'import importlib\n\namp = importlib.import_module("apex.amp")'
    old = "scaler = torch.cuda.amp.GradScaler()\n"  # a deprecated name, which the adapter leaves
    file.write_text(LOOP.replace("from apex import amp", own) + old, encoding="utf-8")
    main(["migrate", "--adapter", "--write", str(file)])
    text = file.read_text(encoding="utf-8")
    assert 'import_module("torch_amp_adapter")' in text
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_text(encoding="utf-8") == text
