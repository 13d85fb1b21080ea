"""Carry a checkpoint from Apex to torch.amp and back, and say exactly what could not be carried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ampcompare.arm import Arm
from ampcompare.checkpoint.file import read_checkpoint, write_checkpoint, write_safely
from ampcompare.checkpoint.foreign import open_foreign
from ampcompare.checkpoint.inspection import guess_level
from ampcompare.checkpoint.layout import apex_layout, one_or_list
from ampcompare.checkpoint.parts import Parts, find_parts
from ampcompare.checkpoint.scalers import NEVER, apex_from_scalers, scalers_from_apex
from ampcompare.errors import CheckpointError, ConversionError

__all__ = ["Conversion", "convert_file", "convert_state", "load_any", "objects_of"]

PREFIX = "module."
Target = Literal["native", "apex"]
# key of an Apex state: key of a GradScaler's in checkpoints of the same program
TWIN_KEYS = {"amp": "scaler", "apex_amp": "loss_scaler", "amp_scaling_state": "MixedPrecision"}


@dataclass
class Conversion:
    """A converted checkpoint.

    Attributes:
        state: in the layout of the program that wrote the source, with the other kind of precision state.
        source: "native" or "apex": what it was.
        level: opt level of the source or of the target, whichever is Apex.
        arm: of the result, where it is a checkpoint of ours.
        changed: a line for each entry that is written otherwise, with the same meaning.
        lost: a line for each thing that could not be carried.
    """

    state: dict[str, Any]
    source: str
    level: str | None
    arm: str | None = None
    changed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def load_any(path: Path, *, trust: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint of any program into tensors and plain values.

    Args:
        trust: let torch unpickle objects of other programs, which runs their code; whole models become state dicts.

    Returns:
        What it holds, and the places of objects that are left out.

    Raises:
        CheckpointError: it cannot be read, or holds objects and is not trusted; the message lists them.
    """
    contents = open_foreign(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return read_checkpoint(path), []
    objects = contents.objects()
    if not objects and not contents.calls:
        state, left_out = contents.plain()
    elif not trust:
        shown = ", ".join(objects[:10]) or ", ".join(contents.calls[:10])
        more = f" and {len(objects) - 10} more" if len(objects) > 10 else ""
        raise CheckpointError(
            f"{path} holds objects, and loading them runs code of whoever made the file: {shown}{more}; "
            "if you trust it as you would a program, add --trust-checkpoint"
        )
    else:
        state, left_out = _unpickled(path)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
    return state, left_out


def objects_of(path: Path) -> list[str]:
    """Return the places of objects of other programs in a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    return open_foreign(path).objects()


def _unpickled(path: Path) -> tuple[Any, list[str]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the objects' own code raises
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be loaded even when trusted: {type(error).__name__}: {text}") from None
    left_out: list[str] = []
    return _without_objects(loaded, "", left_out, {}), left_out


def _without_objects(value: Any, place: str, left_out: list[str], seen: dict[int, Any]) -> Any:
    if id(value) in seen:
        return seen[id(value)]
    made: Any
    if isinstance(value, nn.Module):
        made = dict(value.state_dict())
    elif isinstance(value, Tensor):
        made = value.detach()
    elif isinstance(value, Mapping):
        made = {}
        seen[id(value)] = made
        for key, item in value.items():
            plain = key if isinstance(key, str | int | float | bool | bytes | None) else str(key)
            made[plain] = _without_objects(item, f"{place}.{key}" if place else str(key), left_out, seen)
        return made
    elif isinstance(value, list | tuple | set | frozenset):
        made = [_without_objects(item, f"{place}.{index}", left_out, seen) for index, item in enumerate(value)]
        made = tuple(made) if isinstance(value, tuple) else made
    elif type(value) in (str, int, float, bool, bytes, type(None), torch.dtype, torch.Size):
        made = value
    elif type(value).__module__ in ("argparse", "types", "optparse") and hasattr(value, "__dict__"):
        made = _without_objects(vars(value), place, left_out, seen)
    else:
        left_out.append(
            f"{place or 'the whole file'}: an object of {type(value).__module__}.{type(value).__qualname__}"
        )
        made = None
    seen[id(value)] = made
    return made


def convert_state(root: Mapping[str, Any], to: Target, *, opt_level: str | None = None) -> Conversion:
    """Convert a checkpoint in memory; the source is untouched.

    Args:
        root: tensors and plain values.
        to: "native" for torch.amp, "apex" for `apex.amp`.
        opt_level: of the Apex side: what the source was saved at, or what the result is for. Told from the numbers, or
            O1, where None.

    Raises:
        ConversionError: it is of the wanted kind already, or has nothing to convert.
    """
    parts = find_parts(root)
    if not parts.models:
        raise ConversionError("there are no weights in it; `ampcompare convert --inspect` shows what there is")
    source = _kind(parts, to, opt_level if to == "native" else None)
    if source == to:
        raise ConversionError(f"it is a checkpoint of {'Apex' if to == 'apex' else 'torch.amp'} already")
    result = Conversion(_copied(root), source, opt_level)
    if to == "native":
        _to_native(parts, result, opt_level)
    else:
        _to_apex(parts, result, opt_level or "O1")
    _strip_prefix(parts, result)
    if parts.is_ours:
        result.arm = result.state["arm"]
    return result


def _kind(parts: Parts, to: Target, given_level: str | None) -> str:
    if parts.arm is not None:
        return "apex" if parts.arm.partition(":")[0] == "apex" else "native"
    if parts.apex or (not parts.scalers and (given_level or guess_level(parts)[1])):
        return "apex"
    if parts.scalers or to == "apex":
        return "native"
    raise ConversionError(
        "nothing in it tells of Apex: fp32 weights and no loss scaler; give --opt-level if a script with Apex saved it"
    )


def _copied(root: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the containers of a checkpoint, and none of its tensors."""

    seen: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Mapping | list):
            return value
        if id(value) not in seen:
            if isinstance(value, list):
                seen[id(value)] = [copied(item) for item in value]
            else:
                seen[id(value)] = {key: copied(item) for key, item in value.items()}
        return seen[id(value)]

    made: dict[str, Any] = copied(root)
    return made


