"""Loss scalers between Apex and torch.amp, and a line for all that one of them cannot hold.

Source: `amp.state_dict` of Apex 25.05, `FP16_Optimizer.state_dict` with the scalers of `apex.amp` and, in older files,
of `apex.fp16_utils`, and `torch.amp.GradScaler.state_dict` of torch 2.4 to 2.13.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampcompare.backends.apex_levels import LEVELS
from ampcompare.base.errors import ConversionError

MAX_SCALE = float(2**128 - 2**104)
"""The largest fp32 number: every scaler multiplies in fp32."""
MAX_STEPS = 2**53
FIRST_SCALE = 65536.0
APEX_FACTOR = 2.0
APEX_BACKOFF = 0.5
APEX_INTERVAL = 2000
APEX_MAX = 2.0**24
NEVER = 2**31 - 1
MEGATRON_INTERVAL = 1000
UNKNOWN_STATIC = (
    "whether the scale is static: the file does not say so, and it is taken for a dynamic one, which grows; with "
    "--static-scale (static_scale=True in Python) it never does"
)
SMALLEST_NORMAL = 2.0**-126
SCALE_KEYS = ("cur_scale", "_loss_scale", "_host_scale", "loss_scale", "scale", "_scale")
"""Its names in `fp16_utils`, DeepSpeed and mmcv; in Apex; in ampcompare; in fairseq and Apex; in Megatron and torch."""
STATIC_LEVELS = [name for name, level in LEVELS.items() if level.is_static]
COUNTS = ("_unskipped", "_host_unskipped", "unskipped", "growth_tracker", "_growth_tracker")
WINDOWS = ("scale_window", "_scale_seq_len", "growth_interval")
STATE_KEYS = frozenset(
    {
        *COUNTS,
        *("cur_scale", "_loss_scale", "_host_scale", "cur_iter", "last_overflow_iter", "hysteresis_tracker"),
        *("_iter", "_last_overflow_iter", "_last_rescale_iter", "incr_count"),
    }
)
"""Keys that only a loss scaler has; settings of a program have the scale and the next ones too."""
OPTION_KEYS = frozenset(
    {
        *WINDOWS,
        *("scale_factor", "growth_factor", "backoff_factor", "hysteresis", "tolerance", "min_scale", "mode"),
        *("dynamic", "dynamic_loss_scale", "_min_loss_scale", "_max_loss_scale"),
    }
)


def parse_scale(value: Any, where: str) -> float:
    """Return a loss scale, a positive finite fp32 number; `where` names it in the error for anything else."""
    value = plain_number_or_value(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_SCALE:
        raise ConversionError(
            f"{where} is {_value_text(value)}, not a usable loss scale; convert a checkpoint from before that"
        )
    return float(value)


def parse_count(value: Any, where: str) -> int:
    """Return a number of steps, truncated to an integer; `where` says in the error what it counts."""
    value = plain_number_or_value(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < math.inf
        or value > MAX_STEPS
    ):
        raise ConversionError(f"{where} is {_value_text(value)}, not a valid step count")
    return int(value)


def _value_text(value: Any) -> str:
    text = str(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


@dataclass(frozen=True)
class LossScalerValues:
    """The scale of a loss scaler, the steps since it last moved, and the rule by which it moves."""

    scale: float
    dynamic: bool = False  # whether it moves
    clean: int = 0  # steps since the scale last changed
    interval: int | None = None  # clean steps in a row after which it grows; None if it does not
    factor: float = APEX_FACTOR  # it grows by this, and falls by its inverse
    least: float | None = None  # bounds of the scale; None if unbounded
    most: float | None = None


def is_number_or_scalar_tensor(value: Any) -> bool:
    """Return whether a value is a number, or a tensor of one."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )


