"""What the guards look for: each mistake, what it does to a training, and the remedy. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GUARDS", "Guard"]


@dataclass(frozen=True)
class Guard:
    """One mistake that is looked for.

    Attributes:
        name: in messages and in the documentation.
        mistake: what the script does.
        matters: what that does to the training.
        remedy: what to write instead.
    """

    name: str
    mistake: str
    matters: str
    remedy: str


GUARDS: dict[str, Guard] = {
    guard.name: guard
    for guard in (
        Guard(
            "step-twice",
            "`optimizer.step()` and `scaler.step(optimizer)` for one backward pass",
            "the second step applies the gradients again, infinite ones included: the weights become NaN",
            "delete `optimizer.step()`: `scaler.step(optimizer)` calls it where the gradients are finite",
        ),
        Guard(
            "clip-scaled",
            "gradients are clipped while they are scaled, or the half copies of Apex's O2 are",
            "the norm is as many times too large as the loss scale, so that next to nothing is left after unscaling; "
            "under O2 the optimizer steps on other gradients, which stay as they are",
            "call `scaler.unscale_(optimizer)` before clipping; with Apex clip `amp.master_params(optimizer)` behind "
            "the `scale_loss` block",
        ),
        Guard(
            "scheduler-first",
            "`scheduler.step()` runs before `optimizer.step()`",
            "the first learning rate is never used, and every update has that of the next one",
            "call `optimizer.step()` (or `scaler.step(optimizer)`) first, then `scheduler.step()`",
        ),
        Guard(
            "initialize-after-wrapping",
            "`amp.initialize` gets a model that DistributedDataParallel or DataParallel has wrapped",
            "the wrapper has recorded the parameters and dtypes that the model had before",
            "call `amp.initialize` first, and wrap the model that it returns",
        ),
        Guard(
            "initialize-before-cuda",
            "a model goes to the GPU after `amp.initialize`",
            "Apex refuses such models; master weights may stay behind on the CPU",
            "call `.cuda()` or `.to(device)` before the optimizer is built and before `amp.initialize`",
        ),
        Guard(
            "initialize-twice",
            "`amp.initialize` runs again while what it prepared before is still trained",
            "the second call throws the loss scales of the first away, and sets one opt level for both",
            "hand all models and optimizers to one call, as lists, with `num_losses` and `loss_id`",
        ),
        Guard(
            "half-after-initialize",
            "`.half()` on a model that went through `amp.initialize`, and training goes on",
            "weights that the opt level keeps in fp32 are rounded, and small updates are lost from then on",
            "delete `.half()`: the opt level casts what it wants cast; to export half weights, cast a copy",
        ),
        Guard(
            "backward-in-autocast",
            "`backward()` inside the autocast block",
            "the operations of the backward pass are cast a second time; PyTorch advises against it",
            "leave the autocast block after the loss: `backward()` runs in the dtypes of the forward pass by itself",
        ),
        Guard(
            "amp-state-unsaved",
            "a checkpoint holds the state of an optimizer, and not that of amp or of the GradScaler",
            "the loss scale starts afresh after a resume: a burst of skipped steps, or gradients that underflow",
            "save `amp.state_dict()` or `scaler.state_dict()` too, and load it on resuming",
        ),
        Guard(
            "loss-undivided",
            "gradients of several mean losses add up before a step, and none is divided by their number",
            "the gradients are as many times too large: another learning rate, and clipping and overflow much sooner",
            "divide the loss by the number of accumulated passes before `backward()`",
        ),
        Guard(
            "gradients-kept",
            "the gradients of a skipped step are not cleared before the next one",
            "they are infinite or NaN and stay so: every later step is skipped, or applies them",
            "call `optimizer.zero_grad()` after every step, skipped or not",
        ),
    )
}