def _at(state: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        state = state[int(key)] if isinstance(state, list) else state[key if key in state else int(key)]
    return state


def _to_native(parts: Parts, result: Conversion, opt_level: str | None) -> None:
    guessed, _ = guess_level(parts)
    level = result.level = opt_level or guessed
    options: dict[str, Any] = dict(Arm.parse(parts.arm).options) if parts.arm else {}
    given = options.get("loss_scale")
    static = float(given) if given is not None and given != "dynamic" else None
    for name in ("min_loss_scale", "max_loss_scale"):
        if name in options:
            result.lost.append(f"{name} {options[name]:g}: GradScaler has none")
    scalers: list[dict[str, Any]] = []
    for place, state in parts.apex.items():
        scalers = scalers_from_apex(state, level=level, static=static, lost=result.lost, changed=result.changed)
        key = "amp_scaler" if parts.writer == "timm" else TWIN_KEYS.get(place[-1], "scaler")
        _replace(result.state, place, key, one_or_list(scalers))
    if not parts.apex:
        result.lost.append("no state of amp was saved: the GradScaler starts at 65536 and skips its first steps")
    elif not parts.is_ours:
        result.lost.append("min_loss_scale and max_loss_scale, if they were set: no file has them, nor has GradScaler")
    _full_weights(parts, result)
    _full_optimizers(parts, result)
    if parts.is_ours:
        arm = result.state["arm"] = _native_arm(level, scalers, result)
        if arm == "fp32":
            result.state["precision"] = result.state.pop("scaler", {})
        result.state["engine"] = None
        result.state["masters"] = {}


def _native_arm(level: str | None, scalers: list[dict[str, Any]], result: Conversion) -> str:
    if level == "O0":
        return str(Arm.parse("fp32"))
    if level == "O3":
        result.lost.append("O3 trained fp16 weights; native:fp16 trains fp32 weights from here on")
    if scalers and scalers[0] and scalers[0]["growth_interval"] == NEVER:
        scale = scalers[0]["scale"]
        return str(Arm.parse(f"native:fp16,init_scale={scale:g},growth_interval={NEVER}"))
    return str(Arm.parse("native:fp16"))


def _full_weights(parts: Parts, result: Conversion) -> None:
    """Put masters in place of the half weights they belong to, and make what is left fp32."""
    carried = halves = 0
    for index, place in enumerate(parts.models):
        model = _at(result.state, place)
        masters = parts.masters[index] if index < len(parts.masters) else {}
        for name, value in model.items():
            if name in masters:
                model[name] = masters[name]
                carried += 1
            elif isinstance(value, Tensor) and value.dtype is torch.float16:
                model[name] = value.float()
                halves += 1
    if carried:
        result.changed.append(f"{carried} fp32 masters become the weights")
    if halves:
        result.changed.append(f"{halves} fp16 weights become fp32, with the values that fp16 has")
    if not carried and (halves or result.level in ("O2", "O3")):
        result.lost.append("the last bits of the weights: they were saved as fp16 values, without masters")


def _full_optimizers(parts: Parts, result: Conversion) -> None:
    for place in parts.optimizers:
        optimizer = _at(result.state, place)
        halves = 0
        for entry in optimizer["state"].values():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, Tensor) and value.dtype is torch.float16:
                    entry[key] = value.float()
                    halves += 1
        if halves:
            result.changed.append(f"{halves} fp16 tensors of {'.'.join(place)} become fp32")
            result.lost.append(f"the last bits of the state of {'.'.join(place)}: it was saved in fp16")
        _unfuse(optimizer, ".".join(place), result)


