"""The four laws that carry over from the first steps of a training to its end, applied to what arms declare.

Their limits come from a bank of 5,600 small trainings: docs/ahead.md. Nothing is fitted. Needs no torch.
"""

import contextlib
import math
from collections.abc import Sequence

from ampcompare.backends.arm import Arm
from ampcompare.backends.roles import FP16_MAX, Roles
from ampcompare.base.errors import ConfigError
from ampcompare.base.formatting import format_rough_percent_number
from ampcompare.results.records.outlook import ArmOutlook, WatchedFirstSteps

# of runs that lose more of their updates over the rest of the schedule, 9 in 10 end 2 % worse than fp32
HIGH = 0.4
# of those that lose less, 2 in 100; in bf16 the rounded weights themselves cost too much to say so
LOW = {"fp16": 0.2}
CHAOTIC = 0.01  # a twin farther away: a difference of that size is a path, and no fault
LAST = 0.3  # of the prefix, over which twins are compared
MIN_LOSSES = 3
MAX_STEP_ERROR = 0.1  # of a step's size, mean over the rest: of 35 trainings with less, none ended 2 % worse
LONGER = 4  # times the prefix that is proposed where twins are still far apart


def loss_distance(losses: Sequence[float], twin_losses: Sequence[float]) -> float | None:
    """Return how far the losses of two trainings are apart at the end of a prefix.

    Args:
        losses: of each step of one.
        twin_losses: of each step of the other, which began with weights changed by one part in 512.

    Returns:
        The root of the mean square of relative differences, over the last steps; infinite if a loss is not finite or is
        0, and None if there are too few steps.
    """
    count = min(len(losses), len(twin_losses))
    last = max(MIN_LOSSES, round(LAST * count))
    if count < last:
        return None
    pairs = list(zip(losses[count - last : count], twin_losses[count - last : count], strict=True))
    if not all(math.isfinite(a) and math.isfinite(b) and a for a, b in pairs):
        return math.inf
    return math.sqrt(sum((b / a - 1) ** 2 for a, b in pairs) / len(pairs))


def expected_outlook_of(arm: Arm, prefix: WatchedFirstSteps, twin_distance: float | None) -> ArmOutlook:
    """Return what is to be expected of an arm, from the first steps of the training in fp32.

    Args:
        arm: that is asked about.
        prefix: what the first steps showed.
        twin_distance: the distance of a twin of the prefix, by `loss_distance`; None if none was trained.
    """
    roles = _find_declared_or_seen_roles(arm, prefix)
    name = str(arm)
    if roles is None:
        return ArmOutlook(arm=name, word="cannot know", why="what it holds in which type is not declared")
    share = prefix.zero_denominators.get(roles.state, 0.0)
    if share:
        why = f"the optimizer's denominator is 0 in {roles.state} for {_percent_text(share)} of the elements, at once"
        options = _text_of_options_arm_takes(arm, "state=fp32") or _text_of_options_arm_takes(
            arm, "masters=fp32"
        )
        cure = f"{options}, or a larger eps"
        return ArmOutlook(arm=name, word="will not hold", part="state", why=why, cure=cure)
    overflow = _overflow_text(roles, prefix)
    if overflow:
        return ArmOutlook(
            arm=name,
            word="will not hold",
            part="gradients",
            why=overflow,
            cure="loss_scale=dynamic, or a smaller one",
        )
    if twin_distance is not None and twin_distance > CHAOTIC and roles != Roles():
        return ArmOutlook(arm=name, word="cannot know", why=_why_twin_too_far(prefix, twin_distance))
    if roles.operand_type == "fp8" or any(form.format != "bf16" for form in roles.linear_formats.values()):
        why = "what the noise of products in 8 or 4 bits costs depends on how far the loss still falls"
        return ArmOutlook(arm=name, word="cannot know", part="products", why=why)
    found = ArmOutlook(arm=name, word="no fault in sight")
    rounds_weights = roles.weights != "fp32" and not roles.masters and roles.update == "nearest"
    if (rounds_weights or roles.state != "fp32") and not prefix.shares:
        why = f"the training ended after {prefix.steps} steps, too few to measure what rounding loses of an update"
        return ArmOutlook(
            arm=name, word="cannot know", part="weights" if rounds_weights else "state", why=why
        )
    if rounds_weights and roles.weights in prefix.shares:
        found = _outlook_by_lost_updates(arm, roles, prefix)
    if found.word == "no fault in sight":
        return _find_outlook_by_rounded_state(arm, roles, prefix) or found
    return found


def _why_twin_too_far(prefix: WatchedFirstSteps, twin_distance: float) -> str:
    """Return why a training whose twin is far away says nothing, and what may say more."""
    why = (
        f"twins differ by {_percent_text(twin_distance)} over these {prefix.steps} steps, as any arm "
        "may, whatever they do later"
    )
    longer = prefix.steps * LONGER
    if prefix.total is not None and longer >= prefix.total:
        return f"{why}; compare the arm to the end"
    return f"{why}; --prefix {longer} tells whether they come together again"


