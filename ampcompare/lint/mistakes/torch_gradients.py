"""Mistakes with gradients that a GradScaler has scaled: read, changed, or left behind by an update that is skipped."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP218",
        "gradients-read-scaled",
        "the size of gradients is read, or a number is added to them, while they are scaled",
        "a norm is too large by the loss scale and jumps with it; what is added has almost no effect",
        "call `scaler.unscale_(optimizer)` before gradients are read or changed",
        """
scaler.scale(loss).backward()
total = sum(p.grad.norm() ** 2 for p in model.parameters())  # AMP218
scaler.step(optimizer)
scaler.update()
""",
        """
scaler.scale(loss).backward()
for p in model.parameters():
    p.grad.mul_(mask)
scaler.unscale_(optimizer)
total = sum(p.grad.norm() ** 2 for p in model.parameters())
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "AMP219",
        "update-skipped",
        "gradients are unscaled, and `scaler.update` runs only if they are finite",
        "the next `unscale_` raises a RuntimeError, and the loss scale that overflowed is not lowered",
        "remove the check: `scaler.step` skips the step, and `scaler.update` lowers the scale",
        """
import torch

for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)  # AMP219
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        continue
    scaler.step(optimizer)
    scaler.update()
""",
        """
import torch

for batch in loader:
    optimizer.zero_grad()
    scaler.scale(model(batch)).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        scaler.step(optimizer)
    scaler.update()
""",
    ),
    Mistake(
        "AMP220",
        "penalty-scaled",
        "a gradient penalty is computed from the gradients of a scaled loss",
        "the penalty is too large by the loss scale, and changes with it",
        "multiply the gradients by `1 / scaler.get_scale()` before their norm is taken",
        """
import torch

grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)  # AMP220
penalty = sum(grad.pow(2).sum() for grad in grads).sqrt()
scaler.scale(loss + penalty).backward()
scaler.step(optimizer)
scaler.update()
""",
        """
import torch

grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
penalty = sum((grad / scaler.get_scale()).pow(2).sum() for grad in grads).sqrt()
scaler.scale(loss + penalty).backward()
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "AMP235",
        "clipped-in-fp32-only",
        "gradients are clipped where the loss is not scaled, and not clipped where a GradScaler steps",
        "mixed precision trains without the requested clipping, and is compared with a run that has it",
        "call `scaler.unscale_(optimizer)` and clip before `scaler.step(optimizer)` too",
        """
import torch

if use_amp:
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # AMP235
    scaler.update()
else:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
        """
import torch

if use_amp:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
else:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    ),
)