def _unfuse(optimizer: dict[str, Any], name: str, result: Conversion) -> None:
    """Give the state of `apex.optimizers.FusedAdam` the counts of steps that torch keeps beside each parameter."""
    for group in optimizer["param_groups"]:
        if not isinstance(group, dict) or "bias_correction" not in group or "step" not in group:
            continue
        steps = group.pop("step")
        count = float(steps.reshape(-1)[0]) if isinstance(steps, Tensor) else float(steps)
        for index in group["params"]:
            entry = optimizer["state"].get(index)
            if isinstance(entry, dict) and "exp_avg" in entry and "step" not in entry:
                entry["step"] = torch.tensor(count)
        result.changed.append(f"{name}: the step count of FusedAdam, {count:g}, beside each parameter, as AdamW has it")
        if not group.pop("bias_correction"):
            result.lost.append(f"{name}: bias_correction=False: torch's Adam always corrects")


def _to_apex(parts: Parts, result: Conversion, level: str) -> None:
    result.level = level
    scalers: list[Mapping[str, Any]] = list(parts.scalers.values())
    state = apex_from_scalers(scalers, level=level, lost=result.lost, changed=result.changed)
    back = {theirs: own for own, theirs in TWIN_KEYS.items()}
    if parts.writer == "timm":
        back["amp_scaler"] = "amp"
    for place in list(parts.scalers)[1:]:
        _at(result.state, place[:-1]).pop(place[-1], None)
    place = next(iter(parts.scalers), _scaler_place(result.state))
    _replace(result.state, place, back.get(place[-1], "amp"), state)
    if parts.arm and "bf16" in parts.arm:
        result.lost.append("bf16 has the range of fp32, and fp16 has not: watch the first steps")
    if parts.is_ours:
        result.state["arm"] = str(Arm.parse(f"apex:{level}"))
        result.state["masters"] = one_or_list(_masters(parts)) if level == "O2" else {}
        if level == "O2":
            result.changed.append("fp32 weights are carried as masters too")
        result.state["engine"] = None
    elif level in ("O2", "O3"):
        result.lost.append(
            f"the last bits of the weights, when {level} loads them: the layout of an Apex script has no masters"
        )


def _scaler_place(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Return where a scaler that was not enabled lies."""
    return next(((key,) for key in ("scaler", "amp_scaler", "precision") if key in state), ("amp",))


def _masters(parts: Parts) -> list[dict[str, Tensor]]:
    return [
        {name: value for name, value in model.items() if isinstance(value, Tensor) and value.dtype is torch.float32}
        for model in parts.models.values()
    ]


def _replace(state: dict[str, Any], place: tuple[str, ...], key: str, value: Any) -> None:
    """Put an entry under another key, at the same position."""
    holder = _at(state, place[:-1])
    items = list(holder.items()) if place[-1] in holder else [*holder.items(), (place[-1], None)]
    holder.clear()
    for name, old in items:
        if name == place[-1]:
            holder[key] = value
        elif name != key:
            holder[name] = old


def _strip_prefix(parts: Parts, result: Conversion) -> None:
    for place in [*parts.models, *parts.averages]:
        model = _at(result.state, place)
        if all(name.startswith(PREFIX) for name in model):
            entries = [(name.removeprefix(PREFIX), value) for name, value in model.items()]
            model.clear()
            model.update(entries)
            result.changed.append(f"{len(entries)} names of {'.'.join(place) or 'the weights'} without `{PREFIX}`")


def convert_file(
    source: Path,
    target: Path,
    to: Target,
    *,
    opt_level: str | None = None,
    legacy_layout: bool = False,
    trust: bool = False,
) -> Conversion:
    """Convert a file. A checkpoint of ours becomes one of ours, another one of the same program's layout.

    Args:
        legacy_layout: write precisely what a legacy script would, with `to="apex"`.

    Raises:
        CheckpointError: the source cannot be read or is not trusted.
        ConversionError: as for `convert_state`; or source and target are one file.
        EnvironmentUnfit: the target cannot be written.
    """
    if legacy_layout and to != "apex":
        raise ConversionError("--apex-layout is what an Apex script saves, and goes with --to apex")
    if target.exists() and source.exists() and target.samefile(source):
        raise ConversionError(f"{source} would be written over; name another file")
    root, left_out = load_any(source, trust=trust)
    parts = find_parts(root)
    if legacy_layout and parts.is_ours and "amp" in root:
        result = Conversion(dict(root), "apex", guess_level(parts)[0], parts.arm)
    else:
        result = convert_state(root, to, opt_level=opt_level)
    result.lost += [f"{place} (no tensor and no plain value)" for place in left_out]
    if legacy_layout and parts.is_ours:
        result.lost += [f"{key}: an Apex script saves no such thing" for key in _unknown_to_scripts(result.state)]
        result.state, result.arm = apex_layout(result.state), None
    if parts.is_ours and not legacy_layout:
        write_checkpoint(target, {key: value for key, value in result.state.items() if key != "schema"})
    else:
        write_safely(target, lambda file: torch.save(result.state, file))
    return result


def _unknown_to_scripts(state: Mapping[str, Any]) -> list[str]:
    known = {"schema", "model", "optimizer", "amp", "progress", "best"}
    return [key for key, value in state.items() if key not in known and value not in (None, {}, [])]
