"""Which functions of a module are followed."""

from textwrap import dedent

import pytest

from ampcompare.source.lint.module import training_scopes
from ampcompare.source.module import Module

SCRIPT = """
import torch
from apex.amp import initialize as prepare

class Trainer:
    def fit(self, batch):
        self.update(self.model(batch))
    def update(self, loss):
        loss.backward()
    def save(self):
        torch.save(self.model.state_dict(), "last")

def closure_step(optimizer, closure):
    optimizer.step(closure)

def with_closure():
    def closure():
        return loss.backward()
    optimizer.step(closure)

def wrap(model):
    return prepare(model)

def grow(trainer):
    trainer.scaler.update()

def read(path):
    return [line for line in open(path)]

read("data")
"""


def followed(text: str) -> set[str]:
    return {getattr(scope.node, "name", "module") for scope in training_scopes(Module(dedent(text)))}


def test_functions_of_training_and_their_callers_are_followed() -> None:
    """A call of training counts by its own name or that of an import, and so does what leads to it."""
    assert followed(SCRIPT) == {"fit", "update", "with_closure", "closure", "closure_step", "wrap", "grow"}


@pytest.mark.parametrize("line", ["criterion = torch.nn.BCELoss()", "x = torch.nn.BCEWithLogitsLoss()"])
def test_a_loss_of_any_name_makes_all_followed(line: str) -> None:
    """An object may be called by any name, so its class decides, and only the class itself."""
    assert ("read" in followed(SCRIPT + line)) == ("BCELoss" in line)
