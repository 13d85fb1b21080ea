"""How a rewritten script trained against the original, step by step, and what roundings alone would make."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.experiment.script_run import ScriptRun

# Relative; fp16 keeps 11 bits, and some steps of training make more of a rounding.
ROUNDING = 0.01
# Taken steps up to which losses must agree. Some training makes much of a rounding in the steps behind them: small
# batches through batch norm, Adam on gradients near 0.
FIRST = 3
# A tensor that differs by more is compared by its length. A vector that starts at 0, as biases of batch norm do, is the
# sum of a few updates.
OF_LENGTH = 0.1
SMALL = 0.1
OF_SMALL = 0.5
EQUAL = "equal to the last bit"
WITHIN = "within rounding"
DIFFERENT = "different"
# What a rewrite may differ from the original, in differences of a twin, whose weights are a unit in the last place of
# fp16 apart; and how much it may where the twin is equal. Of losses, and of norms of gradients.
OF_TWIN = 8.0
WITHOUT_TWIN = 2.0**-9
NORMS_WITHOUT_TWIN = 0.1
HALVES = ("float16", "bfloat16")
# The factor between the norms of gradients that steps use: one that was not unscaled is a loss scale apart. Smaller
# norms than the last are roundings of what cancels out.
OF_NORM, MIN_NORM = 2.0, 1e-6
OF_FIRST_NORM = 1.005
# Operations of the autograd graph that both Apex and torch.amp run in 16 bits, and those that both run in fp32. Not
# LogSoftmax: that of cross_entropy stays in 16 bits under autocast for CUDA, since torch passes its type on.
PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Mv", "Convolution", "ConvolutionBackward")
IN_FP32 = (
    "Softmax", "NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits",
    "MseLoss", "L1Loss", "SmoothL1Loss", "KlDiv", "SoftMarginLoss", "CtcLoss",
)  # fmt: skip
# Operations that round nothing: their result has the type of what they get.
EXACT = (
    "AccumulateGrad", "ToCopy", "Copys", "Copy", "Clone", "Alias", "Detach", "T", "Transpose", "Permute", "Movedim",
    "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze", "AsStrided", "Repeat", "Flip", "Roll",
    "Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Cat", "Stack", "Index", "IndexSelect", "Gather", "Where",
    "MaskedFill", "MaskedSelect", "ConstantPadNd", "Relu", "Threshold", "Hardtanh", "Clamp", "ClampMin", "ClampMax",
    "Neg", "Abs", "Max", "Min", "Amax", "Amin", "Maximum", "Minimum", "Topk", "Sort", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "AdaptiveMaxPool2D", "Embedding", "CppFunction",
)  # fmt: skip
MAX_KINDS = 6  # of operations that a line names


def compare_runs(
    original: ScriptRun, rewritten: ScriptRun, twin: ScriptRun | None = None, twin_of: ScriptRun | None = None
) -> tuple[str, list[str]]:
    """Return how the rewritten script trained against the original: the verdict, and what was compared, in words.

    Args:
        original: a run of the unchanged script.
        rewritten: one of the rewritten script, of as many steps.
        twin: weights that are apart in it may be apart in the result.
        twin_of: the run whose twin it is; None for the original.

    Returns:
        `EQUAL`, `WITHIN` or `DIFFERENT`, the worst of what was compared, and a line for each comparison.
    """
    apart: dict[str, float] = {}
    if twin is not None:
        base = (twin_of or original).weights
        apart = {
            key: _largest_relative_difference(base[key], twin.weights[key])
            for key in base.keys() & twin.weights.keys()
        }
    compared = [
        _compare_losses(original, rewritten),
        _compare_scales(original, rewritten),
        _compare_steps(original, rewritten),
        _compare_weights(original, rewritten, apart),
    ]
    compared += [*_compare_types(original, rewritten), *_compare_evaluations(original, rewritten)]
    if line := _line_on_more_16bit_work(original, rewritten):
        compared.append((EQUAL, line))  # what it makes of numbers, the others compare
    # Different whatever roundings do: gradients that are not unscaled, no autocast.
    beyond = [
        _gradient_difference_text(original, rewritten),
        _operation_precision_difference_text(original, rewritten),
    ]
    beyond += _lines_on_settings_few_steps_hide(original, rewritten)
    compared += [(DIFFERENT, line) for line in beyond if line]
    order = (EQUAL, WITHIN, DIFFERENT)
    return max((verdict for verdict, _ in compared), key=order.index), [line for _, line in compared]


def differences_beyond_twin(
    original: ScriptRun, rewritten: ScriptRun, twin: ScriptRun, twin_of: ScriptRun | None = None
) -> list[str]:
    """Return where a rewrite differs by more than roundings make, as a twin shows them.

    Args:
        original: a run of the unchanged script.
        rewritten: one of the rewritten script.
        twin: a run whose weights were moved by a unit in the last place of fp16 behind the first step.
        twin_of: the run whose twin it is: `rewritten`, or None for the original.

    Returns:
        A line for the losses and one for the gradients of each optimizer, each naming its first place; empty where
        nothing is beyond `OF_TWIN` times what the twin shows up to there.
    """
    lines = []
    largest = 0.0
    base = twin_of or original
    whose = "unchanged" if base is original else "rewritten"
    apart = _loss_differences(base, twin)
    for number, difference in enumerate(_loss_differences(original, rewritten), 1):
        largest = max(largest, apart[number - 1] if number <= len(apart) else float("inf"))
        if difference > max(OF_TWIN * largest, WITHOUT_TWIN):
            lines.append(
                _difference_beyond_twin_text(
                    f"losses: {DIFFERENT}; at backward pass {number}", difference, largest, whose
                )
            )
            break
    for name, norms in original.norms.items():
        largest = 0.0
        runs = (rewritten, twin, base)
        others = zip(norms, *(run.norms.get(name, []) for run in runs), strict=False)
        for number, (first, second, third, fourth) in enumerate(others, 1):
            if None in (first, second, third, fourth) or max(first or 0.0, second or 0.0) < MIN_NORM:
                continue
            largest = max(largest, _relative_difference(fourth, third))
            if _relative_difference(first, second) > max(OF_TWIN * largest, NORMS_WITHOUT_TWIN):
                where = f"gradients: {DIFFERENT}; their norm at step {number} of optimizer {int(name) + 1}"
                lines.append(
                    _difference_beyond_twin_text(where, _relative_difference(first, second), largest, whose)
                )
                break
    return lines


def is_difference_in_weights_alone(original: ScriptRun, rewritten: ScriptRun) -> bool:
    """Return whether the weights are all that is `DIFFERENT`, as those are whose gradients are roundings of nothing.

    Such as a bias in front of a batch norm: a twin shows how far roundings take it.
    """
    return compare_runs(original, dataclasses.replace(rewritten, weights=original.weights))[0] != DIFFERENT


def compare_starts(original: ScriptRun, rewritten: ScriptRun) -> tuple[str, list[str]]:
    """Compare what two runs of two stacks begin with: first weights, batches and random numbers.

    Args:
        original: the run of the unchanged script in the stack; its `place` names it.
        rewritten: the run here, which began with the weights of the other.

    Returns:
        Why the two are no pair, "" if they are one; and a line for each thing compared.
    """
    lines = ["first weights: equal in both"]
    if rewritten.first_changed:
        count = rewritten.first_changed
        are = "tensor differs" if count == 1 else "tensors differ"
        lines = [
            f"first weights: {count} {are} between the stacks; both runs begin with those of {original.place}"
        ]
    pairs = list(zip(original.batches, rewritten.batches, strict=False))
    other = next((number for number, (first, second) in enumerate(pairs, 1) if first != second), None)
    if other is not None:
        why = f"batch {other} is not the same in both stacks; generators of a GPU and of a CPU give other numbers"
        return why, [*lines, f"batches: {why}"]
    lines.append(f"batches: the first {len(pairs)} are equal")
    if original.draws != rewritten.draws:
        why = "the generators differ where the forward pass draws, as for dropout"
        return why, [*lines, f"random numbers: {why}"]
    return "", lines


def cut_runs_to_common_steps(original: ScriptRun, rewritten: ScriptRun) -> tuple[ScriptRun, ScriptRun]:
    """Return two runs of two stacks as far as both were followed: they may end between the steps of two optimizers."""
    counts = [Counter(number for number, _ in run.applied) for run in (original, rewritten)]
    equal = {str(number) for number in counts[0] if counts[0][number] == counts[1][number]}
    weights = {key: value for key, value in original.weights.items() if key.partition(".")[0] in equal}
    ends = [len(run.applied) for run in (original, rewritten)]
    if original.is_cut and ends[1] > ends[0]:
        rewritten = dataclasses.replace(rewritten, applied=rewritten.applied[: ends[0]])
    elif rewritten.is_cut and ends[0] > ends[1]:
        original = dataclasses.replace(original, applied=original.applied[: ends[1]])
    names = rewritten.names
    return (
        dataclasses.replace(original, norms=original.clip_norms, names=names, weights=weights),
        dataclasses.replace(rewritten, norms=rewritten.clip_norms),
    )


def _difference_beyond_twin_text(where: str, difference: float, largest: float, whose: str) -> str:
    return (
        f"{where} by {difference:.2g}, where a twin of the {whose} script, its weights moved by one unit in the last "
        f"place of fp16, differs by {largest:.2g}"
    )


def _compare_types(original: ScriptRun, rewritten: ScriptRun) -> list[tuple[str, str]]:
    """Return where an evaluation, or what comes to the host, has other types: fewer bits, or more."""
    found = []
    for what, before, after in (
        ("what a model returns without gradients", original.evaluations, rewritten.evaluations),
        ("what comes to the host by cpu()", original.reads, rewritten.reads),
    ):
        for number, (first, second) in enumerate(zip(before, after, strict=False), 1):
            if (first in HALVES) != (second in HALVES):
                verdict = DIFFERENT if second in HALVES else WITHIN
                found.append(
                    (verdict, f"types: {verdict}; {what} is {second}, not {first}, at the {number}. call")
                )
                break
    return found


def _compare_evaluations(original: ScriptRun, rewritten: ScriptRun) -> list[tuple[str, str]]:
    """Return where an evaluation has other values, as one of weights that another script had at another time.

    Where losses have parted, so have evaluations.
    """
    if _first_pass_above_limit(_loss_differences(original, rewritten), ROUNDING) is not None:
        return []
    pairs = zip(original.evaluation_norms, rewritten.evaluation_norms, strict=False)
    for number, (first, second) in enumerate(pairs, 1):
        if _relative_difference(first, second) > OF_LENGTH:
            what = "the norm of what a model returns without gradients"
            text = f"evaluations: {DIFFERENT}; {what} is {second:.3g}, not {first:.3g}, at the {number}. call"
            return [(DIFFERENT, text)]
    return []


def _compare_losses(original: ScriptRun, rewritten: ScriptRun) -> tuple[str, str]:
    if _has_equal_passes_unequally_scaled(original, rewritten):
        counts = f"{len(original.losses)} against {len(rewritten.losses)} were scaled"
        # Apex leaves a plain loss next to a scaled one alone; where it scales none, it skips no step either.
        if not original.losses:
            return DIFFERENT, f"losses: {DIFFERENT}; {counts}"
        return EQUAL, f"losses: not compared, since {counts}"
    differences = _loss_differences(original, rewritten)
    first, parted = _first_pass_above_limit(differences, 0.0), _first_pass_above_limit(differences, ROUNDING)
    if first is None:
        return EQUAL, f"losses: {EQUAL} in {len(differences)} backward passes"
    verdict = WITHIN if parted is None or parted > _count_passes_of_first_steps(original) else DIFFERENT
    until = f" up to backward pass {parted - 1}" if verdict == WITHIN and parted is not None else ""
    return verdict, (
        f"losses: {verdict}{until}; first at backward pass {first}: {original.losses[first - 1]} against "
        f"{rewritten.losses[first - 1]}; largest relative difference {max(differences):.2g}"
    )


def _compare_scales(original: ScriptRun, rewritten: ScriptRun) -> tuple[str, str]:
    if _has_equal_passes_unequally_scaled(original, rewritten):
        return EQUAL, "loss scales: not compared"
    pairs = [(a or 1.0, b or 1.0) for a, b in zip(original.scales, rewritten.scales, strict=False)]
    for index, (first, second) in enumerate(pairs, 1):
        if first != second:
            if index == 1:
                return DIFFERENT, f"loss scales: {DIFFERENT} from the start: {first:g} against {second:g}"
            if len(original.losses) == len(original.applied) == len(rewritten.losses):
                return (
                    DIFFERENT,
                    f"loss scales: {DIFFERENT} at backward pass {index}: {first:g} against {second:g}",
                )
            # Apex moves a scale at each of the passes of a step, a GradScaler once. A power of two changes no bit of
            # what does not overflow; what it skips is compared below.
            return (
                WITHIN,
                f"loss scales: first different at backward pass {index}: {first:g} against {second:g}",
            )
    return EQUAL, "loss scales: equal"


def _step_taken_text(optimizer: int, is_taken: bool) -> str:
    return f"{'taken' if is_taken else 'skipped'} by optimizer {optimizer + 1}"


def _compare_steps(original: ScriptRun, rewritten: ScriptRun) -> tuple[str, str]:
    if rewritten.unchecked_steps:
        how = "an optimizer steps by itself, though a GradScaler has unscaled its gradients, so an overflow is stepped"
        return DIFFERENT, f"steps: {DIFFERENT}; {how}"
    for number, (first, second) in enumerate(zip(original.applied, rewritten.applied, strict=False), 1):
        if first != second:
            how = f"{_step_taken_text(*first)} against {_step_taken_text(*second)}"
            return DIFFERENT, f"steps: first different at step {number}: {how}"
    if len(original.applied) != len(rewritten.applied):
        return DIFFERENT, f"steps: {len(original.applied)} against {len(rewritten.applied)}"
    return EQUAL, "skipped steps: equal"


def _compare_weights(
    original: ScriptRun, rewritten: ScriptRun, twin_distances: Mapping[str, float]
) -> tuple[str, str]:
    """Return the verdict on weights, of every step where both were followed, else of the last one.

    Args:
        twin_distances: how far a twin is from its run.
    """
    place = _first_differing_step_and_tensor(original, rewritten)
    if place is None and original.digests:
        return EQUAL, f"weights: {EQUAL} after every step"
    keys = [key for key in original.weights if key in rewritten.weights and original.weights[key].size]
    for key in keys:
        first, second = original.weights[key].shape, rewritten.weights[key].shape
        if first != second:
            return DIFFERENT, f"weights: {_weight_phrase(original, key)} has shape {first} against {second}"
    worst = 0.0
    where = ""
    verdict = WITHIN
    by_length = ""
    allowed = _allowed_weight_distances(original, rewritten, keys)
    for key in keys:
        first, second = original.weights[key], rewritten.weights[key]
        difference = _largest_relative_difference(first, second)
        if difference > ROUNDING and _distance_in_lengths_of_first(first, second) <= allowed[key]:
            by_length = f"; more in single weights such as those of {_weight_phrase(original, key)}"
        elif difference > ROUNDING and difference <= OF_TWIN * twin_distances.get(key, 0.0):
            by_length = f"; more in {_weight_phrase(original, key)}, which roundings take as far"
        else:
            verdict = verdict if difference <= ROUNDING else DIFFERENT
            if not difference <= worst:
                worst, where = difference, key
    if place is None and not keys:
        return EQUAL, "weights: not compared, since the runs end between the steps of their optimizers"
    if place is None and not worst and not by_length:
        return EQUAL, f"weights: {EQUAL} after the last step"
    begin = "" if place is None else f"first at step {place[0]} in {_weight_phrase(original, place[1])}; "
    key = place[1] if place is not None else keys[0]
    return verdict, (
        f"weights: {verdict}; {begin}at the end by {worst:.2g} of the largest weight at most, in "
        f"{_weight_phrase(original, where or key)}{by_length}"
    )


def _allowed_weight_distances(
    original: ScriptRun, rewritten: ScriptRun, keys: Sequence[str]
) -> dict[str, float]:
    """Return how far each tensor may be apart, in its lengths: farther if it is small, and where losses have parted."""
    # Where losses have parted in later steps, so have weights.
    has_parted = _first_pass_above_limit(_loss_differences(original, rewritten), ROUNDING) is not None
    sizes = {key: float(abs(original.weights[key]).max()) for key in keys}
    largest = max(sizes.values(), default=0.0)
    allowed = {}
    for key, size in sizes.items():
        is_small = original.weights[key].ndim == 1 and size < SMALL * largest
        allowed[key] = OF_SMALL if is_small or has_parted else OF_LENGTH
    return allowed


def _first_differing_step_and_tensor(original: ScriptRun, rewritten: ScriptRun) -> tuple[int, str] | None:
    found: list[tuple[int, str]] = []
    for number, steps in original.digests.items():
        for index, (first, second) in enumerate(
            zip(steps, rewritten.digests.get(number, []), strict=False), 1
        ):
            apart = [place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
            if apart:
                found.append((index, f"{number}.{apart[0]}"))
                break
    return min(found, default=None)


def _weight_phrase(run: ScriptRun, key: str) -> str:
    number, _, index = key.partition(".")
    shape = f" ({'x'.join(map(str, run.weights[key].shape))})" if key in run.weights else ""
    name = run.names.get(key, f"parameter {int(index) + 1}")
    return f"{name}{shape} of optimizer {int(number) + 1}"


def _gradient_difference_text(original: ScriptRun, rewritten: ScriptRun) -> str:
    """Return where an optimizer was given other gradients; Adam trains nearly alike if they are not unscaled."""
    for number, norms in original.norms.items():
        for index, (first, second) in enumerate(zip(norms, rewritten.norms.get(number, []), strict=False)):
            taken = _is_step_taken(original, number, index) and _is_step_taken(rewritten, number, index)
            if not taken or first is None or second is None or (first < MIN_NORM and second < MIN_NORM):
                continue
            # Of the first step, the same losses have the same gradients.
            factor = OF_FIRST_NORM if index == 0 and _has_equal_first_losses(original, rewritten) else OF_NORM
            if not (first <= factor * second and second <= factor * first) and _relative_difference(
                first, second
            ):
                where = f"step {index + 1} of optimizer {int(number) + 1}"
                return f"gradients: {DIFFERENT}; first at {where}: norm {first:.3g} against {second:.3g}"
    return ""


def _operation_precision_difference_text(original: ScriptRun, rewritten: ScriptRun) -> str:
    """Return which operations run in another precision; without autocast losses are no more than roundings apart."""
    for number, (first, second) in enumerate(zip(original.passes, rewritten.passes, strict=False), 1):
        for name in sorted(first.keys() & second.keys()):
            (half, wide), (new_half, new_wide) = first[name], second[name]
            kind = _operation_of_node(name)
            where = f"precision: {DIFFERENT}; in backward pass {number}, {new_half} of {kind} are in 16 bits"
            if kind in PRODUCTS and (new_half - half) * (new_wide - wide) < 0:
                place = "outside of autocast" if new_half < half else "under autocast that had its casts off"
                return f"{where}, {half} in the unchanged script: is a forward pass {place}?"
            if kind in IN_FP32 and not half and new_half:
                return f"{where}, none in the unchanged script: is a loss outside of autocast?"
    return ""


def _line_on_more_16bit_work(original: ScriptRun, rewritten: ScriptRun) -> str:
    """Return which operations run in 16 bits more often than in the unchanged script; "" for none."""
    for number, (first, second) in enumerate(zip(original.passes, rewritten.passes, strict=False), 1):
        more = []
        for name, (half, _) in sorted(second.items()):
            before, kind = first.get(name, (0, 0))[0], _operation_of_node(name)
            if half > before and kind not in EXACT:
                more.append(f"{kind} {half}, not {before}")
        if more:
            rest = f" and {len(more) - MAX_KINDS} more" if len(more) > MAX_KINDS else ""
            what = "operations that run in 16 bits more often than in the unchanged script"
            return f"precision: {what}, in backward pass {number}: {'; '.join(more[:MAX_KINDS])}{rest}"
    return ""


def _operation_of_node(name: str) -> str:
    """Return the operation of a node of the autograd graph: `Addmm` of `AddmmBackward0`."""
    return name.rstrip("0123456789").removesuffix("Backward")


def _lines_on_settings_few_steps_hide(original: ScriptRun, rewritten: ScriptRun) -> list[str]:
    """Return what a run of few steps need not show: another 16-bit type or policy of the loss scale, kept gradients."""
    found = []
    if original.halves and rewritten.halves and original.halves != rewritten.halves:
        types = [" and ".join(each.halves) for each in (rewritten, original)]
        found.append(f"precision: {DIFFERENT}; losses are computed in {types[0]}, not in {types[1]}")
    if original.policy and rewritten.policy and original.policy != rewritten.policy:
        policies = [
            f"{up:g} and {down:g} every {steps:g} steps"
            for up, down, steps in (rewritten.policy, original.policy)
        ]
        found.append(f"loss scales: {DIFFERENT}; the factors are {policies[0]}, not {policies[1]}")
    for number, (first, second) in enumerate(zip(original.clears, rewritten.clears, strict=False), 1):
        if first and not second:
            found.append(
                f"gradients: {DIFFERENT}; nothing clears them before step {number}, as in the unchanged script"
            )
            break
    return found


def _is_step_taken(run: ScriptRun, number: str, index: int) -> bool:
    steps = [taken for each, taken in run.applied if str(each) == number]
    return index < len(steps) and steps[index]


def _has_equal_first_losses(original: ScriptRun, rewritten: ScriptRun) -> bool:
    """Return whether the losses of the first step are equal to the last bit."""
    differences = _loss_differences(original, rewritten)
    passes = max(1, len(original.losses) // max(1, len(original.applied)))
    return bool(differences) and not any(differences[:passes])


def _count_passes_of_first_steps(run: ScriptRun) -> int:
    """Return the backward passes of the first taken steps, of all where there are no more steps."""
    taken = [number for number, (_, applied) in enumerate(run.applied, 1) if applied]
    return len(run.losses) if len(taken) <= FIRST else len(run.losses) * taken[FIRST - 1] // len(run.applied)


def _has_equal_passes_unequally_scaled(original: ScriptRun, rewritten: ScriptRun) -> bool:
    """Return whether both ran as many backward passes, and scaled more of them in one: Apex leaves plain ones alone."""
    return len(original.passes) == len(rewritten.passes) and len(original.losses) != len(rewritten.losses)


def _loss_differences(original: ScriptRun, rewritten: ScriptRun) -> list[float]:
    """Return the relative difference of the losses of each backward pass; none if other passes were scaled."""
    if _has_equal_passes_unequally_scaled(original, rewritten):
        return []
    return [_relative_difference(*pair) for pair in zip(original.losses, rewritten.losses, strict=False)]


def _relative_difference(first: float | None, second: float | None) -> float:
    """Return a relative difference: 0 for two NaN, infinity where one alone is NaN or there is none."""
    if first == second or (first != first and second != second):
        return 0.0
    if first is None or second is None:
        return float("inf")
    found = abs(first - second) / max(abs(first), abs(second), 1e-6)
    return found if found == found else float("inf")


def _first_pass_above_limit(differences: list[float], limit: float) -> int | None:
    """Return the first backward pass whose losses are more than a limit apart."""
    return next((number for number, each in enumerate(differences, 1) if each > limit), None)


def _largest_relative_difference(first: Any, second: Any) -> float:
    """Return the largest difference of two tensors of one shape, as a part of the largest number of the first."""
    return float(abs(first - second).max()) / max(float(abs(first).max()), 1e-6)


def _distance_in_lengths_of_first(first: Any, second: Any) -> float:
    """Return how far two vectors are apart, in lengths of the first."""
    return float(((first - second) ** 2).sum() ** 0.5) / max(float((first**2).sum() ** 0.5), 1e-12)
