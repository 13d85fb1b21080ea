"""Find the fp32 copies of 16-bit weights in a checkpoint by shapes and values, whatever they are called.

A copy rounds to its weight. Programs keep copies as lists by parameter group, as dicts by name, in the state of an
optimizer, or as one flat tensor for each group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ampcompare.base.tensors.products import HALF_DTYPES

Place = tuple[str, ...]
FULL_DTYPES = (torch.float32, torch.float64)
LOOKED_AT = 1 << 18
COMPARED_FIRST = 64
MAX_DEPTH = 8
MIN_TRIES = 1000
MIN_ELEMENTS = 8
OTHER_STATES = ("best", "ema", "averag", "swa", "teacher", "target")
"""In the names of weights that are those of the model at another time, though they may be equal by chance."""


@dataclass
class Masters:
    """The fp32 copies of the weights of some models.

    Layouts are the elements of each flat copy, and the shapes of the weights in it, in order.
    """

    by_model: list[dict[str, Tensor]]  # by the names of weights, for each model
    # where they lie, with the number of weights found there
    places: dict[Place, int] = field(default_factory=dict)
    unmatched: int = 0  # next to these, or under a name of fp32 copies, rounding to no weight
    layouts: list[tuple[int, list[torch.Size]]] = field(default_factory=list)


class _WeightAtPlace(NamedTuple):
    model: int
    name: str
    value: Tensor


class _TensorsOfOneContainer(NamedTuple):
    """Tensors that lie together, with their names or numbers."""

    place: Place
    names: list[str]
    tensors: list[Tensor]
    is_state: bool  # of an optimizer: moments, and copies in some programs


def is_optimizer_state(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is the state dict of an optimizer."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("param_groups"), list)
        and isinstance(value.get("state"), Mapping)
    )


def are_representable_in(tensors: Iterator[Tensor], dtype: torch.dtype = torch.float16) -> bool | None:
    """Return whether fp32 tensors hold only values that a 16-bit type represents; None if no element is conclusive.

    Looks at the first 262,144 elements of each; zeros and small whole numbers are not conclusive.
    """
    is_conclusive = False
    for tensor in tensors:
        if tensor.dtype is not torch.float32:
            continue
        values = tensor.detach().reshape(-1)[:LOOKED_AT]
        fractional = values[(values.frac() != 0) & values.isfinite()]
        if not torch.equal(fractional.to(dtype).float(), fractional):
            return False
        is_conclusive = is_conclusive or fractional.numel() >= 8
    return True if is_conclusive else None


def half_type_of_weights(model: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit type of weights, or of all their values where they are fp32; None if they have more bits.

    Batch norms, which O2 keeps in fp32, are not looked at.
    """
    weights = list(floating_entries_of_model(model, of_norms=False))
    held = next((weight.dtype for weight in weights if weight.dtype in HALF_DTYPES), None)
    narrowest_first = (torch.bfloat16, torch.float16)  # whose bits are among those of fp16
    return held or next(
        (dtype for dtype in narrowest_first if are_representable_in(iter(weights), dtype)), None
    )


def floating_entries_of_model(model: Mapping[str, Any], *, of_norms: bool) -> Iterator[Tensor]:
    """Yield the floating-point entries of batch norms, which O2 leaves in fp32, or all others."""
    norms = tuple(name.removesuffix("running_mean") for name in model if name.endswith("running_mean"))
    for name, value in model.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name.startswith(norms) == of_norms:
            yield value


def find_masters(
    root: Any, models: Mapping[Place, Mapping[str, Any]], wrappers: Sequence[Place] = ()
) -> Masters:
    """Find the fp32 copies of the 16-bit weights of models, anywhere in a checkpoint.

    Weights of one shape and equal values get their copies by name, else in the order of both. `wrappers` are places of
    optimizers that are known to keep copies.
    """
    found = Masters([{} for _ in models])
    halves = {place for place, model in models.items() if half_type_of_weights(model)}
    every = _weights_at_places(models, halves)
    first: dict[Any, _WeightAtPlace] = {}
    for weight in every:
        first.setdefault(_memory_key(weight.value), weight)
    free = list(first.values())
    for bundle in _tensors_together_in(root, (), set()):
        if not free or bundle.place in halves or _is_of_other_model_state(bundle.place, halves):
            continue
        matches = _weights_copied_by_each_tensor(bundle, free)
        is_known = _are_where_copies_lie(bundle, wrappers)
        if not is_known:
            matches = _significant_matches(bundle, matches, free)
        if is_known or 2 * sum(map(bool, matches)) > len(matches):
            found.unmatched += sum(not match for match in matches)
        if not any(matches):
            continue
        for tensor, match in zip(bundle.tensors, matches, strict=True):
            if match:
                _add_copies(found, tensor, [free[at] for at in match])
        taken = {at for match in matches for at in match}
        found.places[bundle.place] = len(taken)
        free = [weight for at, weight in enumerate(free) if at not in taken]
    _give_copies_to_tied_weights(found, every)
    return found


