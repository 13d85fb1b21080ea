"""What a backend states about one of its arms: an explanation, lines of a script, bytes per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FP32_BYTES",
    "HALF_BYTES",
    "MASTER_WEIGHT_BYTES",
    "PLAIN_STEP",
    "ArmExplanation",
    "BytesPerParameter",
    "EffectiveArm",
    "apex_script",
    "grad_scaler",
    "half_script",
    "kept_modules",
    "native_script",
]

SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
PLAIN_STEP = (
    "loss = criterion(model(x), y)",
    "loss.backward()",
    "clip_grad_norm_(model.parameters(), 1.0)",
    "optimizer.step()",
)


@dataclass(frozen=True)
class ArmExplanation:
    """The parts of an explanation, in the order in which they are read.

    Attributes:
        summary: one sentence.
        does: (what, how) pairs: weights, casts, batch norm, loss scale, ...
        twin: the arm to compare it with; None if there is none.
        twin_is: how near that arm is, in one sentence.
        differs: a sentence for each difference between the two.
        script: lines of Python that do what the arm does.
        twin_script: the same for the arm to compare it with.
    """

    summary: str
    does: tuple[tuple[str, str], ...]
    twin: str | None
    twin_is: str
    differs: tuple[str, ...]
    script: tuple[str, ...]
    twin_script: tuple[str, ...]


@dataclass(frozen=True)
class EffectiveArm:
    """What an arm runs on a device.

    Attributes:
        arm: the arm of ampcompare's own with that precision; None if the arm cannot run there.
        reason: why it differs from what was asked, or why it cannot run.
    """

    arm: str | None
    reason: str = ""


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes for one parameter outside batch norm, by what they hold.

    Attributes:
        cast: 16-bit copies of weights, kept from the forward pass to the end of the backward pass.
        state: one optimizer tensor of the parameter's size.
        compensation: what the rounding of a weight has cut off.
    """

    weight: int
    gradient: int
    master: int
    master_gradient: int
    cast: int
    state: int
    compensation: int = 0

    def total(self, tensors: int) -> int:
        """Return the sum, for an optimizer that keeps this many tensors per parameter."""
        held = self.weight + self.gradient + self.master + self.master_gradient + self.cast + self.compensation
        return held + tensors * self.state


def kept_modules(patterns: str, *, rounds_to: str | None) -> tuple[tuple[str, str], ...]:
    """Return what an explanation says of `keep_fp32`; nothing if no patterns are given.

    Args:
        rounds_to: the 16-bit type of the model around; None where outputs stay in fp32.
    """
    if not patterns:
        return ()
    named = ", ".join(patterns.split("|"))
    outputs = (
        "outputs stay in fp32"
        if rounds_to is None
        else f"outputs become {rounds_to} again, unless they are those of the model"
    )
    return (("kept in fp32", f"modules of name or type {named}: weights and arithmetic in fp32; {outputs}"),)


FP32_BYTES = BytesPerParameter(4, 4, 0, 0, 0, 4)
HALF_BYTES = BytesPerParameter(2, 2, 0, 0, 0, 2)
MASTER_WEIGHT_BYTES = BytesPerParameter(2, 2, 4, 4, 0, 4)


def apex_script(options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `apex.amp` says."""
    given = {name: value for name, value in options.items() if name not in ("engine", "keep_fp32")}
    words = [f"{name}={_python(name, value)}" for name, value in given.items()]
    return (
        "from apex import amp  # or: from ampcompare.apex import amp",
        f"model, optimizer = amp.initialize(model, optimizer, {', '.join(words)})  # on the GPU, before DDP",
        "loss = criterion(model(x), y)",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:",
        "    scaled_loss.backward()",
        "clip_grad_norm_(amp.master_params(optimizer), 1.0)",
        "optimizer.step()",
    )


def grad_scaler(options: Mapping[str, Any]) -> str:
    """Return the line of a script that makes the GradScaler of an arm."""
    words = "".join(f", {name}={value:g}" for name, value in options.items() if name in SCALER)
    return f'scaler = torch.amp.GradScaler("cuda"{words})'


def native_script(dtype: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `torch.amp` says; only fp16 needs a scaler."""
    forward = (
        f'with torch.autocast("cuda", dtype=torch.{dtype}):',
        "    loss = criterion(model(x), y)",
    )
    if dtype != "float16":
        return (*forward, *PLAIN_STEP[1:])
    return (
        grad_scaler(options),
        *forward,
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)  # before clipping",
        "clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    )


def half_script(
    dtype: str, bn_fp32: bool, loss_scale: float | str | None, *, master_weights: bool = False
) -> tuple[str, ...]:
    """Return what a script without any amp says."""
    cast = "half" if dtype == "float16" else "bfloat16"
    keep = (
        "for module in model.modules():",
        "    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):",
        "        module.float()",
    )
    scale = "" if loss_scale is None else "scale" if loss_scale == "dynamic" else f"{loss_scale:g}"
    over = f" / {scale}" if scale else ""
    held = "masters" if master_weights else "model.parameters()"
    unscale: tuple[str, ...] = ("for p in model.parameters():", f"    p.grad.div_({scale})") if scale else ()
    if master_weights:
        unscale = (
            "for p, master in zip(model.parameters(), masters):",
            f"    master.grad, p.grad = p.grad.float(){over}, None",
        )
    masters = (
        "masters = [p.detach().float().requires_grad_() for p in model.parameters()]",
        "optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)",
    )
    step: tuple[str, ...] = ("optimizer.step()",)
    if master_weights:
        step = (
            *step,
            "with torch.no_grad():",
            "    for p, master in zip(model.parameters(), masters):",
            "        p.copy_(master)",
        )
    if loss_scale == "dynamic":
        step = (
            f"if all(m.grad.isfinite().all() for m in {held}):",
            *(f"    {line}" for line in step),
            "else:",
            "    scale = max(scale / 2, 1.0)  # and doubled after 1000 good steps in a row",
        )
    return (
        f"model.{cast}()",
        *(keep if bn_fp32 else ()),
        *(masters if master_weights else ()),
        *(("scale = 65536.0",) if loss_scale == "dynamic" else ()),
        f"loss = criterion(model(x.{cast}()).float(), y)",
        f"(loss * {scale}).backward()" if scale else "loss.backward()",
        *unscale,
        f"clip_grad_norm_({held}, 1.0)",
        *step,
    )


def _python(name: str, value: Any) -> str:
    if name == "cast_model_outputs":
        return f"torch.{value}"
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"
