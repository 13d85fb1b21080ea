"""Mistakes between backward pass and step: what `torch.amp.GradScaler` needs, and the order of calls."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP201",
        "clip-scaled",
        "gradients are clipped while they are scaled, or the fp16 copies of Apex's O2 are clipped",
        "the norm is too large by the factor of the loss scale, so almost nothing is left after "
        "unscaling; under O2 the optimizer uses the fp32 gradients, which stay unclipped",
        "call `scaler.unscale_(optimizer)` before clipping; with Apex clip "
        "`amp.master_params(optimizer)` after the `scale_loss` block",
        """
import torch

scaler.scale(loss).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # AMP201
scaler.step(optimizer)
scaler.update()
""",
        """
import torch

scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
""",
        fixable=True,
    ),
    Mistake(
        "AMP202",
        "step-twice",
        "`optimizer.step()` and `scaler.step(optimizer)` for one backward pass",
        "the second step applies the gradients again, infinite ones included: the weights become NaN",
        "delete `optimizer.step()`: `scaler.step(optimizer)` calls it if the gradients are finite",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)
optimizer.step()  # AMP202
scaler.update()
""",
        """
if use_amp:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
else:
    loss.backward()
    optimizer.step()
""",
        fixable=True,
    ),
    Mistake(
        "AMP203",
        "step-unscaled",
        "the loss is scaled, and the optimizer steps without the scaler",
        "the gradients are too large by the loss scale",
        "call `scaler.step(optimizer)` and `scaler.update()` instead of `optimizer.step()`",
        """
scaler.scale(loss).backward()
optimizer.step()  # AMP203
scaler.update()
""",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
optimizer.step()
""",
        fixable=True,
    ),
    Mistake(
        "AMP204",
        "update-missing",
        "`scaler.step` without `scaler.update`",
        "the loss scale never changes, and the second `unscale_` or step of the optimizer is an error",
        "call `scaler.update()` once after the steps of all optimizers",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)  # AMP204
""",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        fixable=True,
    ),
    Mistake(
        "AMP205",
        "update-between-steps",
        "`scaler.update()` runs between the steps of two optimizers that share backward passes",
        "the second optimizer's gradients are unscaled with a different scale than they were scaled with",
        "call `scaler.update()` once, after the last step",
        """
scaler.scale(loss_a).backward()
scaler.scale(loss_b).backward()
scaler.step(optimizer_a)
scaler.update()  # AMP205
scaler.step(optimizer_b)
scaler.update()
""",
        """
scaler.scale(loss_a).backward()
scaler.step(optimizer_a)
scaler.update()
scaler.scale(loss_b).backward()
scaler.step(optimizer_b)
scaler.update()
""",
    ),
    Mistake(
        "AMP206",
        "unscale-twice",
        "`unscale_` is called twice for one optimizer and update",
        "the second call raises a RuntimeError",
        "call `scaler.unscale_(optimizer)` once per update",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.unscale_(optimizer)  # AMP206
scaler.step(optimizer)
scaler.update()
""",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer_a)
scaler.unscale_(optimizer_b)
scaler.step(optimizer_a)
scaler.step(optimizer_b)
scaler.update()
""",
    ),
    Mistake(
        "AMP207",
        "unscale-after-step",
        "`unscale_` is called after the step of its optimizer",
        "it raises a RuntimeError; the step has unscaled the gradients itself",
        "call `scaler.unscale_(optimizer)` before `scaler.step(optimizer)`",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.unscale_(optimizer)  # AMP207
scaler.update()
""",
        """
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
scaler.scale(other_loss).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "AMP208",
        "scale-missing",
        "`scaler.step(optimizer)` after a backward pass of a loss that no scaler has scaled",
        "the step ends with an AssertionError, or the gradients are unscaled without having been scaled",
        "write `scaler.scale(loss).backward()`",
        """
loss.backward()  # AMP208
scaler.step(optimizer)
scaler.update()
""",
        """
scaled = scaler.scale(loss)
scaled.backward()
scaler.step(optimizer)
scaler.update()
""",
        fixable=True,
    ),
    Mistake(
        "AMP209",
        "update-every-microbatch",
        "`scaler.update()` runs for every micro-batch, and `scaler.step` only for some",
        "an update without a step before it is an AssertionError",
        "call `scaler.update()` next to `scaler.step`, under the same condition",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()  # AMP209
""",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP210",
        "unscale-every-microbatch",
        "`unscale_` runs for every micro-batch, and `scaler.update` only for some",
        "the second `unscale_` before an update raises a RuntimeError",
        "call `scaler.unscale_(optimizer)` once, right before the step",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    scaler.unscale_(optimizer)  # AMP210
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP211",
        "clip-every-microbatch",
        "gradients are clipped after every micro-batch, and the optimizer steps only after some",
        "partial sums are clipped, the first ones several times",
        "clip once, right before the step",
        """
from torch.nn.utils import clip_grad_norm_

for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    clip_grad_norm_(model.parameters(), 1.0)  # AMP211
    if (i + 1) % 4 == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
from torch.nn.utils import clip_grad_norm_

for i, batch in enumerate(loader):
    scaler.scale(model(batch) / 4).backward()
    if (i + 1) % 4 == 0:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP212",
        "clip-after-step",
        "gradients are clipped after the step",
        "clipping has no effect: the step has used the gradients already",
        "clip before the step",
        """
from torch.nn.utils import clip_grad_norm_

for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    clip_grad_norm_(model.parameters(), 1.0)  # AMP212
""",
        """
from torch.nn.utils import clip_grad_norm_

for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(opt_a)
    scaler.unscale_(opt_b)
    clip_grad_norm_(other.parameters(), 1.0)
    scaler.step(opt_b)
    scaler.update()
    opt_a.zero_grad()
    opt_b.zero_grad()
""",
    ),
    Mistake(
        "AMP213",
        "scheduler-first",
        "`scheduler.step()` runs before `optimizer.step()`",
        "the first learning rate is never used, and every update uses that of the next one",
        "call `optimizer.step()` (or `scaler.step(optimizer)`) first, then `scheduler.step()`",
        """
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scheduler.step()  # AMP213
    scaler.step(optimizer)
    scaler.update()
""",
        """
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
""",
        fixable=True,
    ),
    Mistake(
        "AMP214",
        "zero-grad-before-step",
        "`zero_grad()` between backward pass and step",
        "the step has no gradients to apply: nothing is trained",
        "call `zero_grad()` after the step or before the backward pass",
        """
for batch in loader:
    scaler.scale(model(batch)).backward()
    optimizer.zero_grad()  # AMP214
    scaler.step(optimizer)
    scaler.update()
""",
        """
for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    ),
    Mistake(
        "AMP215",
        "zero-grad-missing",
        "a loop steps with a scaler, but the module never clears gradients",
        "gradients add up over all steps; after one overflow they stay infinite and every step is skipped",
        "call `optimizer.zero_grad()` after every step, skipped or not",
        """
for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)  # AMP215
    scaler.update()
""",
        """
for batch in loader:
    for parameter in model.parameters():
        parameter.grad = None
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        guard="gradients-kept",
    ),
    Mistake(
        "AMP216",
        "scaled-and-unscaled",
        "gradients of a scaled loss and of an unscaled one add up before `scaler.step`",
        "the unscaled loss is divided by the loss scale, and has almost no effect",
        "scale both losses with the same scaler",
        """
scaler.scale(loss).backward()
penalty.backward()  # AMP216
scaler.step(optimizer)
scaler.update()
""",
        """
scaler.scale(loss).backward()
scaler.scale(penalty).backward()
scaler.step(optimizer)
scaler.update()
""",
        fixable=True,
    ),
)