def _weights_at_places(models: Mapping[Place, Mapping[str, Any]], halves: set[Place]) -> list[_WeightAtPlace]:
    """Return the weights of those models that lie at some places."""
    weights = []
    for index, (place, model) in enumerate(models.items()):
        for name, value in model.items() if place in halves else ():
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                weights.append(_WeightAtPlace(index, name, value))
    return weights


def _are_where_copies_lie(bundle: _TensorsOfOneContainer, wrappers: Sequence[Place]) -> bool:
    """Return whether tensors lie where programs keep fp32 copies: by the names above them, or in a known optimizer."""
    if bundle.is_state:
        return False
    if any("fp32" in key.lower() or "master" in key.lower() for key in bundle.place):
        return True
    return bundle.names[0].isdigit() and any(bundle.place[: len(place)] == place for place in wrappers)


def _add_copies(masters: Masters, tensor: Tensor, weights: Sequence[_WeightAtPlace]) -> None:
    """Add a tensor that is the copy of one weight, or of several if it is flat; it may end with zeros."""
    flat, sizes = tensor.detach().reshape(-1), [weight.value.numel() for weight in weights]
    for weight, piece in zip(weights, flat[: sum(sizes)].split(sizes), strict=True):
        masters.by_model[weight.model][weight.name] = piece.reshape(weight.value.shape).float()
    is_flat = len(weights) > 1 or tensor.shape != weights[0].value.shape
    if is_flat and not flat[sum(sizes) :].any():
        masters.layouts.append((tensor.numel(), [weight.value.shape for weight in weights]))


def _is_of_other_model_state(place: Place, halves: set[Place]) -> bool:
    """Return whether a place is by its name that of another state of the model, such as the best so far."""
    keys = {key for key in place if any(word in key.lower() for word in OTHER_STATES)}
    return bool(keys) and not any(keys <= set(own) for own in halves)


def _memory_key(value: Tensor) -> tuple[Any, ...]:
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _give_copies_to_tied_weights(masters: Masters, weights: list[_WeightAtPlace]) -> None:
    """Give the copy of a weight to those that are tied to it, by memory or by values that are no constant."""
    named = [weight for weight in weights if weight.name in masters.by_model[weight.model]]
    for weight in weights:
        held = masters.by_model[weight.model]
        if weight.name not in held and (twin := _first_tied_weight(weight, named)) is not None:
            held[weight.name] = masters.by_model[twin.model][twin.name]


def _first_tied_weight(weight: _WeightAtPlace, named: list[_WeightAtPlace]) -> _WeightAtPlace | None:
    """Return the first of some weights that is tied to another one; None if none is."""
    varies = _has_several_values(weight.value)
    for other in named:
        if _memory_key(weight.value) == _memory_key(other.value):
            return other
        if varies and _are_equal_tensors(weight.value, other.value):
            return other
    return None


def _tensors_together_in(value: Any, place: Place, seen_ids: set[int]) -> Iterator[_TensorsOfOneContainer]:
    """Yield fp32 tensors that lie together: in one list or dict, or under one key of an optimizer's state."""
    if not isinstance(value, Mapping | list | tuple) or id(value) in seen_ids or len(place) > MAX_DEPTH:
        return
    seen_ids.add(id(value))
    if is_optimizer_state(value):
        keys: dict[str, list[tuple[str, Any]]] = {}
        for number, entry in value["state"].items():
            for key, item in entry.items() if isinstance(entry, Mapping) else ():
                keys.setdefault(str(key), []).append((str(number), item))
        for key, entries in keys.items():
            if (
                bundle := _find_full_precision_tensors((*place, "state", key), entries, is_state=True)
            ) is not None:
                yield bundle
        value = {key: item for key, item in value.items() if key != "state"}
    items = [
        (str(k), item) for k, item in (value.items() if isinstance(value, Mapping) else enumerate(value))
    ]
    if (bundle := _find_full_precision_tensors(place, items)) is not None:
        yield bundle
    for key, item in items:
        yield from _tensors_together_in(item, (*place, key), seen_ids)


def _find_full_precision_tensors(
    place: Place, items: list[tuple[str, Any]], *, is_state: bool = False
) -> _TensorsOfOneContainer | None:
    tensors = [
        (name, item)
        for name, item in items
        if isinstance(item, Tensor) and item.dtype in FULL_DTYPES and item.numel()
    ]
    if not tensors:
        return None
    return _TensorsOfOneContainer(
        place, [name for name, _ in tensors], [item for _, item in tensors], is_state
    )


