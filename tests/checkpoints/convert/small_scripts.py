"""Small scripts with `apex.amp` and with `torch.amp`, and what they save."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 12
APEX = {"loss_scaler0": {"loss_scale": 16.0, "unskipped": 2}}
SCALER = {
    "scale": 16.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 2,
}
WEIGHTS = {"w": torch.full((9,), 1 / 3)}
OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}


def build(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network with a batch norm, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return model, kind(model.parameters(), lr=1e-2, **options)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x).float(), x[:, :3].argmax(1))


class ApexScript:
    def __init__(
        self,
        amp: Any,
        opt_level: str,
        kind: Any = torch.optim.AdamW,
        model: Any = None,
        optimizer: Any = None,
    ) -> None:
        if model is None:
            model, optimizer = build(kind)
        self.amp = amp
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)

    def load(self, saved: dict[str, Any]) -> None:
        """Restore a checkpoint in the documented order."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.amp.load_state_dict(saved["amp"])

    def step(self, number: int) -> float:
        loss = loss_of(self.model, number)
        with self.amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.amp.state_dict(),
            "epoch": 3,
        }


class NativeScript:
    def __init__(self, kind: Any = torch.optim.AdamW) -> None:
        self.model, self.optimizer = build(kind)
        self.scaler = torch.amp.GradScaler("cpu")

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])

    def step(self, number: int) -> float:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(self.model, number)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": 5,
        }


def steps(script: Any, first: int, count: int) -> list[float]:
    return [script.step(number) for number in range(first, first + count)]


def train_apex(amp: Any, path: Path, opt_level: str, kind: Any = torch.optim.AdamW) -> float:
    """Write the checkpoint of a legacy script; return the loss of the step after it. The session is closed again."""
    script = ApexScript(amp, opt_level, kind)
    steps(script, 0, STEPS)
    torch.save(script.save(), path)
    loss = script.step(STEPS)
    amp._amp_state.close()
    return loss
