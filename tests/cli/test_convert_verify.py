"""`convert --verify`: training that goes on from both files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ampcompare.base.errors import CheckpointError, LaunchError
from ampcompare.base.processes.call import Answer
from ampcompare.cli import main
from ampcompare.experiment import verify_conversion as module
from ampcompare.experiment.verify_conversion import Continued, verify_conversion
from ampcompare.tasks.models import build_model

SETTINGS = """
recipe:
  model: {arch: mlp, args: {width: 8}}
  optimizer: {name: sgd, lr: 0.1}
  data: {name: synthetic, train_size: 64, val_size: 32, image_size: 8}
  batch_size: 16
"""


def legacy(path: Path, *, prefix: str = "module.") -> None:
    """Write what a script with Apex at O1 saves, from inside a DDP wrapper."""
    torch.manual_seed(3)
    model = build_model("mlp", num_classes=10, sample_shape=(3, 8, 8), model_args={"width": 8})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    optimizer.step()
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    amp = {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}}
    torch.save({"model": weights, "optimizer": optimizer.state_dict(), "amp": amp, "epoch": 1}, path)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.slow
def test_both_files_train_on_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A legacy file and its conversion have the same first loss and scale; a damaged conversion ends with 1."""
    monkeypatch.chdir(tmp_path)
    legacy(tmp_path / "a.pt")
    (tmp_path / "mine.yaml").write_text(SETTINGS)
    command = ["convert", "a.pt", "b.pt", "--to", "native", "--verify", "--verify-steps", "3", "-c", "mine.yaml"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verified"]
    assert found["arms"] == ["apex:O1", "native:fp16"]
    assert [len(losses) for losses in found["losses"]] == [3, 3]
    assert found["scales"][0][0] == found["scales"][1][0] == 1024.0
    assert found["differences"][0] <= module.ROUNDING
    state = torch.load(tmp_path / "b.pt")
    state["model"] = {name: value * 1.5 for name, value in state["model"].items()}
    torch.save(state, tmp_path / "b.pt")
    settings = module.validate(module.RunConfig, yaml.safe_load(SETTINGS))
    again = verify_conversion(tmp_path / "a.pt", tmp_path / "b.pt", level="O1", to="native", config=settings, steps=1)
    assert not again.agrees


def test_a_file_of_another_program_needs_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which model and data is not in it, and the message says what to give; the conversion is there."""
    legacy(tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--to", "native", "--verify"]) == 2
    assert "give --config" in capsys.readouterr().err
    assert (tmp_path / "b.pt").exists()


ANSWER = {"arm": "fp32", "losses": ["1.0"], "scales": [[]], "scales_before": [], "skipped": 0}


@pytest.mark.parametrize(
    "answer, error, says",
    [
        (Answer({}, "died", "the process was killed by SIGKILL"), LaunchError, "failed: the process was killed"),
        (Answer({"error": "of another model", "exit_code": 2}, "done"), CheckpointError, "of another model"),
    ],
)
def test_training_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, error: type[Exception], says: str
) -> None:
    """What ends a process, and what does not fit, become errors meant for users."""
    legacy(tmp_path / "a.pt")
    monkeypatch.setattr(module, "call_in_child", lambda *args, **options: answer)
    with pytest.raises(error, match=says):
        verify_conversion(tmp_path / "a.pt", tmp_path / "a.pt", level="O1", to="native", config=module.RunConfig())


def test_the_bound_is_that_of_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First losses apart by 1/128 agree, and more do not; later ones may differ. O0 goes on as fp32."""
    arms: list[Any] = []

    def ask(program: Path, *, seconds: float, options: dict[str, Any], **_: Any) -> Answer:
        arms.append(options["config"]["arm"])
        return Answer(ANSWER, "done")

    legacy(tmp_path / "a.pt")
    monkeypatch.setattr(module, "call_in_child", ask)
    verify_conversion(tmp_path / "a.pt", tmp_path / "a.pt", level="O0", to="native", config=module.RunConfig())
    assert arms == ["apex:O0", "fp32"]
    for second, agrees in ((1.0078125, True), (1.0079, False), (float("nan"), False)):
        found = Continued(("a", "b"), ([1.0, 1.0], [second, 5.0]), ([], []), (0, 0))
        assert found.agrees is agrees
