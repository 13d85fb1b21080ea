"""Put the tensors of a checkpoint into fp32, whatever they were saved in, and say what that could not bring back."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ampcompare.backends.apex_levels import LEVELS, has_half_weights
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.checkpoints.convert.detect import CheckpointContents
from ampcompare.checkpoints.reader.placeholders import translate_entry_errors

NO_ADAM = frozenset(
    {"grad_averaging", "max_grad_norm", "norm_type", "max_coeff", "trust_clip", "always_adapt"}
)
"""Keys of groups of FusedLAMB and FusedNovoGrad, and of LAMB in DeepSpeed and timm; FusedAdam has none of them."""
PREFIXES = ("module.", "_orig_mod.")


@dataclass
class ConvertedCheckpoint:
    """The result of a conversion: the new state, and a line for each thing that was changed, kept or lost.

    The lists have a line for each thing.
    """

    # in the layout of the program that wrote the source, with the other kind of precision state
    state: dict[str, Any]
    source: str  # "native", "apex", another kind of optimizer or weights, or the backend of an ampcompare arm
    level: str | None  # opt level of the source or of the target, whichever is Apex
    arm: str | None = None  # of the result, if it is an ampcompare checkpoint
    changed: list[str] = field(default_factory=list)  # what is written in another form with the same meaning
    lost: list[str] = field(default_factory=list)  # what is lost
    notes: list[str] = field(default_factory=list)  # what no training resumes from


def copy_containers(root: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the containers of a checkpoint, and none of its tensors."""

    seen: dict[int, Any] = {}

    def copy_container(value: Any) -> Any:
        if not isinstance(value, Mapping | list):
            return value
        if id(value) not in seen:
            if isinstance(value, list):
                seen[id(value)] = [copy_container(item) for item in value]
            else:
                made: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
                made = Counter() if isinstance(value, Counter) else made
                seen[id(value)] = made
                made.update({key: copy_container(item) for key, item in value.items()})
                if isinstance(made, OrderedDict):
                    vars(made).update({key: copy_container(item) for key, item in vars(value).items()})
        return seen[id(value)]

    made: dict[str, Any] = copy_container(root)
    return made


def entry_at_place(state: Any, place: tuple[str, ...]) -> Any:
    """Return the entry at a place as `CheckpointContents` gives it."""
    for name in place:
        state = state[key_named_by_place(state, name)]
    return state


def key_named_by_place(holder: Any, name: str) -> Any:
    """Return the index or key of a list or dict that a place names: keys need not be text."""
    if isinstance(holder, list):
        return int(name)
    return name if name in holder else next((key for key in holder if str(key) == name), name)


def convert_to_fp32(contents: CheckpointContents, result: ConvertedCheckpoint, level: str | None) -> None:
    """Make weights and optimizer state fp32, from masters if any; `level` is the one of Apex that saved them."""
    _widen_weights(contents, result, level)
    _widen_optimizer_state(contents, result)


def _widen_weights(contents: CheckpointContents, result: ConvertedCheckpoint, level: str | None) -> None:
    """Replace half weights by their fp32 masters, and cast the other half weights to fp32."""
    carried = 0
    halves: Counter[str] = Counter()
    for index, place in enumerate(contents.models):
        masters = contents.masters[index] if index < len(contents.masters) else {}
        with translate_entry_errors(*place):
            model = entry_at_place(result.state, place)
            for name, value in model.items():
                if name in masters:
                    model[name] = masters[name]
                    carried += 1
                elif isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
                    model[name] = value.float()
                    halves[dtype_name(value.dtype)] += 1
    if carried:
        where = contents.master_places_text
        result.changed.append(
            f"{carried} fp32 masters become the weights" + (f", from {where}" if where else "")
        )
    for kind, count in halves.items():
        result.changed.append(f"{count} {kind} weights become fp32, with the values that {kind} has")
    if halves or (has_half_weights(level) and not carried):
        kind = next(iter(halves), LEVELS[level].half_name if level else "fp16")
        which = f"{halves.total()} of the weights" if carried else "the weights"
        result.lost.append(f"the last bits of {which}: they were saved as {kind} values, without masters")
    if contents.unmatched:
        result.lost.append(
            f"{contents.unmatched} masters: no weight has their values in 16 bits, to tell their names"
        )


def _widen_optimizer_state(contents: CheckpointContents, result: ConvertedCheckpoint) -> None:
    for place in contents.optimizers:
        halves: Counter[str] = Counter()
        with translate_entry_errors(*place):
            optimizer = entry_at_place(result.state, place)
            for entry in optimizer["state"].values():
                for key, value in entry.items() if isinstance(entry, dict) else ():
                    if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
                        entry[key] = value.float()
                        halves[dtype_name(value.dtype)] += 1
        for kind, count in halves.items():
            result.changed.append(f"{count} {kind} tensors of {'.'.join(place)} become fp32")
            result.lost.append(f"the last bits of the state of {'.'.join(place)}: it was saved in {kind}")
        split_flat_optimizer_state(optimizer, ".".join(place), contents, result)
        move_adam_step_to_parameters(optimizer, ".".join(place), result)
        add_adagrad_entries_of_torch(optimizer, ".".join(place), result)


