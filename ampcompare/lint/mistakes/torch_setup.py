"""Mistakes with accumulation and autocast, with the life of a GradScaler, and with what is saved of it."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP217",
        "loss-undivided",
        "gradients of several mean losses add up before a step without being divided by their number",
        "the gradients are too large by that factor: a larger effective learning rate, and clipping and overflow much "
        "sooner",
        "divide the loss by the number of accumulated passes before `backward()`",
        """
for i, batch in enumerate(loader):
    loss = criterion(model(batch))
    scaler.scale(loss).backward()  # AMP217
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
        """
for i, batch in enumerate(loader):
    loss = criterion(model(batch)) / accumulation_steps
    scaler.scale(loss).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP221",
        "backward-in-autocast",
        "`backward()` inside the autocast block",
        "the operations of the backward pass are cast a second time; PyTorch advises against it",
        "leave the autocast block after the loss: `backward()` uses the dtypes of the forward pass",
        """
import torch

with torch.autocast("cuda"):
    loss = model(batch)
    loss.backward()  # AMP221
""",
        """
import torch

with torch.autocast("cuda"):
    loss = model(batch)
    with torch.autocast("cuda", enabled=False):
        penalty.backward()
loss.backward()
""",
        fixable=True,
    ),
    Mistake(
        "AMP222",
        "autocast-not-entered",
        "autocast is called without `with`, or used in `with` without being called",
        "the former changes nothing: all operations stay in fp32; the latter is an error",
        'write `with torch.autocast("cuda"):` around the forward pass',
        """
import torch

torch.autocast("cuda")  # AMP222
loss = model(batch)
""",
        """
import torch

context = torch.autocast("cuda")
with context:
    loss = model(batch)
""",
    ),
    Mistake(
        "AMP223",
        "scaler-with-bf16",
        "a GradScaler is used although autocast uses bfloat16",
        "bf16 has the range of fp32: scaling has no benefit, and steps may be skipped",
        "leave the scaler out, or build it with `enabled=False`",
        """
import torch

scaler = torch.amp.GradScaler("cuda")  # AMP223
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(batch)
""",
        """
import torch

scaler = torch.amp.GradScaler("cuda", enabled=False)
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(batch)
""",
    ),
    Mistake(
        "AMP224",
        "half-with-scaler",
        "a model is cast by `.half()` and trained with a GradScaler",
        "`unscale_` refuses fp16 gradients: the first step ends with a ValueError",
        "keep the weights in fp32: autocast casts where it is safe",
        """
import torch

model.half()  # AMP224
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        """
import torch

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    batch = batch.half()
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP225",
        "scaler-in-loop",
        "a GradScaler is built for every step",
        "the loss scale starts from its initial value at each step and never adapts",
        "build it once, before the loop",
        """
import torch

for batch in loader:
    scaler = torch.amp.GradScaler("cuda")  # AMP225
    scaler.scale(model(batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
        """
import torch

for fold in folds:
    scaler = torch.amp.GradScaler("cuda")
    for batch in fold:
        scaler.scale(model(batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
""",
    ),
    Mistake(
        "AMP226",
        "amp-state-unsaved",
        "a checkpoint holds the state of an optimizer, but not that of amp or of the GradScaler",
        "the loss scale starts from its initial value after a resume: a burst of skipped steps, or "
        "gradients that underflow",
        "save `amp.state_dict()` or `scaler.state_dict()` too, and load it when resuming",
        """
import torch

scaler = torch.amp.GradScaler("cuda")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP226
""",
        """
import torch

scaler = torch.amp.GradScaler("cuda")
torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
torch.save(model.state_dict(), weights)
""",
        fixable=True,
    ),
    Mistake(
        "AMP227",
        "step-with-closure",
        "`scaler.step` is called with a closure",
        "it raises a RuntimeError: a GradScaler does not support optimizers that evaluate the loss again",
        "call the closure yourself before the step, or train this optimizer in fp32",
        """
def closure():
    return model(batch)


scaler.scale(closure()).backward()
scaler.step(optimizer, closure)  # AMP227
scaler.update()
""",
        """
optimizer.step(closure)
""",
    ),
    Mistake(
        "AMP228",
        "scaled-loss-read",
        "the loss that `scaler.scale` returns is read as a number",
        "the curve follows the loss scale, not the loss",
        "log the loss itself",
        """
scaled = scaler.scale(loss)
scaled.backward()
total += scaled.item()  # AMP228
scaler.step(optimizer)
scaler.update()
""",
        """
scaled = scaler.scale(loss)
scaled.backward()
total += scaled.item() / scaler.get_scale()
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "AMP231",
        "scaler-state-unloaded",
        "the state of the GradScaler is saved, but never loaded along with that of the optimizer",
        "every resumed run starts with the initial loss scale: a burst of skipped steps",
        "call `scaler.load_state_dict` where the state of the optimizer is loaded",
        """
import torch

torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])  # AMP231
""",
        """
import torch

torch.save({"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])
scaler.load_state_dict(torch.load(path)["scaler"])
""",
    ),
    Mistake(
        "AMP234",
        "update-before-step",
        "`scaler.update()` runs between the backward pass and `scaler.step`",
        "it ends with an AssertionError; after `unscale_` the step divides the gradients by the scale a second time",
        "call `scaler.update()` after `scaler.step(optimizer)`",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.update()  # AMP234
scaler.step(optimizer)
""",
        """
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
""",
    ),
    Mistake(
        "",
        "autocast-elsewhere",
        "the forward pass is under autocast for a different device than the one it runs on",
        "nothing is cast: what is called mixed precision trains in fp32, with its speed and memory",
        "pass the device used for training, `torch.autocast(device.type, ...)`, or leave autocast out there",
    ),
    Mistake(
        "",
        "scaler-off",
        "a GradScaler is built for a device that torch does not see",
        "torch switches it off with a warning: losses are not scaled, and overflows are not detected",
        "build it for the device used for training, or with `enabled=False` where it is not needed",
    ),
    Mistake(
        "",
        "accelerator-off",
        "an Accelerator is asked for fp16 on a CPU, where Accelerate does not support it",
        "it silently switches mixed precision off: what is called fp16 trains in fp32",
        'write `mixed_precision="bf16"`, which Accelerate supports on a CPU, or `"no"`',
    ),
    Mistake(
        "",
        "autocast-without-dtype",
        "autocast without a dtype uses fp16, and no loss is scaled",
        "gradients below 2**-24 become 0; on a CPU the same line uses bfloat16, so results differ",
        "write `dtype=torch.bfloat16`, or scale the loss by a GradScaler",
    ),
    Mistake(
        "",
        "gradients-kept",
        "the gradients of a skipped step are not cleared before the next one",
        "they are infinite or NaN and stay so: every later step is skipped, or applies them",
        "call `optimizer.zero_grad()` after every step, skipped or not",
    ),
)
