"""`--verify-resume` of a script, from the commands that have it."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPT = """import argparse
import pathlib
import torch
from torch import nn
IMPORT
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
options = parser.parse_args()
torch.manual_seed(0)
model = nn.Linear(4, 2)DEVICE
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
INITIALIZE
first = 0
if options.resume:
    saved = torch.load(options.resume)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
x = torch.randn(5, 8, 4)
for step in range(first, 5):
    loss = model(x[step]DEVICE).float().square().mean()
    optimizer.zero_grad()
    BACKWARD
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
    torch.save(saved, pathlib.Path("last.pt"))
"""


def said(result: Any) -> str:
    return "\n".join([result.out, *result.lines])


def plain() -> str:
    text = SCRIPT.replace("IMPORT", "").replace("DEVICE", "").replace("INITIALIZE", "")
    return text.replace("BACKWARD", "loss.backward()")


def of_apex() -> str:
    text = SCRIPT.replace("IMPORT", "from apex import amp").replace("DEVICE", ".cuda()")
    text = text.replace(
        "INITIALIZE", 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)'
    )
    return text.replace(
        "BACKWARD", "with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()"
    )


def with_scales(text: str) -> str:
    """Return a script of Apex that saves and loads the state of amp too."""
    saved, loads = '"step": step + 1}', 'first = saved["step"]'
    text = text.replace(saved, f'"amp": amp.state_dict(), {saved}')
    return text.replace(loads, f'amp.load_state_dict(saved["amp"])\n    {loads}')


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def test_each_arm_resumes_from_its_own_file(call: Any, script: Path) -> None:
    script.write_text(plain(), encoding="utf-8")
    given = ("compare", "--verify-resume", "2", "--resume-args", "--resume {checkpoint}", "--device", "cpu")
    result = call(*given, "--arm", "script,native:bf16", "--", "train.py")
    assert result.code == 0, said(result)
    assert said(result).count("  resumes: exact in the 3 steps behind the break") == 2
    result = call(*given, "--arm", "script", "--seeds", "0,1", "--", "train.py")
    assert (result.code, "--verify-resume is for one seed of each arm, not 2" in said(result)) == (2, True)


def test_ranks_are_refused(call: Any, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script.write_text(plain(), encoding="utf-8")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    for command in (("exec", "--device", "cpu"), ("migrate",)):
        result = call(*command, "--verify-resume", "2", "train.py")
        assert (result.code, "this is rank 0 of 2, by environment, and --verify-resume" in said(result)) == (
            2,
            True,
        )
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    result = call(
        "exec", "--device", "cpu", "--verify-resume", "2", "-m", "torch.distributed.run", "train.py"
    )
    assert (result.code, "torch.distributed.run starts ranks, and" in said(result)) == (2, True), said(result)


def test_a_migrated_script_resumes_from_a_file_of_apex(call: Any, script: Path) -> None:
    script.write_text(of_apex(), encoding="utf-8")
    before = script.read_bytes()
    given = ("migrate", "--rewrite", "--verify-resume", "2", "--resume-args", "--resume {checkpoint}")
    result = call(*given, "train.py")
    assert "as migrate rewrites it" in said(result), said(result)
    cause = "by loss scale: the GradScaler starts from scratch: its state is not in the file (train.py:"
    # the script saves no amp.state_dict()
    assert (result.code, cause in said(result)) == (1, True), said(result)
    assert script.read_bytes() == before
    assert [each.name for each in script.parent.iterdir()] == ["train.py"]


def test_a_converted_file_of_apex_is_resumed_by_the_migrated_script(call: Any, script: Path) -> None:
    text = with_scales(of_apex())
    script.write_text(text, encoding="utf-8")
    given = (
        "migrate",
        "--rewrite",
        "--verify-resume",
        "2",
        "--resume-args",
        "--resume {checkpoint}",
        "--convert",
    )
    result = call(*given, "train.py")
    assert result.code == 0, said(result)
    assert "as migrate rewrites it, from a file that convert has made: 3 steps" in said(result)
    assert "resumes: exact in the 3 steps behind the break" in said(result)
    script.write_text(
        text.replace('"model": model.state_dict(), ', "").replace('["model"]', '["optimizer"]'),
        encoding="utf-8",
    )
    result = call(*given, "train.py")
    assert (result.code, "the script (started again) ended with exit code" in said(result)) == (3, True), (
        said(result)
    )
    assert "there are no weights in it" in said(result)


def test_a_script_with_the_adapter_resumes_from_a_file_of_apex(call: Any, script: Path) -> None:
    """Losses and scales are those behind the adapter, and its masters those that it will step."""
    given = (
        "migrate",
        "--adapter",
        "--verify-resume",
        "2",
        "--resume-args",
        "--resume {checkpoint}",
        "train.py",
    )
    script.write_text(with_scales(of_apex()), encoding="utf-8")
    result = call(*given)
    assert "started again, with --resume {checkpoint}, with the adapter: 3 steps" in said(result), said(
        result
    )
    assert (result.code, "resumes: exact in the 3 steps behind the break" in said(result)) == (0, True), said(
        result
    )
    script.write_text(with_scales(of_apex()).replace('"O1"', '"O2"'), encoding="utf-8")
    result = call(*given)
    cause = "by masters: masters are rounded to fp16: they are made again from the fp16 weights at load"
    assert (result.code, cause in said(result)) == (1, True), said(result)
    assert "loss scale" not in said(result), said(result)
    script.write_text(of_apex(), encoding="utf-8")
    cause = "by loss scale: the GradScaler starts from scratch: its state is not in the file (train.py:"
    assert cause in said(call(*given))


def test_masters_that_apex_has_not_saved_are_named(call: Any, script: Path) -> None:
    """The fp32 weights of the rewritten script are the rounded ones of the file."""
    script.write_text(with_scales(of_apex()).replace('"O1"', '"O2"'), encoding="utf-8")
    given = (
        "migrate",
        "--rewrite",
        "--verify-resume",
        "2",
        "--resume-args",
        "--resume {checkpoint}",
        "train.py",
    )
    result = call(*given)
    cause = "by masters: the file has the weights rounded to fp16, and not their masters (train.py:"
    assert (result.code, cause in said(result)) == (1, True), said(result)
