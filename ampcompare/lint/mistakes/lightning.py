"""Mistakes with mixed precision in Lightning."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP233",
        "manual-backward",
        "a LightningModule with manual optimization calls `loss.backward()`, and its Trainer uses fp16",
        "the loss is not scaled: gradients underflow, or the step ends with an AssertionError",
        "call `self.manual_backward(loss)`",
        """
import lightning.pytorch as pl


class Module(pl.LightningModule):
    def __init__(self):
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss = self.model(batch)
        loss.backward()  # AMP233
        self.optimizers().step()


trainer = pl.Trainer(precision="16-mixed")
""",
        """
import lightning.pytorch as pl


class Module(pl.LightningModule):
    def __init__(self):
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(self.model(batch))
        self.optimizers().step()


trainer = pl.Trainer(precision="16-mixed")
""",
        fixable=True,
    ),
    Mistake(
        "AMP310",
        "lightning-apex",
        "arguments that selected Apex in the Trainer of Lightning 1",
        "removed in Lightning 2: a TypeError",
        'write `precision="16-mixed"` or `precision="bf16-mixed"`',
        """
import lightning.pytorch as pl

trainer = pl.Trainer(precision=16, amp_backend="apex")  # AMP310
""",
        """
import lightning.pytorch as pl

trainer = pl.Trainer(precision="16-mixed")
""",
    ),
)