def _find_outlook_by_rounded_state(arm: Arm, roles: Roles, prefix: WatchedFirstSteps) -> ArmOutlook | None:
    """Return what rounding the state that divides the steps means; None where it means nothing."""
    found = prefix.state_errors.get(roles.state)
    if found is None or found.largest_error <= MAX_STEP_ERROR:
        if roles.state == "fp32" or prefix.state_is_known:
            return None
        why = f"it is not known how the optimizer moves the state that it holds in {roles.state}"
        return ArmOutlook(arm=str(arm), word="cannot know", part="state", why=why)
    if found.decay < 1:
        moves = f"a second moment that decays by {_percent_text(1 - found.decay)} a step hardly falls in {roles.state}"
    else:
        moves = f"a sum of squares stops to grow in {roles.state}"
    when = "if gradients fall to a tenth" if found.falling >= found.steady else "with gradients as they are"
    away = f"steps are {_percent_text(found.largest_error)} away from fp32's in the mean of the next {found.steps}"
    why = f"{moves}: {away}, {when}"
    fp32 = (
        f"no state={roles.state}" if "state" in arm.options else _text_of_options_arm_takes(arm, "state=fp32")
    )
    cure = f"{fp32}, or a smaller beta2" if found.decay < 1 else fp32
    return ArmOutlook(arm=str(arm), word="cannot know", part="state", why=why, cure=cure)


def _find_declared_or_seen_roles(arm: Arm, prefix: WatchedFirstSteps) -> Roles | None:
    """Return what an arm declares; of the script as it is written, what was seen of its weights."""
    if not arm.is_as_written:
        return arm.roles
    held = prefix.weights or "fp32"
    return Roles(weights=held, gradients=held, state=held, step=held)


def _overflow_text(roles: Roles, prefix: WatchedFirstSteps) -> str:
    """Return what was seen beyond the largest fp16 number; "" for nothing, or where a dynamic scale avoids it."""
    scale = roles.loss_scale
    is_dynamic = scale is not None and scale.interval is not None
    if is_dynamic or "fp16" not in (roles.operand_type, roles.gradients):
        return ""
    factor = 1.0 if scale is None else scale.first
    largest = prefix.largest_gradient or 0.0
    if not largest * factor > FP16_MAX:
        return ""
    times = f" times the loss scale {factor:g}" if factor != 1 else ""
    return f"a gradient of {largest:.3g}{times} was seen, beyond {FP16_MAX:g}, the largest number of fp16"


def _text_of_options_arm_takes(arm: Arm, *options: str) -> str:
    """Return those of some options that an arm takes; of a script, those of the arm that takes its place."""
    place, before = ("half:bf16", "half:bf16 with ") if arm.is_as_written else (str(arm), "")
    taken = []
    for option in options:
        with contextlib.suppress(ConfigError):
            Arm.parse(f"{place},{option}")
            taken.append(option)
    return before + " or ".join([*filter(None, [", ".join(taken[:-1])]), *taken[-1:]])


def _outlook_by_lost_updates(arm: Arm, roles: Roles, prefix: WatchedFirstSteps) -> ArmOutlook:
    """Return what the updates that rounding loses mean."""
    share = prefix.shares[roles.weights]
    has_schedule = prefix.rates_known and prefix.basis
    when = (
        f"over the rest of the schedule (now {_percent_text(share.now)})"
        if has_schedule
        else "if the rate stays"
    )
    lost = (
        f"{'at least ' if prefix.is_floor else ''}{_percent_text(share.rest if has_schedule else share.now)}"
    )
    figures = f"{lost} of the update is below half an ulp {when}"
    if arm.is_as_written:
        figures = f"your script loses {lost} of its updates {when}"
    cure = _text_of_options_arm_takes(arm, "masters=fp32", "kahan", "rounding=stochastic")
    base = {"arm": str(arm), "part": "weights", "share_now": share.now, "share_rest": share.rest}
    if not prefix.rates_known and share.now <= HIGH:
        why = f"the learning rates ahead are not known ({prefix.basis}); {figures}"
        return ArmOutlook.model_validate({**base, "word": "cannot know", "why": why})
    if max(share.rest, share.now if not prefix.rates_known else 0.0) > HIGH:
        return ArmOutlook.model_validate({**base, "word": "will not hold", "why": figures, "cure": cure})
    word = "no fault in sight" if share.rest < LOW.get(roles.weights, 0.0) else "cannot know"
    return ArmOutlook.model_validate(
        {**base, "word": word, "why": figures, "cure": cure if word == "cannot know" else ""}
    )


def _percent_text(share: float) -> str:
    if not math.isfinite(share):
        return "without limit"
    return f"{format_rough_percent_number(share)} %"