def split_flat_optimizer_state(
    optimizer: dict[str, Any], name: str, contents: CheckpointContents, result: ConvertedCheckpoint
) -> None:
    """Give the state of flat parameters to the weights that lie in them, each with a number of its own.

    The weights are those of the flat fp32 copies; without these, all of the model in their order, if their elements are
    as many. State is flat where all of the optimizer's is, for fewer parameters than there are weights: one parameter
    with as many elements as some weights have together is no sign of it.
    """
    shapes = [_shapes_of_weights(model) for model in contents.models.values()]
    layouts = [*contents.layouts, *((sum(shape.numel() for shape in model), model) for model in shapes)]
    copies = {size for size, _ in contents.layouts}
    if not _are_parameters_flat(optimizer, [shape for model in shapes for shape in model], copies):
        return
    state: dict[int, Any] = {}
    groups: list[list[int]] = []
    count = 0
    is_flat = False
    for place, group in enumerate(optimizer["param_groups"]):
        begin = count
        with translate_entry_errors(name, "param_groups", place):
            for number in group["params"]:
                entry = optimizer["state"].get(number)
                size = _element_count_of_flat_state(entry)
                layout = next((held for held in layouts if held[0] == size), None)
                if layout is None and size:
                    result.lost.append(
                        f"{name}: its state is flat, {size} elements in an order that is not known"
                    )
                if layout is not None:
                    layouts.remove(layout)
                    is_flat = True
                pieces = [entry] if layout is None else _cut_flat_state(entry, layout[1])
                state |= {count + at: piece for at, piece in enumerate(pieces) if piece is not None}
                count += len(pieces)
        groups.append(list(range(begin, count)))
    if is_flat:
        optimizer["state"] = state
        for group, numbers in zip(optimizer["param_groups"], groups, strict=True):
            group["params"] = numbers
        result.changed.append(f"{name}: flat state becomes that of {count} weights, in their order")