def plain_number_or_value(value: Any) -> Any:
    """Return a tensor of one number as that number, and any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def is_loss_scaler_state(value: Any) -> bool:
    """Return whether a value is the state of a loss scaler: a scale with what moves it, and little else."""
    if not isinstance(value, Mapping) or not any(
        is_number_or_scalar_tensor(value.get(key)) for key in SCALE_KEYS
    ):
        return False
    known = (STATE_KEYS | OPTION_KEYS).union(SCALE_KEYS).intersection(value)
    return not STATE_KEYS.isdisjoint(value) and 2 * len(known) >= len(value)


def _scaler_values_in_state(state: Any) -> dict[str, Any]:
    """Return the values of the loss scaler that a state is or holds, as plain numbers where they are numbers."""
    if is_number_or_scalar_tensor(state):
        state = {"loss_scale": state, "dynamic": True}
    scaler = state.get(
        "loss_scaler", next((entry for entry in state.values() if is_loss_scaler_state(entry)), state)
    )
    if not isinstance(scaler, Mapping):
        raise ConversionError(
            "the loss scaler of FP16_Optimizer is an object of a class that is not known; load it where it is "
            "installed, and save {'_loss_scale': ..., 'dynamic': ..., '_unskipped': ...} under loss_scaler"
        )
    around = {"dynamic": state["dynamic_loss_scale"]} if "dynamic_loss_scale" in state else {}
    return {key: plain_number_or_value(value) for key, value in {**around, **scaler}.items()}


def _first_value_under_keys(scaler: Mapping[str, Any], *keys: str) -> Any:
    return next((scaler[key] for key in keys if key in scaler), None)


def unchecked_scale_of_state(state: Any) -> Any:
    """Return the scale as a loss scaler of any program holds it, usable or not; None if it is of an unknown class."""
    try:
        return _first_value_under_keys(_scaler_values_in_state(state), *SCALE_KEYS)
    except ConversionError:
        return None


def values_of_loss_scaler(state: Any) -> LossScalerValues:
    """Return the values of a loss scaler of any program, a dict of its attributes, or of an optimizer that holds one.

    A scale alone is taken for that of a dynamic scaler.
    """
    scaler = _scaler_values_in_state(state)
    scale = parse_scale(_first_value_under_keys(scaler, *SCALE_KEYS), "the loss scale")
    count = parse_count(_first_value_under_keys(scaler, *COUNTS) or 0, "the count of clean steps")
    interval = _first_value_under_keys(scaler, *WINDOWS)
    moves = interval is not None or _first_value_under_keys(scaler, *COUNTS[3:]) is not None
    if not (
        scaler["dynamic"] if "dynamic" in scaler else scaler.get("mode", "dynamic") == "dynamic" and moves
    ):
        return LossScalerValues(scale, clean=count)
    if interval is None:
        interval = MEGATRON_INTERVAL if "hysteresis_tracker" in scaler else APEX_INTERVAL
    window = max(1, parse_count(interval, "the scale window"))
    iteration = _first_value_under_keys(scaler, "cur_iter", "_iter")
    last = _first_value_under_keys(scaler, "last_overflow_iter", "_last_overflow_iter")
    if iteration is not None:  # all iterations are counted, and the one of the last overflow
        since = parse_count(iteration, "cur_iter") - (last if isinstance(last, int) else -1) - 1
        count = max(0, since) % window
    factor = parse_scale(
        _first_value_under_keys(scaler, "scale_factor", "growth_factor") or 2.0, "the scale factor"
    )
    least = 1.0 if "cur_scale" in scaler else scaler.get("_min_loss_scale")
    most = scaler.get("_max_loss_scale")
    least = parse_scale(least, "min_loss_scale") if least else None
    most = None if most is None else parse_scale(most, "max_loss_scale")
    return LossScalerValues(scale, True, count, window, factor, least, most)


def unfinished_step_flag_lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each flag of an `FP16_Optimizer` that says what it was in the middle of."""
    if state.get("overflow"):
        yield "overflow=True: saved between backward and step, that step is no longer skipped; saved after it, nothing"
    if state.get("first_closure_call_this_step") is False:
        yield "first_closure_call_this_step=False: it was saved inside a closure, which cannot be resumed"


