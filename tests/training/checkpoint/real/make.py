"""Make the checkpoints of this folder: each program's own trainer and saver, three steps of a small network on the CPU.

    python make.py timm|timm-apex|mmengine|mmengine-apex|lightning

Run it once for each, in an environment with that program and torch; README.md names the versions. The programs train
in mixed precision on GPUs only, or refuse parts of it elsewhere; what is put in place of that is said where it is done.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
STEPS = 3
SCALE = 1024.0


class Layers:
    """The layers of every network here, under the same names."""

    first: nn.Linear
    norm: nn.BatchNorm1d
    last: nn.Linear

    def add_layers(self) -> None:
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def logits(self, x: Tensor) -> Tensor:
        """Return ten numbers for each sample."""
        return self.last(self.norm(self.first(x)).relu())


class Net(nn.Module, Layers):
    """The network for programs that take any module."""

    def __init__(self) -> None:
        super().__init__()
        self.add_layers()

    def forward(self, x: Tensor) -> Tensor:
        """Return ten numbers for each sample."""
        return self.logits(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return sixteen samples and their classes."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x[:, :3].argmax(1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_timm(*, apex: bool) -> None:
    """As timm's `train.py` does, with the namespace of its options and averaged weights."""
    if apex:
        from ampcompare.apex import install

        install()
        from apex import amp
    from timm.utils import ApexScaler, CheckpointSaver, ModelEmaV3, NativeScaler

    model: Any = Net()
    optimizer: Any = adamw(model)
    if apex:
        model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
        scaler: Any = ApexScaler()
    else:
        scaler = NativeScaler("cpu")
        scaler._scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    average = ModelEmaV3(model, decay=0.5)
    for step in range(STEPS):
        x, classes = batch(step)
        with torch.autocast("cpu", dtype=torch.float16, enabled=not apex):
            loss = nn.functional.cross_entropy(model(x), classes)
        optimizer.zero_grad()
        scaler(loss, optimizer)
        average.update(model)
    args = importlib.import_module("argparse").Namespace(model="net", lr=1e-2, amp=True, data_dir=Path("data"))
    saver = CheckpointSaver(model, optimizer, args, average, scaler, checkpoint_dir="saved", recovery_dir="saved")
    Path("saved").mkdir()
    saver.save_checkpoint(1, metric=71.5)
    shutil.copy("saved/last.pth.tar", HERE / f"timm{'-apex' if apex else ''}.pth.tar")


def train_mmengine(*, apex: bool) -> None:
    if apex:
        from ampcompare.apex import install

        install()
    from mmengine.model import BaseModel
    from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper
    from mmengine.optim.optimizer import amp_optimizer_wrapper
    from mmengine.runner import Runner

    class Model(BaseModel, Layers):
        def __init__(self) -> None:
            super().__init__()
            self.add_layers()

        def forward(self, x: Tensor, classes: Tensor, mode: str = "tensor") -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.logits(x), classes)}

    # The wrapper asks for a GPU, and takes the GradScaler of GPUs.
    amp_optimizer_wrapper.is_cuda_available = lambda: True
    amp_optimizer_wrapper.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    model = Model()
    samples = [sample for step in range(STEPS) for sample in zip(*batch(step), strict=True)]
    wrapper: Any = (
        ApexOptimWrapper(opt_level="O1", optimizer=adamw(model))
        if apex
        else AmpOptimWrapper({"init_scale": SCALE}, dtype="bfloat16", optimizer=adamw(model))
    )
    runner = Runner(
        model,
        work_dir="mmengine",
        train_dataloader=torch.utils.data.DataLoader(samples, batch_size=16),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper=wrapper,
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1, "out_dir": "saved"}},
        log_level="ERROR",
    )
    runner.train()
    shutil.copy("saved/mmengine/epoch_1.pth", HERE / f"mmengine{'-apex' if apex else ''}.pth")


def train_lightning() -> None:
    """A `Trainer` with `precision="16-mixed"` and its `ModelCheckpoint`."""
    import fsspec
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    class Module(LightningModule, Layers):
        def __init__(self, rate: float = 1e-2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.add_layers()

        def training_step(self, samples: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self.logits(samples[0]), samples[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

    trainer = Trainer(
        accelerator="cpu",
        # "16-mixed" alone is a plugin for GPUs, which becomes bf16-mixed without one
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))],
        max_epochs=1,
        # whose name is no path of the machine
        callbacks=[ModelCheckpoint("memory://saved", monitor="loss", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([batch(step) for step in range(STEPS)], batch_size=None))
    with fsspec.open("memory://saved/last.ckpt") as file:
        (HERE / "lightning.ckpt").write_bytes(file.read())


PROGRAMS = {
    "timm": functools.partial(train_timm, apex=False),
    "timm-apex": functools.partial(train_timm, apex=True),
    "mmengine": functools.partial(train_mmengine, apex=False),
    "mmengine-apex": functools.partial(train_mmengine, apex=True),
    "lightning": train_lightning,
}

if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    PROGRAMS[sys.argv[1]]()
