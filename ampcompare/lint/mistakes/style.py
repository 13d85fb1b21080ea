"""What works, and reads or ages badly; some are only reported on demand."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP401",
        "private-state",
        "the script reads or changes `_amp_state` or `_amp_stash`",
        "these are private: other versions and other engines may not have them",
        "pass `loss_scale`, `min_loss_scale` and `max_loss_scale` to `amp.initialize`, or set a GradScaler's arguments",
        """
from apex import amp

amp._amp_state.loss_scalers[0]._loss_scale = 2**20  # AMP401
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, max_loss_scale=2**20)
""",
    ),
    Mistake(
        "AMP402",
        "initialize-discarded",
        "the result of `amp.initialize` is discarded",
        "it works only because Apex changes model and optimizer in place",
        "write `model, optimizer = amp.initialize(model, optimizer, ...)`",
        """
from apex import amp

amp.initialize(model, optimizer, opt_level="O1")  # AMP402
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
""",
        fixable=True,
    ),
    Mistake(
        "AMP403",
        "boolean-flag",
        "an option of mixed precision has `type=bool`",
        'any non-empty string is true: `--fp16 False` switches fp16 on, as `bool("False")` is True',
        'write `action="store_true"`, or `action=argparse.BooleanOptionalAction`',
        """
parser.add_argument("--fp16", type=bool, default=False)  # AMP403
""",
        """
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--shuffle", type=bool, default=False)
""",
    ),
    Mistake(
        "AMP404",
        "star-import",
        "`from apex.fp16_utils import *`",
        "it hides which names are used, often only `to_python_float`",
        "import the names that are used",
        """
try:
    from apex.fp16_utils import *  # AMP404
except ImportError:
    pass
""",
        """
try:
    from apex.fp16_utils import to_python_float
except ImportError:
    pass
""",
    ),
    Mistake(
        "AMP405",
        "accumulation-unscales",
        "gradients are accumulated with a plain `scale_loss` for every micro-batch",
        "correct but slower: Apex unscales and checks after each micro-batch, and may change the scale in between",
        "pass `delay_unscale=True` for all micro-batches except the last one before the step",
        """
from apex import amp

for i, batch in enumerate(loader):
    with amp.scale_loss(loss / 4, optimizer) as scaled_loss:  # AMP405
        scaled_loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
""",
        """
from apex import amp

for i, batch in enumerate(loader):
    last = (i + 1) % 4 == 0
    with amp.scale_loss(loss / 4, optimizer, delay_unscale=not last) as scaled_loss:
        scaled_loss.backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
""",
        by_default=False,
    ),
    Mistake(
        "AMP406",
        "one-scaler-for-all",
        "several optimizers share one loss scaler of Apex",
        "an overflow of one network halves the scale of the others, but does not skip their steps",
        "pass `num_losses` to `amp.initialize` and `loss_id` to `scale_loss`",
        """
from apex import amp

[net_g, net_d], [opt_g, opt_d] = amp.initialize([net_g, net_d], [opt_g, opt_d])  # AMP406
""",
        """
from apex import amp

[net_g, net_d], [opt_g, opt_d] = amp.initialize([net_g, net_d], [opt_g, opt_d], num_losses=2)
""",
        by_default=False,
    ),
    Mistake(
        "AMP407",
        "loaded-before-initialize",
        "the state of the optimizer is loaded before `amp.initialize`",
        "Apex documents the other order; under O2 this one is the safer, as moments are not cast to fp16",
        "follow Apex's order under O1: initialize, then load",
        """
from apex import amp

optimizer.load_state_dict(checkpoint["optimizer"])
model, optimizer = amp.initialize(model, optimizer)  # AMP407
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer)
optimizer.load_state_dict(checkpoint["optimizer"])
""",
        by_default=False,
    ),
    Mistake(
        "AMP408",
        "evaluation-without-autocast",
        "a function with `torch.no_grad` calls the model outside autocast, in a module that trains with it",
        "correct but slower; accuracy is measured in another precision than users of the model will have",
        "evaluate under the same autocast",
        """
import torch


def train(model, batch):
    with torch.autocast("cuda"):
        return model(batch)


@torch.no_grad()
def evaluate(model, batch):
    return model(batch)  # AMP408
""",
        """
import torch


def train(model, batch):
    with torch.autocast("cuda"):
        return model(batch)


@torch.no_grad()
def evaluate(model, batch):
    with torch.autocast("cuda"):
        return model(batch)
""",
        by_default=False,
    ),
    Mistake(
        "AMP409",
        "scaler-of-main",
        "a function reads a global GradScaler that is None or off until the function that runs the script sets it",
        "a script that imports the function silently trains in fp32, whatever its options say",
        "pass the scaler as an argument",
        """
import argparse
import torch

scaler = None


def train(model, batch, optimizer):
    if scaler is None:
        model(batch).backward()
        optimizer.step()
    else:
        scaler.scale(model(batch)).backward()  # AMP409
        scaler.step(optimizer)
        scaler.update()


def main():
    global scaler
    args = argparse.ArgumentParser().parse_args()
    scaler = torch.amp.GradScaler("cuda")
""",
        """
import argparse
import torch


def train(model, batch, optimizer, scaler=None):
    if scaler is None:
        model(batch).backward()
        optimizer.step()
    else:
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()


def main():
    args = argparse.ArgumentParser().parse_args()
    scaler = torch.amp.GradScaler("cuda")
""",
    ),
)
