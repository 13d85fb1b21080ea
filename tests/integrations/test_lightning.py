"""Lightning's `Trainer` with a precision plugin of ampcompare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import CheckpointError, ConfigError, UnsupportedCombination

pytest.importorskip("lightning", reason="not installed: pip install lightning")

import lightning
from torch.utils.data import DataLoader, TensorDataset

from ampcompare.integrations.lightning import AmpComparePrecision
from ampcompare.training.precision.base import make_precision
from tests.script.small_script import network

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice on loaders and loggers
]


class Module(lightning.LightningModule):
    """The small network; the loss of batch 2 overflows fp16 where `overflows`."""

    def __init__(self, *, overflows: bool = False) -> None:
        super().__init__()
        self.body, self.overflows = network(), overflows

    def forward(self, x: Tensor) -> Any:
        return self.body(x)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        return loss * float("inf") if self.overflows and number == 2 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(16, 6, generator=draws), torch.randint(0, 3, (16,), generator=draws))


def trained(tmp_path: Path, module: Module, **options: Any) -> Any:
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
        },
        **{"enable_progress_bar": False, "enable_model_summary": False, "gradient_clip_val": 1.0},
        **{"default_root_dir": tmp_path, **options},
    )
    trainer.inputs_in_weight_type(module, DataLoader(data(), batch_size=4))
    return trainer


@pytest.mark.parametrize("arm", ["native:bf16", "native:fp16", "apex:O2"])
def test_plugin_trains_as_ampcompares_loop(tmp_path: Path, arm: str) -> None:
    """Weights after an epoch with clipping and a skipped step equal those of a loop with the arm's precision."""
    module, by_hand = Module(overflows=True), network()
    plugin = AmpComparePrecision(arm, record=tmp_path / "steps.jsonl")
    trained(tmp_path, module, plugins=[plugin])
    precision = make_precision(arm, device="cpu")
    (model,), (optimizer,) = precision.prepare(
        [by_hand], [torch.optim.SGD(by_hand.parameters(), 0.1, momentum=0.9)]
    )
    for number, (x, y) in enumerate(DataLoader(data(), batch_size=4)):
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        precision.backward(loss * float("inf") if number == 2 else loss, [optimizer])
        nn.utils.clip_grad_norm_(precision.unscale(optimizer), 1.0)
        precision.step(optimizer)
        optimizer.zero_grad()
    pairs = zip(module.body.parameters(), by_hand.parameters(), strict=True)
    if arm == "native:bf16":  # nothing is skipped: all is NaN in both
        assert all(torch.equal(one.isnan(), other.isnan()) for one, other in pairs)
    else:
        assert all(torch.equal(one, other) for one, other in pairs)
        assert (plugin.steps.total, plugin.steps.skipped) == (4, 1)
        assert plugin.steps.loss_scales == (2.0**15,)
    kinds = [json.loads(line).get("kind") for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert kinds.count("step") == 4


@pytest.mark.parametrize("arm", ["native:bf16", "apex:O2", "fp8:over=half:bf16"])
def test_batches_get_the_type_of_the_weights(arm: str) -> None:
    if arm.startswith("fp8"):
        pytest.importorskip("torchao", reason="not installed: pip install torchao")
    plugin, model = AmpComparePrecision(arm), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    plugin.connect(model, [torch.optim.SGD(model.parameters(), 0.1)], [])
    assert plugin.convert_input(torch.ones(1)).dtype is next(model.parameters()).dtype


def test_state_is_of_one_arm(tmp_path: Path) -> None:
    """Loss scales of a checkpoint are refused by another arm, as are guards of no such name, and arms of Fabric."""
    state = AmpComparePrecision("native:fp16").state_dict()
    with pytest.raises(CheckpointError, match=r"of native:fp16, and this training of apex:O1"):
        AmpComparePrecision("O1").load_state_dict(state)
    with pytest.raises(ConfigError, match="guards is 'loud'; choose one of warn, strict, off"):
        trained(tmp_path, Module(), plugins=[AmpComparePrecision(guards="loud")])
    with pytest.raises(UnsupportedCombination, match="a Trainer has its own; use native:bf16"):
        AmpComparePrecision("fabric:bf16-mixed")


@pytest.mark.parametrize("arm", ["native:fp16", "apex:O2"])
def test_after_a_training(tmp_path: Path, arm: str) -> None:
    """The trainer validates with the optimizers that are prepared; a checkpoint that it saves has the loss scale."""

    class Validated(Module):
        def validation_step(self, batch: list[Tensor], number: int) -> None:
            self.log("val_loss", nn.functional.cross_entropy(self.body(batch[0]), batch[1]))

    trainer = trained(tmp_path, Validated(overflows=True), plugins=[AmpComparePrecision(arm)])
    trainer.validate(trainer.lightning_module, DataLoader(data(), batch_size=4), verbose=False)
    assert trainer.callback_metrics["val_loss"].isfinite()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["AmpComparePrecision"]
    assert saved["arm"] == arm
    assert saved["state"]
