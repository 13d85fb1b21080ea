"""Mistakes in and around Apex's `scale_loss` block, and with the gradients that it leaves."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP103",
        "clip-in-scale-loss",
        "gradients are clipped inside the `scale_loss` block, where they are still scaled",
        "the norm is too large by the loss scale: almost nothing is left of the gradients after unscaling",
        "clip `amp.master_params(optimizer)` after the block",
        """
from apex import amp
import torch

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # AMP103
optimizer.step()
""",
        """
from apex import amp
import torch

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
optimizer.step()
""",
        guard="clip-scaled",
    ),
    Mistake(
        "AMP104",
        "clip-model-under-o2",
        "`model.parameters()` are clipped under opt level O2",
        "these are the fp16 copies; the optimizer uses the fp32 gradients, which stay unclipped",
        "clip `amp.master_params(optimizer)`",
        """
from apex import amp
from torch.nn.utils import clip_grad_norm_

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
clip_grad_norm_(model.parameters(), 1.0)  # AMP104
optimizer.step()
""",
        """
from apex import amp
from torch.nn.utils import clip_grad_norm_

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
""",
        fixable=True,
        guard="clip-scaled",
    ),
    Mistake(
        "AMP105",
        "step-in-scale-loss",
        "`optimizer.step()` inside the `scale_loss` block",
        "the step uses scaled gradients; they are unscaled when the block ends, after the step",
        "step after the block",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
    optimizer.step()  # AMP105
""",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
optimizer.step()
""",
    ),
    Mistake(
        "AMP106",
        "backward-unscaled",
        "`backward()` is called on the loss inside `scale_loss`, not on the scaled loss",
        "the gradients are unscaled without having been scaled: they are too small by the loss scale",
        "call `backward()` on the name that `as` binds",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as scaled_loss:
    loss.backward()  # AMP106
optimizer.step()
""",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as loss:
    loss.backward()
optimizer.step()
""",
        fixable=True,
    ),
    Mistake(
        "AMP107",
        "scale-loss-without-with",
        "`amp.scale_loss` is called without `with`",
        "it returns a context manager: the loss is not scaled and the gradients are not unscaled",
        "write `with amp.scale_loss(loss, optimizer) as scaled_loss:`",
        """
from apex import amp

scaled_loss = amp.scale_loss(loss, optimizer)  # AMP107
scaled_loss.backward()
""",
        """
from apex import amp

block = amp.scale_loss(loss, optimizer)
with block as scaled_loss:
    scaled_loss.backward()
""",
    ),
    Mistake(
        "AMP110",
        "never-unscaled",
        "every `scale_loss` of an optimizer has `delay_unscale=True`, and the optimizer steps",
        "the gradients are never unscaled: each step is too large by the loss scale",
        "leave `delay_unscale` out for the last backward pass before the step",
        """
from apex import amp

for batch in loader:
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:  # AMP110
        scaled_loss.backward()
    optimizer.step()
""",
        """
from apex import amp

for batch in loader:
    with amp.scale_loss(loss, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    with amp.scale_loss(other_loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
""",
    ),
    Mistake(
        "AMP117",
        "gradients-edited-under-o2",
        "gradients of `model.parameters()` are changed between backward pass and step, under opt level O2",
        "these are the fp16 copies; the optimizer uses the fp32 gradients, which stay unchanged",
        "change the gradients of `amp.master_params(optimizer)`",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
for parameter in model.parameters():
    parameter.grad.mul_(mask)  # AMP117
optimizer.step()
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
for parameter in amp.master_params(optimizer):
    parameter.grad.mul_(mask)
optimizer.step()
for parameter in model.parameters():
    parameter.grad = None
""",
    ),
    Mistake(
        "AMP118",
        "scaled-loss-logged",
        "the scaled loss is read as a number",
        "the curve follows the loss scale, not the loss",
        "log the loss itself",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
total += scaled_loss.item()  # AMP118
""",
        """
from apex import amp

with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
total += loss.item()
""",
        fixable=True,
    ),
)
