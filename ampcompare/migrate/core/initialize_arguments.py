"""What the arguments of `amp.initialize` become: those of `GradScaler`, and remarks."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from ampcompare.migrate.read.sites import Initialize, Unsure
from ampcompare.migrate.read.tree import Tree

__all__ = ["ScalerSettings", "scaler_settings"]

NO_GROWTH = "growth_interval=2**31 - 1"
LEVELS = ("O0", "O1", "O2", "O3")
NO_TWIN = (
    "{level} has no equivalent in torch.amp: autocast keeps fp32 weights and casts for each product, so weights take "
    "4 bytes "
    "instead of 2 and 4, and softmax, norms and losses inside the model run in fp32; to keep {level}, use "
    "--to precision; bf16 parameters with fp32 masters are the third way"
)


@dataclass
class ScalerSettings:
    """How a scaler is made.

    Attributes:
        arguments: of `GradScaler` after the device, without `enabled`.
        enabled: expressions that all must hold; empty means always.
        update: the argument of `update()`, for a static scale.
        level: the literal opt level; None if it is known at run time only.
        notes: differences to know.
    """

    arguments: list[str] = field(default_factory=list)
    enabled: list[str] = field(default_factory=list)
    update: str = ""
    level: str | None = None
    notes: list[str] = field(default_factory=list)


def scaler_settings(tree: Tree, initialize: Initialize, *, single: bool) -> ScalerSettings:
    """Return the settings for a call.

    Args:
        single: whether it is the only call, so that `update` can hold its static scale.

    Raises:
        Unsure: an opt level that Apex itself refuses.
    """
    given = initialize.arguments
    settings = ScalerSettings()
    _read_level(tree, given, settings)
    enabled = given.get("enabled")
    if enabled is not None and not (isinstance(enabled, ast.Constant) and enabled.value is True):
        settings.enabled.append(tree.source(enabled))
    _read_scale(tree, given, settings, single)
    if "min_loss_scale" in given and not _is_none(given["min_loss_scale"]):
        settings.notes.append("GradScaler has no min_loss_scale: its scale can fall below the floor")
    limit = given.get("max_loss_scale")
    if limit is not None and not _is_none(limit):
        settings.notes.append("GradScaler has no max_loss_scale: its scale can grow above the ceiling")
        if not settings.arguments:
            settings.arguments.append(f"init_scale=min(2.0**16, {tree.source(limit)})")
    if initialize.options is not None:
        name = tree.source(initialize.options)
        settings.notes.append(f"other options in {name} than enabled, opt_level and loss_scale are not checked")
    if "cast_model_outputs" in given:
        settings.notes.append("cast_model_outputs has no equivalent: cast the outputs where their type matters")
    patched = given.get("patch_torch_functions")
    if isinstance(patched, ast.Constant) and patched.value is False and settings.level == "O1":
        raise Unsure(initialize.call, "O1 without casts is loss scaling alone; write that by hand")
    return settings


def _read_level(tree: Tree, given: dict[str, ast.expr], settings: ScalerSettings) -> None:
    level = given.get("opt_level")
    if level is None:
        settings.level = "O1"
    elif isinstance(level, ast.Constant):
        if level.value not in LEVELS:
            raise Unsure(level, f"opt_level is {level.value!r}; Apex knows O0, O1, O2 and O3, with the letter O")
        settings.level = str(level.value)
        if settings.level == "O0":
            settings.enabled.append("False")
        elif settings.level in ("O2", "O3"):
            settings.notes.append(NO_TWIN.format(level=settings.level))
    else:
        text = tree.source(level)
        settings.enabled.append(f'{text if _is_plain(level) else f"({text})"} != "O0"')
        settings.notes.append(
            "the opt level is chosen at run time: O0 trains in fp32 and O1 under autocast as before; "
            + NO_TWIN.format(level="O2 or O3").replace("O2 or O3 has", "O2 or O3 have")
        )


def _read_scale(tree: Tree, given: dict[str, ast.expr], settings: ScalerSettings, single: bool) -> None:
    scale = given.get("loss_scale")
    if scale is None or _is_none(scale) or (isinstance(scale, ast.Constant) and scale.value == "dynamic"):
        return
    text = tree.source(scale)
    number = _number(scale)
    if number is not None:
        text = repr(float(number)) if isinstance(scale, ast.Constant) else text
        settings.arguments.append(f"init_scale={text}")
        if single:
            settings.update = f"new_scale={text}"
        else:
            settings.arguments.append(NO_GROWTH)
        settings.notes.append("a static scale: GradScaler skips a step whose gradients overflow; Apex takes it")
        return
    if isinstance(scale, ast.IfExp) and isinstance(scale.body, ast.Constant) and scale.body.value == "dynamic":
        dynamic, text = tree.source(scale.test), tree.source(scale.orelse)
    else:
        text = text if _is_plain(scale) else f"({text})"
        dynamic = f'{text} in (None, "dynamic")'
    settings.arguments += [
        f"init_scale=2.0**16 if {dynamic} else float({text})",
        f"growth_interval=2000 if {dynamic} else 2**31 - 1",
    ]
    settings.notes.append("a static scale given at run time halves after an overflow, where Apex takes the step")


def _number(node: ast.expr) -> float | None:
    """Return the value of a constant such as "128.0", or of a power such as `2**15`."""
    try:
        if isinstance(node, ast.Constant):
            return float(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            base, exponent = _number(node.left), _number(node.right)
            return None if base is None or exponent is None else base**exponent
    except (ArithmeticError, TypeError, ValueError):
        pass
    return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_plain(node: ast.expr) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.JoinedStr))