def _weights_copied_by_each_tensor(
    bundle: _TensorsOfOneContainer, free_weights: list[_WeightAtPlace]
) -> list[list[int]]:
    """Return the positions of the weights that each tensor is a copy of: one, several if it is flat, or none."""
    by_shape: dict[torch.Size, list[int]] = {}
    for at, weight in enumerate(free_weights):
        by_shape.setdefault(weight.value.shape, []).append(at)
    options = [
        [at for at in by_shape.get(tensor.shape, ()) if _is_master_of_weight(tensor, free_weights[at].value)]
        for tensor in bundle.tensors
    ]
    chosen: list[list[int]] = [[] for _ in options]
    taken: set[int] = set()

    def choose_match(number: int, ats: list[int]) -> None:
        chosen[number] = ats
        taken.update(ats)

    for number, (name, ats) in enumerate(zip(bundle.names, options, strict=True)):
        same = [
            at for at in ats if free_weights[at].name.endswith(name) or name.endswith(free_weights[at].name)
        ]
        best = same if len(same) == 1 and not name.isdigit() else ats
        if len(best) == 1 and best[0] not in taken:
            choose_match(number, best)
    for number, ats in enumerate(options):
        left = [at for at in ats if at not in taken]
        if left and not chosen[number]:
            expected = _position_expected_by_neighbors(chosen, number)
            choose_match(number, [min(left, key=lambda at: (at - expected) % len(free_weights))])
    for number, tensor in enumerate(bundle.tensors):
        if not options[number] and tensor.ndim == 1:
            choose_match(number, _positions_of_weights_in_flat(tensor, free_weights, taken))
    return chosen


def _position_expected_by_neighbors(chosen_positions: list[list[int]], number: int) -> int:
    """Return the position that follows from the neighbors of a tensor in its list."""
    before = next((other for other in range(number - 1, -1, -1) if chosen_positions[other]), None)
    if before is not None:
        return chosen_positions[before][-1] + 1
    after = next(
        (other for other in range(number + 1, len(chosen_positions)) if chosen_positions[other]), None
    )
    return 0 if after is None else max(0, chosen_positions[after][0] - (after - number))


def _positions_of_weights_in_flat(
    flat: Tensor, free_weights: list[_WeightAtPlace], taken_positions: set[int]
) -> list[int]:
    """Return the positions of weights that follow each other in a flat tensor, which may end with zeros.

    Weights of equal values, such as biases of zeros, are tried in their order, and the next ones where that fails.
    """
    if not flat.half().any():
        return []
    count = len(free_weights)

    def positions_following(offset: int, path: list[int]) -> Iterator[int]:
        begin = path[-1] + 1 if path else 0
        used = taken_positions.union(path)
        for at in (*range(begin, count), *range(begin)):
            value = free_weights[at].value
            piece = flat[offset : offset + value.numel()]
            if (
                at not in used
                and piece.numel() == value.numel()
                and _is_master_of_weight(piece.view(value.shape), value)
            ):
                yield at

    path: list[int] = []
    best: list[int] = []
    offset = reached = 0
    branches = [positions_following(0, path)]
    for _ in range(MIN_TRIES + 10 * count):
        at = next(branches[-1], None) if branches else None
        if at is not None:
            path = [*path, at]
            offset += free_weights[at].value.numel()
            if offset > reached:
                best, reached = path, offset
            if offset == flat.numel():
                break
            branches.append(positions_following(offset, path))
            continue
        if not path or not flat[offset:].any():
            break
        branches.pop()
        offset -= free_weights[path[-1]].value.numel()
        path = path[:-1]
    return best


def _significant_matches(
    bundle: _TensorsOfOneContainer, matches: list[list[int]], free_weights: list[_WeightAtPlace]
) -> list[list[int]]:
    """Return the matches that are no chance: without moments that round to 0, and constants.

    Many elements that are not alike are enough; few are where at least half of the elements of the list round.
    """
    values = [[free_weights[at].value for at in match] for match in matches]
    equal = [sum(int(value.count_nonzero()) for value in held) for held in values]
    varies = [any(_has_several_values(value) for value in held) for held in values]
    total = sum(int(tensor.count_nonzero()) for tensor in bundle.tensors)
    is_half = any(value.dtype in HALF_DTYPES for held in values for value in held)
    if not is_half and are_representable_in(iter(bundle.tensors)) is not False:
        return [[] for _ in matches]  # a second copy of what the weights hold
    if any(varies) and 2 * sum(equal) >= total:
        return matches
    return [
        match if changes and count >= MIN_ELEMENTS else []
        for match, changes, count in zip(matches, varies, equal, strict=True)
    ]


def _has_several_values(tensor: Tensor) -> bool:
    return bool((tensor != tensor.reshape(-1)[0]).any())


def _is_master_of_weight(master: Tensor, weight: Tensor) -> bool:
    """Return whether a weight is the master in 16 bits; a script may have made it fp32 again, or kept it in fp32."""
    for count in (COMPARED_FIRST, None):
        full, value = master.reshape(-1)[:count], weight.reshape(-1)[:count]
        if value.dtype not in FULL_DTYPES:
            is_equal = _are_equal_tensors(full.to(value.dtype).float(), value.float())
        else:
            is_equal = _are_equal_tensors(full, value) or any(
                _are_equal_tensors(full.to(dtype), value) for dtype in HALF_DTYPES
            )
        if not is_equal:
            return False
    return True


def _are_equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
