"""What a backend states about one of its arms: an explanation, and lines of a script."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ampcompare.backends.roles import BATCH_NORM, Roles

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
        twin_script: the same for the arm to compare it with, as that explains itself.
    """

    summary: str
    does: tuple[tuple[str, str], ...]
    twin: str | None
    twin_is: str
    differs: tuple[str, ...]
    script: tuple[str, ...]
    twin_script: tuple[str, ...] = ()


def explanation_rows_of_roles(
    roles: Roles, *, casts: Sequence[tuple[str, str]] = (), borders: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return what an explanation says of each role, as (what, how) pairs."""
    held, narrow = roles.weights, roles.weights != "fp32"
    keeps_norm = BATCH_NORM in roles.kept
    users = [pattern for pattern in roles.kept if pattern != BATCH_NORM]
    rows = [("weights", "fp32")]
    if narrow:
        rows = [
            (
                "weights",
                f"become {held}, all but those of batch norm" if keeps_norm else f"become {held}, all",
            )
        ]
    rows += casts or [("casts", "none inside the model: an operation runs in the type of its inputs")]
    if users:
        outputs = f"outputs become {held} again, unless they are those of the model"
        if roles.lists or not narrow:
            outputs = "outputs stay in fp32"
        named = ", ".join(users)
        rows.append(
            ("kept in fp32", f"modules of name or type {named}: weights and arithmetic in fp32; {outputs}")
        )
    if borders:
        rows.append(("inputs, outputs", borders))
    norm = f"{'fp32' if keeps_norm else held} weights and statistics"
    rows.append(("batch norm", norm + (f", {roles.half} in and out" if keeps_norm and narrow else "")))
    rows += [("master weights", _masters_text(roles)), ("optimizer", _optimizer_text(roles))]
    if roles.gradients != held:
        rows.append(
            ("gradients", f"of micro-batches are accumulated in {roles.gradients}, in those of the masters")
        )
    if roles.reduction != held:
        rows.append(
            (
                "reduction",
                f"gradients are averaged over ranks in {roles.reduction}; with one process there is none",
            )
        )
    if roles.state != roles.step:
        small = "; second moments below 2**-25 become 0 there" if roles.state == "fp16" else ""
        widened = f"held in {roles.state} between steps, and widened to {roles.step} for a step{small}"
        rows.append(("optimizer state", widened))
    rows.append(("loss scale", _loss_scale_text(roles)))
    return tuple(rows)


def _masters_text(roles: Roles) -> str:
    held = roles.weights
    if roles.masters:
        return f"an {roles.masters} copy of each {held} weight, which the optimizer steps"
    if held == "fp32":
        return "none needed: the weights are fp32"
    if roles.update == "kahan":
        return f"none: the rounding error is kept in {held} and added before the next step (Kahan summation)"
    if roles.update == "stochastic":
        return f"none: updated weights are rounded to {held} stochastically, so that small updates are kept on average"
    return f"none: an update below half a unit in the last place of a {held} weight is lost"


def _optimizer_text(roles: Roles) -> str:
    if roles.masters:
        return f"steps the masters with {roles.masters} gradients, then rounds them into the model"
    if roles.step != roles.weights:
        return f"steps {roles.step} copies of weights and gradients, which last for the step: 8 bytes a parameter"
    eps = "; Adam's eps of 1e-8 is 0 there" if roles.step == "fp16" else ""
    return f"steps {roles.weights} weights with {roles.weights} gradients{eps}"


def _loss_scale_text(roles: Roles) -> str:
    scale = roles.loss_scale
    if scale is None:
        if "fp16" in (roles.weights, roles.products):
            return "none: gradients below 2**-25 become 0"
        return "none: bf16 has the range of fp32" if roles.half else "none needed"
    if scale.is_static:
        return f"static at {scale.first:g}: overflows are not checked, and infinities reach the weights"
    falls = "halves it" if scale.backoff == 0.5 else f"multiplies it by {scale.backoff:g}"
    grows = "double it" if scale.growth == 2 else f"multiply it by {scale.growth:g}"
    lowest = f", never below {scale.lowest:g}" if scale.lowest is not None else ""
    highest = f", up to {scale.highest:.0f}" if scale.highest is not None else ""
    return (
        f"dynamic: begins at {scale.first:.0f}; an overflow skips the step and {falls}{lowest}; {scale.interval} steps "
        f"without one {grows}{highest}"
    )


def apex_script_lines(options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `apex.amp` says."""
    given = {name: value for name, value in options.items() if name not in ("engine", "keep_fp32")}
    words = [f"{name}={_python_argument_text(name, value)}" for name, value in given.items()]
    return (
        "# or: from ampcompare.apex import amp",
        "from apex import amp",
        "# with the model on the GPU, before DDP",
        f"model, optimizer = amp.initialize(model, optimizer, {', '.join(words)})",
        "loss = criterion(model(x), y)",
        "with amp.scale_loss(loss, optimizer) as scaled_loss:",
        "    scaled_loss.backward()",
        "clip_grad_norm_(amp.master_params(optimizer), 1.0)",
        "optimizer.step()",
    )


def grad_scaler_line(options: Mapping[str, Any]) -> str:
    """Return the line of a script that makes the GradScaler of an arm."""
    words = "".join(f", {name}={value:g}" for name, value in options.items() if name in SCALER)
    return f'scaler = torch.amp.GradScaler("cuda"{words})'


def native_script_lines(dtype: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Return what a script with `torch.amp` says; only fp16 needs a scaler."""
    forward = (f'with torch.autocast("cuda", dtype=torch.{dtype}):', "    loss = criterion(model(x), y)")
    if dtype != "float16":
        return (*forward, *PLAIN_STEP[1:])
    return (
        grad_scaler_line(options),
        *forward,
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)  # before clipping",
        "clip_grad_norm_(model.parameters(), 1.0)",
        "scaler.step(optimizer)",
        "scaler.update()",
    )


def half_script_lines(
    dtype: str, bn_fp32: bool, loss_scale: float | str | None, *, master_weights: bool = False
) -> tuple[str, ...]:
    """Return what a script without any amp says."""
    cast = "half" if dtype == "float16" else "bfloat16"
    keep = (
        "for module in model.modules():",
        "    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):",
        "        module.float()",
    )
    scale = "scale" if loss_scale == "dynamic" else ""
    if loss_scale is not None and loss_scale != "dynamic":
        scale = f"{loss_scale:g}"
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


def _python_argument_text(name: str, value: Any) -> str:
    if name == "cast_model_outputs":
        return f"torch.{value}"
    return f'"{value}"' if isinstance(value, str) else f"{value!r}"
