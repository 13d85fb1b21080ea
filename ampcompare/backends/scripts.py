"""The few lines of a training script that differ from one arm to another."""

from __future__ import annotations

from typing import Any

SCALER = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")

__all__ = ["PLAIN_STEP", "apex_script", "fp32_script", "half_script", "native_script"]

PLAIN_STEP = (
    "loss = criterion(model(x), y)",
    "loss.backward()",
    "clip_grad_norm_(model.parameters(), 1.0)",
    "optimizer.step()",
)


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


def native_script(dtype: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `torch.amp` says; only fp16 needs a scaler."""
    forward = (
        f'with torch.autocast("cuda", dtype=torch.{dtype}):',
        "    loss = criterion(model(x), y)",
    )
    if dtype != "float16":
        return (*forward, *PLAIN_STEP[1:])
    words = "".join(f", {name}={value:g}" for name, value in options.items() if name in SCALER)
    return (
        f'scaler = torch.amp.GradScaler("cuda"{words})',
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


def fp32_script() -> tuple[str, ...]:
    """Return an ordinary step."""
    return PLAIN_STEP


def _python(name: str, value: Any) -> str:
    if name == "cast_model_outputs":
        return f"torch.{value}"
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"