def grad_scaler_states_from_apex(
    state: Mapping[str, Any],
    *,
    level: str | None,
    static: bool | None,
    lost_lines: list[str],
    changed_lines: list[str],
    for_arm: bool = False,
) -> list[dict[str, Any]]:
    """Return one `GradScaler` state for each Apex scaler, in order.

    `static` is whether the scale is a static one, if that is known: no state of Apex says so, and only some show it by
    their numbers. `lost_lines` and `changed_lines` get a line for each value that is lost, and for each that is written
    in another form; so they do below. For `for_arm` see `grad_scaler_states_from_values`.
    """
    scales: dict[str, LossScalerValues] = {}
    for name, entry in state.items():
        scale = parse_scale(entry["loss_scale"], f"the scale of {name}")
        clean = parse_count(entry["unskipped"], f"unskipped of {name}")
        is_one = level in STATIC_LEVELS and scale == 1.0
        is_power = math.frexp(scale)[0] == 0.5  # as 65536 is, and what doubling and halving make of it
        is_static = static or clean >= APEX_INTERVAL or is_one or (static is None and not is_power)
        if is_static and scale == 1.0 and level == "O3":
            is_static = False
            scale = FIRST_SCALE
            clean = 0
            changed_lines.append(f"{name}: O3 scaled nothing, so the GradScaler begins as a new one")
        scales[name] = LossScalerValues(scale, not is_static, clean, None if is_static else APEX_INTERVAL)
    if static is None and any(held.dynamic for held in scales.values()):
        lost_lines.append(UNKNOWN_STATIC)
    return grad_scaler_states_from_values(
        scales, lost_lines=lost_lines, changed_lines=changed_lines, for_arm=for_arm
    )


def apex_state_from_grad_scalers(
    scalers: Sequence[Mapping[str, Any]], *, level: str, lost_lines: list[str], changed_lines: list[str]
) -> dict[str, dict[str, Any]]:
    """Return an `amp.state_dict()` with one entry for each `GradScaler`; `level` will load it."""
    made: dict[str, dict[str, Any]] = OrderedDict()  # as Apex returns it
    for index, state in enumerate(scalers or [{}]):
        name = f"loss_scaler{index}"
        if not state:
            scale = 1.0 if level in STATIC_LEVELS else FIRST_SCALE
            made[name] = {"loss_scale": scale, "unskipped": 0}
            changed_lines.append(
                f"{name}: there was no GradScaler, so it begins at {scale:g}, as {level} does"
            )
            continue
        scale = parse_scale(state["scale"], "the scale of the GradScaler")
        clean = parse_count(state["_growth_tracker"], "_growth_tracker")
        if level in STATIC_LEVELS:
            made[name] = {"loss_scale": 1.0, "unskipped": 0}
            lost_lines.append(
                f"scale {scale:g}: {level} has a static scale of 1, and with another no overflow is noticed"
            )
            continue
        changed_lines.append(
            f"{name}: scale {scale:g} and _growth_tracker {clean}, as loss_scale and unskipped"
        )
        for key, apex_value in (("growth_factor", APEX_FACTOR), ("backoff_factor", APEX_BACKOFF)):
            factor = parse_scale(state[key], key)
            if factor != apex_value:
                lost_lines.append(f"{key} {factor:g}: Apex always has {apex_value:g}")
        interval = parse_count(state["growth_interval"], "growth_interval")
        if interval >= NEVER:
            changed_lines.append(
                f"{name}: a scale that never grows; give loss_scale={scale:g} to amp.initialize too"
            )
        elif interval != APEX_INTERVAL:
            lost_lines.append(f"growth_interval {interval}: Apex always has {APEX_INTERVAL}")
        if clean >= APEX_INTERVAL:
            lost_lines.append(
                f"_growth_tracker {clean}: Apex never grows from there, so unskipped is {APEX_INTERVAL - 1}"
            )
            clean = APEX_INTERVAL - 1
        if scale > APEX_MAX:
            lost_lines.append(
                f"scale {scale:g} is above Apex's ceiling of 2**24: its next growth moves it down there"
            )
        made[name] = {"loss_scale": scale, "unskipped": clean}
    return made