def _shapes_of_weights(model: Mapping[str, Any]) -> list[torch.Size]:
    """Return the shapes of the weights of a model, of those that share memory once."""
    weights = {
        (value.data_ptr(), value.shape, value.stride()): value.shape
        for value in model.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    return list(weights.values())


def _element_count_of_flat_state(entry: Any) -> int:
    """Return the elements of the state of a parameter that has one dimension, as all of it has; 0 if not.

    8-bit state has tables next to it, LBFGS has lists, and both belong to parameters as they are.
    """
    values = entry.values() if isinstance(entry, Mapping) else ()
    if any(isinstance(value, Mapping | list) for value in values):
        return 0
    held = [value for value in values if isinstance(value, Tensor) and value.numel() > 1]
    sizes = {value.numel() for value in held}
    is_flat = len(sizes) == 1 and all(value.ndim == 1 and value.is_floating_point() for value in held)
    return sizes.pop() if is_flat else 0


def _are_parameters_flat(optimizer: Mapping[str, Any], weights: list[torch.Size], copies: set[int]) -> bool:
    """Return whether the parameters of an optimizer are flat: fewer than the weights, and of other shapes.

    A group may hold a bias alone, where others are as large as flat copies of weights; `copies` has the sizes of these.
    """
    numbers = [number for group in optimizer["param_groups"] for number in group.get("params", ())]
    entries = [optimizer["state"][number] for number in numbers if optimizer["state"].get(number)]
    sizes = [_element_count_of_flat_state(entry) for entry in entries]
    vectors = {shape.numel() for shape in weights if len(shape) == 1}
    if not sizes or not all(sizes) or len(numbers) >= len(weights):
        return False
    return vectors.isdisjoint(sizes) or (
        not copies.isdisjoint(sizes) and (copies | vectors).issuperset(sizes)
    )


def _cut_flat_state(entry: Mapping[str, Any], shapes: list[torch.Size]) -> list[dict[str, Any]]:
    """Cut the flat tensors of a parameter's state into those of the weights in it, and repeat all else."""
    sizes = [shape.numel() for shape in shapes]
    pieces: list[dict[str, Any]] = [dict(entry) for _ in shapes]
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.ndim == 1 and value.numel() >= sum(sizes):
            parts = value[: sum(sizes)].split(sizes)
            for piece, part, shape in zip(pieces, parts, shapes, strict=True):
                piece[key] = part.reshape(shape).clone()
        elif isinstance(value, Tensor):
            for piece in pieces:
                piece[key] = value.clone()
    return pieces


def move_adam_step_to_parameters(optimizer: dict[str, Any], name: str, result: ConvertedCheckpoint) -> None:
    """Give the state of `apex.optimizers.FusedAdam` the step counts that torch keeps with each parameter.

    The other fused optimizers with a step count in the group, and `FusedAdam` without bias correction, have no
    counterpart in torch: a migrated script keeps them, and their state stays as it is.
    """
    for number, group in enumerate(optimizer["param_groups"]):
        if not isinstance(group, dict) or "bias_correction" not in group or "step" not in group:
            continue
        if "amsgrad" in group and all(
            "step" in entry for entry in _states_of_parameter_group(optimizer, group)
        ):  # see `add_adam_step_to_groups`
            del group["step"], group["bias_correction"]
            continue
        if not group["bias_correction"] or not NO_ADAM.isdisjoint(group):
            kind = (
                "FusedAdam without bias correction"
                if NO_ADAM.isdisjoint(group)
                else "FusedLAMB or one like it"
            )
            result.changed.append(f"{name}: the state of {kind}, unchanged: torch has no such optimizer")
            continue
        with translate_entry_errors(name, "param_groups", number):
            step = group.pop("step")
            count = float(step.reshape(-1)[0]) if isinstance(step, Tensor) else float(step)
            entries = _states_of_parameter_group(optimizer, group)
            for entry in entries:
                if "exp_avg" in entry and "step" not in entry:
                    entry["step"] = torch.tensor(count)
        result.changed.append(
            f"{name}: the step count of FusedAdam, {count:g}, with each parameter, as AdamW has it"
        )
        del group["bias_correction"]


def _states_of_parameter_group(
    optimizer: Mapping[str, Any], group: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the state of each parameter of a group that has any."""
    held = (optimizer["state"].get(number) for number in group["params"])
    return [entry for entry in held if isinstance(entry, dict) and entry]


def add_adagrad_entries_of_torch(optimizer: dict[str, Any], name: str, result: ConvertedCheckpoint) -> None:
    """Give the state of `apex.optimizers.FusedAdagrad` what torch's Adagrad reads too, at a decay of the rate of 0."""
    for number, group in enumerate(optimizer["param_groups"]):
        if not isinstance(group, dict) or "lr_decay" in group or "eps" not in group:
            continue
        with translate_entry_errors(name, "param_groups", number):
            entries = _states_of_parameter_group(optimizer, group)
            if not entries or any(set(entry) != {"sum"} for entry in entries):
                continue
            for entry in entries:
                entry["step"] = torch.tensor(0.0)
        group |= {"lr_decay": 0.0, "initial_accumulator_value": 0.0}
        result.changed.append(
            f"{name}: the state of FusedAdagrad, as Adagrad has it: with lr_decay 0 and a step count"
        )


def add_adam_step_to_groups(optimizer: dict[str, Any], name: str, result: ConvertedCheckpoint) -> None:
    """Give the groups of Adam's state the step count that `apex.optimizers.FusedAdam` keeps there; AdamW ignores it."""
    for number, group in enumerate(optimizer["param_groups"]):
        if not isinstance(group, dict) or not {"betas", "amsgrad"} <= set(group):
            continue
        with translate_entry_errors(name, "param_groups", number):
            entries = _states_of_parameter_group(optimizer, group)
            if not entries or not all({"step", "exp_avg", "exp_avg_sq"} <= set(entry) for entry in entries):
                continue
            counts = {float(entry["step"]) for entry in entries}
            if len(counts) > 1:
                result.lost.append(
                    f"{name}: different step counts by weight, for FusedAdam: it has one for each group"
                )
                continue
            group |= {"step": int(counts.pop()), "bias_correction": True}
            result.changed.append(
                f"{name}: the step count, {group['step']}, in its groups too, where FusedAdam has it"
            )


def rename_key(state: dict[str, Any], place: tuple[str, ...], key: str, value: Any) -> None:
    """Put an entry under another key, at the same position."""
    holder = entry_at_place(state, place[:-1])
    own = key_named_by_place(holder, place[-1])
    items = list(holder.items()) if own in holder else [*holder.items(), (own, None)]
    holder.clear()
    for name, old in items:
        if name == own:
            holder[key] = value
        elif name != key:
            holder[name] = old


def drop_wrapper_prefixes(contents: CheckpointContents, result: ConvertedCheckpoint) -> None:
    """Remove the prefixes of DDP and `torch.compile` from the names of a model, if all names have them."""
    for place in [*contents.models, *contents.averages]:
        model = entry_at_place(result.state, place)
        if prefix := common_wrapper_prefix(model):
            entries = {name.removeprefix(prefix): value for name, value in model.items()}
            model.clear()
            model.update(entries)
            if versions := getattr(model, "_metadata", None):  # of modules, by their names
                held = {
                    f"{name}.".removeprefix(prefix).removesuffix("."): value
                    for name, value in versions.items()
                }
                versions.clear()
                versions.update(held)
            result.changed.append(
                f"{len(entries)} names of {'.'.join(place) or 'the weights'} without `{prefix}`"
            )


def common_wrapper_prefix(names: Iterable[str]) -> str:
    """Return what wrappers have put before all names: `module.` of DDP, `_orig_mod.` of `torch.compile`, or both."""
    prefix, held = "", list(names)

    def next_part() -> str:
        for part in PREFIXES:
            if held and all(name.startswith(prefix + part) for name in held):
                return part
        return ""

    while part := next_part():
        prefix += part
    return prefix
