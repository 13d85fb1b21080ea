"""The few lines of a training script that differ from one arm to another."""

from __future__ import annotations

from typing import Any

__all__ = ["apex_script", "fp32_script", "half_script", "native_script"]

PLAIN_STEP = (
    "loss = criterion(model(x), y)",
    "loss.backward()",
    "clip_grad_norm_(model.parameters(), 1.0)",
    "optimizer.step()",
)


def apex_script(options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `apex.amp` says."""
    given = {name: value for name, value in options.items() if name != "engine"}
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


def native_script(dtype: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `torch.amp` says; only fp16 needs a scaler."""
    forward = (
        f'with torch.autocast("cuda", dtype=torch.{dtype}):',
        "    loss = criterion(model(x), y)",
    )
    if dtype != "float16":
        return (*forward, *PLAIN_STEP[1:])
    words = "".join(f", {name}={value:g}" for name, value in options.items() if name != "dtype")
    return (
        f'scaler = torch.amp.GradScaler("cuda"{words})',
        *forward,
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)  # before clipping",
        "clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    )


def half_script(dtype: str, bn_fp32: bool, loss_scale: float | None) -> tuple[str, ...]:
    """Return what a script without any amp says."""
    cast = "half" if dtype == "float16" else "bfloat16"
    keep = (
        "for module in model.modules():",
        "    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):",
        "        module.float()",
    )
    scaled = loss_scale is not None
    unscale = (f"torch._foreach_div_([p.grad for p in model.parameters()], {loss_scale:g})",) if scaled else ()
    return (
        f"model.{cast}()",
        *(keep if bn_fp32 else ()),
        f"loss = criterion(model(x.{cast}()).float(), y)",
        f"(loss * {loss_scale:g}).backward()" if scaled else "loss.backward()",
        *unscale,
        *PLAIN_STEP[2:],
    )


def fp32_script() -> tuple[str, ...]:
    """Return an ordinary step."""
    return PLAIN_STEP


def _python(name: str, value: Any) -> str:
    if name == "cast_model_outputs":
        return f"torch.{value}"
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"