def grad_scaler_states_from_values(
    scales: Mapping[str, LossScalerValues],
    *,
    lost_lines: list[str],
    changed_lines: list[str],
    for_arm: bool = False,
) -> list[dict[str, Any]]:
    """Return one `GradScaler` state for each loss scaler.

    A static scale of 1 is for an arm the empty state of a disabled GradScaler. A script's GradScaler need not be
    disabled, and refuses that: it gets one that leaves losses as they are.
    """
    made: list[dict[str, Any]] = []
    for name, held in scales.items():
        if not held.dynamic and held.scale == 1.0:
            made.append({} if for_arm else _grad_scaler_state(held))
            becomes = "a disabled GradScaler" if for_arm else "a GradScaler of scale 1 that never grows"
            changed_lines.append(f"{name}: static scale 1 becomes {becomes}")
            continue
        if not held.dynamic:
            changed_lines.append(
                f"{name}: static scale {held.scale:g} becomes a GradScaler that never grows; it still halves at an "
                "overflow, where it stayed"
            )
        elif held.clean or held.scale != FIRST_SCALE:
            changed_lines.append(
                f"{name}: scale {held.scale:g} and {held.clean} clean steps, as scale and _growth_tracker"
            )
        bounds = (("min_loss_scale", held.least), ("max_loss_scale", held.most)) if held.dynamic else ()
        lost_lines += [f"{key} {bound:g}: GradScaler has none" for key, bound in bounds if bound is not None]
        made.append(_grad_scaler_state(held))
    if len(made) > 1:
        lost_lines.append(
            f"{len(made)} loss scalers: a list of GradScalers, and a script has to use one for each optimizer or loss"
        )
    return made


def _grad_scaler_state(held: LossScalerValues) -> dict[str, Any]:
    return {
        "scale": held.scale,
        "growth_factor": held.factor,
        "backoff_factor": 1.0 / held.factor,
        "growth_interval": NEVER if held.interval is None else held.interval,
        "_growth_tracker": held.clean if held.dynamic else 0,
    }


def apex_state_from_values(
    scales: Sequence[LossScalerValues], *, level: str, lost_lines: list[str], changed_lines: list[str]
) -> dict[str, dict[str, Any]]:
    """Return an `amp.state_dict()` for `level`, with one entry for the loss scaler of each `FP16_Optimizer`."""
    made: dict[str, dict[str, Any]] = OrderedDict()  # as Apex returns it
    for index, held in enumerate(scales):
        name = f"loss_scaler{index}"
        if not held.dynamic:
            made[name] = {"loss_scale": held.scale, "unskipped": held.clean}
            changed_lines.append(
                f"{name}: static scale {held.scale:g}; give loss_scale={held.scale:g} to amp.initialize too, as no "
                "state says that a scale is static"
            )
            continue
        (made[name],) = apex_state_from_grad_scalers(
            [_grad_scaler_state(held)], level=level, lost_lines=lost_lines, changed_lines=changed_lines
        ).values()
        if held.least is not None:
            lost_lines.append(
                f"min_loss_scale {held.least:g}: no state of amp has it; give it to amp.initialize"
            )
        if held.most != APEX_MAX:
            maximum = "none" if held.most is None else f"{held.most:g}"
            lost_lines.append(f"max_loss_scale {maximum}: no state of amp has it; give it to amp.initialize")
    if len(made) > 1:
        lost_lines.append(f"{len(made)} loss scalers: give num_losses={len(made)}, and each loss its loss_id")
    return made
