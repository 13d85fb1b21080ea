"""Scripts that train by a library which has a precision of its own: the arm decides."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import UnsupportedCombination
from tests.script.behind.test_stand_in import RecordedSteps
from tests.script.small_script import batch, network

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command is available")


def fabric_weights(precision: str) -> list[Tensor]:
    """Return the weights after three steps of a script for Fabric, with clipping."""
    fabric_module = pytest.importorskip(
        "lightning_fabric", reason="not installed: pip install lightning-fabric"
    )
    fabric = fabric_module.Fabric(accelerator="cpu", devices=1, precision=precision)
    inner = network()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        x, y = batch(step)
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().float().clone() for param in inner.parameters()]


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "apex:O2"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_of_fabric_makes_no_difference(behind: Any, arm: str, precision: str) -> None:
    """Fabric's flag, whose plugin casts inputs or weights, leaves the bits of an arm as they are, and is noted."""
    behind(arm)
    want = fabric_weights("32-true")
    behind.end()
    rows = RecordedSteps()
    behind(arm, rows)
    assert all(map(torch.equal, fabric_weights(precision), want))
    assert [note for note in rows.notes if precision in note]


def test_as_written_keeps_precision_of_fabric(behind: Any) -> None:
    """Under `script` the plugin trains as it does by itself."""
    want = fabric_weights("bf16-mixed")
    rows = RecordedSteps()
    behind("script", rows)
    assert all(map(torch.equal, fabric_weights("bf16-mixed"), want))
    assert not [note for note in rows.notes if "in the place of" in note]


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
@pytest.mark.parametrize("arm", ["native:bf16", "apex:O1", "apex:O2"])
def test_a_step_through_a_wrapper_is_that_of_one_device(behind: Any, arm: str) -> None:
    """Lightning calls `training_step` as `forward` of the wrapper under DDP; the arm acts on what the step calls."""
    strategy = pytest.importorskip("lightning.pytorch.strategies.strategy", reason="needs lightning")

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, step: int) -> Tensor:
            x, y = batch(step)
            return nn.functional.cross_entropy(self.net(x), y)

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, step: int) -> Any:
            return self.module(step)

    weights = []
    for is_wrapped in (False, True):
        behind(arm)
        redirection = strategy._ForwardRedirection()
        module = Module()
        wrapper = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(3):
            loss = (
                redirection(wrapper, module, "training_step", step)
                if is_wrapped
                else module.training_step(step)
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().float().clone() for param in module.parameters()])
        behind.end()
        del wrapper, module, optimizer
    assert all(map(torch.equal, *weights))


def test_weights_that_lightning_froze_thaw(behind: Any) -> None:
    """`untoggle_optimizer` finds only what optimizers hold; masters may have taken the places of what it froze."""
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    module = lightning.LightningModule()
    module._trainer = SimpleNamespace(optimizers=[])
    param = nn.Parameter(torch.zeros(1), requires_grad=False)
    for arm, thaws in ((None, False), ("apex:O2", True)):
        if arm is not None:
            behind(arm)
        param.requires_grad = False
        module._param_requires_grad_state = {param: True}
        module.untoggle_optimizer(None)
        assert param.requires_grad is thaws


def test_double_precision_is_refused(behind: Any) -> None:
    """A plugin that no arm can replace ends the script when it is made, with what to take instead."""
    behind("native:bf16")
    with pytest.raises(UnsupportedCombination, match=r"64-true.*native:bf16.*16-mixed"):
        fabric_weights("64-true")


@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
def test_optimizer_of_accelerate_steps_masters(behind: Any) -> None:
    """Accelerate puts a saved `step` back around each step of its scaler, and O2 steps its masters all the same."""
    accelerate = pytest.importorskip("accelerate", reason="not installed: pip install accelerate")
    optimizers = pytest.importorskip("accelerate.optimizer")
    behind("apex:O2")
    accelerate.Accelerator(cpu=True)
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = optimizers.AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    losses = []
    for _ in range(4):
        x, y = batch(0)
        with torch.autocast("cpu"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
        assert not optimizer.step_was_skipped
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("arm", ["native:fp16", "apex:O2"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
def test_accelerate_takes_a_skipped_fused_step_for_done_under_every_arm(
    behind: Any, arm: str, fused: bool
) -> None:
    """The scheduler of a Trainer, whose default optimizer is fused, would go another way under O2 else."""
    accelerate = pytest.importorskip("accelerate", reason="not installed: pip install accelerate")
    optimizers = pytest.importorskip("accelerate.optimizer")
    behind(arm)
    accelerate.Accelerator(cpu=True)
    model = network()
    scaler = torch.amp.GradScaler("cpu")
    made = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    optimizer = optimizers.AcceleratedOptimizer(made, scaler=scaler)
    x, y = batch(0)
    with torch.autocast("cpu"):
        loss = nn.functional.cross_entropy(model(x), y) * 1e30
    scaler.scale(loss).backward()
    optimizer.step()
    assert optimizer.step_was_skipped is not fused


LAUNCHED = """
import os, sys
print("ran", __name__, sys.argv[1:], os.environ["ACCELERATE_MIXED_PRECISION"])
"""


@pytest.mark.integration  # the launcher starts a Python that does nothing
def test_a_launcher_runs_the_script_in_this_process(
    behind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`accelerate launch` of one process would start a Python that knows of no arm."""
    pytest.importorskip("accelerate", reason="not installed: pip install accelerate")
    launch = pytest.importorskip("accelerate.commands.launch")
    behind("native:bf16")
    monkeypatch.setattr(
        launch,
        "prepare_simple_launcher_cmd_env",
        sys.modules["accelerate.utils.launch"].prepare_simple_launcher_cmd_env,
    )
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    for name, value in (("argv", [*sys.argv]), ("path", [*sys.path])):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    arguments = [
        "--cpu",
        "--num_processes=1",
        "--num_machines=1",
        "--mixed_precision=bf16",
        "--dynamo_backend=no",
    ]
    launch.launch_command(
        launch.launch_command_parser().parse_args([*arguments, str(script), "--epochs", "2"])
    )
    assert capsys.readouterr().out == "ran __main__ ['--epochs', '2'] bf16\n"


@pytest.mark.parametrize(("arm", "is_noted"), [("fp32", True), ("script", False)])
@pytest.mark.parametrize("flag", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_with_cast_weights_is_noted(
    behind: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str, arm: str, is_noted: bool
) -> None:
    """A Trainer of transformers casts the weights itself, behind the training."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "trainer.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("transformers", "transformers.trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    rows = RecordedSteps()
    behind(arm, rows)
    from transformers.trainer import Trainer  # type: ignore[import-not-found, unused-ignore]

    for is_in_train in (True, False):
        assert Trainer(SimpleNamespace(**{flag: True}), is_in_train).evaluation_loop() == 1
        noted = [note for note in rows.notes if f"{flag} of transformers casts the weights" in note]
        assert len(noted) == (is_noted and not is_in_train)


TRAINER = """
class Trainer:
    def __init__(self, args, is_in_train):
        self.args, self.is_in_train = args, is_in_train

    def log(self, logs):
        pass

    def evaluation_loop(self):
        return 1
"""
