"""Convert a checkpoint file from Apex to torch.amp and back, and list what is lost."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from ampcompare.base.errors import CheckpointError, ConversionError
from ampcompare.base.formatting import printable
from ampcompare.training.checkpoint.convert.between_arms import into_arm, native_twin, source_kind
from ampcompare.training.checkpoint.convert.detect import CheckpointContents, find_parts
from ampcompare.training.checkpoint.convert.fp32_weights import (
    Conversion,
    at_place,
    copy_containers,
    into_fp32,
    key_at,
    replace,
    strip_prefix,
)
from ampcompare.training.checkpoint.convert.masters import half_dtype, is_optimizer
from ampcompare.training.checkpoint.convert.scalers import (
    apex_from_scalers,
    apex_state_of,
    grad_scalers_of,
    held_scale,
    is_number,
    lost_flags,
    raw_scale,
    scalers_from_apex,
)
from ampcompare.training.checkpoint.inspect import broken_values, guess_level
from ampcompare.training.checkpoint.reader.foreign import name_faults, open_foreign
from ampcompare.training.checkpoint.store.file import read_checkpoint, write_checkpoint, write_pickle
from ampcompare.training.checkpoint.store.layout import CONVERTED, TRAINER, apex_layout, one_or_list

Target = Literal["native", "apex"]
MAX_NAME = 120
PROGRAMS = ("Lightning", "mmcv", "mmengine", "timm")  # name the entry themselves; scripts do it in others
# key of an Apex state: key of a GradScaler's in checkpoints of the same program
TWIN_KEYS = {"amp": "scaler", "apex_amp": "loss_scaler", "amp_scaling_state": "MixedPrecision"}
MASTERS_LOST = "the last bits of the weights, when {} loads them: the layout of an Apex script has no masters"
# where Lightning had the state of a GradScaler up to 1.5, and from 1.6 to 1.9
LIGHTNING_BEFORE_2 = ("native_amp_scaling_state", "NativeMixedPrecisionPlugin")


def convert_state(root: Mapping[str, Any], to: Target, *, opt_level: str | None = None) -> Conversion:
    """Convert a checkpoint in memory, of tensors and plain values; the source is untouched.

    `opt_level` is that of the Apex side. By default it is inferred from the numbers of a source, and O1 for a result.
    """
    parts = find_parts(root)
    if not parts.models:
        what = f"it is {parts.writer}, and there" if parts.writer.endswith(" alone") else "there"
        raise ConversionError(f"{what} are no weights in it; `ampcompare convert --inspect` shows its contents")
    if parts.wrappers or parts.loss_scales:
        return _from_other_scalers(root, parts, to, opt_level or ("O2" if _half_dtypes(parts) else "O1"))
    source = _kind(parts, to, opt_level if to == "native" else None)
    if source == to:
        raise ConversionError(f"it is a checkpoint of {'Apex' if to == 'apex' else 'torch.amp'} already")
    if parts.arm is not None:
        return into_arm(root, native_twin(parts.arm) if to == "native" else f"apex:{opt_level or 'O1'}")
    result = Conversion(copy_containers(root), source, opt_level)
    if to == "native":
        _to_native(parts, result, opt_level)
    else:
        _to_apex(parts, result, opt_level or "O1")
    strip_prefix(parts, result)
    return result


def _kind(parts: CheckpointContents, to: Target, given_level: str | None) -> str:
    if parts.arm is not None:
        return source_kind(parts.arm)
    if parts.apex or (given_level and not parts.scalers):
        return "apex"
    if to == "native" and _half_dtypes(parts):
        return "16-bit weights"
    if not parts.scalers and guess_level(parts)[1]:
        return "apex"
    if parts.scalers or to == "apex":
        return "native"
    raise ConversionError(
        "it has no sign of Apex, only fp32 weights and no loss scaler; give --opt-level if a script with Apex saved it"
    )


def _half_dtypes(parts: CheckpointContents) -> set[torch.dtype]:
    return {dtype for model in parts.models.values() if (dtype := half_dtype(model)) is not None}


def _to_native(parts: CheckpointContents, result: Conversion, opt_level: str | None) -> None:
    level = result.level = opt_level or guess_level(parts)[0]
    for place, state in parts.apex.items():
        scalers = scalers_from_apex(state, level=level, static=None, lost=result.lost, changed=result.changed)
        if parts.writer in PROGRAMS:
            key = "amp_scaler" if parts.writer == "timm" else TWIN_KEYS.get(place[-1], "scaler")
            replace(result.state, place, key, one_or_list(scalers))
        else:
            _put_scalers(result, place, scalers)
    if parts.apex:
        result.lost.append("min_loss_scale and max_loss_scale, if they were set: no file has them, nor has GradScaler")
    elif not parts.scalers and torch.bfloat16 not in _half_dtypes(parts):
        result.lost.append("no state of amp was saved: the GradScaler starts at 65536 and skips its first steps")
    into_fp32(parts, result, level)


def _put_scalers(result: Conversion, place: tuple[str, ...], scalers: list[dict[str, Any]]) -> None:
    """Put GradScalers where a script had the state of Apex, which a migrated script reads, and under "scaler" too.

    Of several scalers a migrated script reads the state of Apex: only it names them.
    """
    holder, name = at_place(result.state, place[:-1]), ".".join(place)
    own = key_at(holder, place[-1])
    also = "scalers" if own == "scaler" else "scaler"
    if not isinstance(holder, dict) or also in holder or (len(scalers) == 1 and own == "scaler"):
        holder[own] = one_or_list(scalers)
        return
    if len(scalers) > 1:
        result.changed.append(f"{name}: stays, for a script of `ampcompare migrate`; the GradScalers are under {also}")
    else:
        result.changed.append(f"{name}: the GradScaler is also under {also}, as scripts with torch.amp have it")
    entries = list(holder.items())
    holder.clear()
    for key, value in entries:
        holder[key] = scalers[0] if key == own and len(scalers) == 1 else value
        if key == own:
            holder[also] = one_or_list(scalers)


def _to_apex(parts: CheckpointContents, result: Conversion, level: str) -> None:
    result.level = level
    scalers: list[Mapping[str, Any]] = list({id(scaler): scaler for scaler in parts.scalers.values()}.values())
    state = apex_from_scalers(scalers, level=level, lost=result.lost, changed=result.changed)
    back = {theirs: own for own, theirs in TWIN_KEYS.items()}
    if parts.writer == "timm":
        back["amp_scaler"] = "amp"
    if parts.writer == "Lightning":
        back |= dict.fromkeys(LIGHTNING_BEFORE_2, "amp_scaling_state")
    for scaler_path in list(parts.scalers)[1:]:
        at_place(result.state, scaler_path[:-1]).pop(scaler_path[-1], None)
    disabled = next((key for key in ("scaler", "amp_scaler") if key in result.state), "amp")
    scaler_path = next(iter(parts.scalers), (disabled,))
    has_own_name = len(scalers) < len(parts.scalers)  # one state under two names: that of the script comes first
    key = scaler_path[-1] if has_own_name else back.get(scaler_path[-1], "amp")
    replace(result.state, scaler_path, key, state)
    if level in ("O2", "O3", "O5"):
        result.lost.append(MASTERS_LOST.format(level))


def _from_other_scalers(root: Mapping[str, Any], parts: CheckpointContents, to: Target, level: str) -> Conversion:
    """Convert what a script with `FP16_Optimizer`, or with a loss scaler of its own, saved.

    The inner optimizer replaces one that wraps it; the scale goes where the file has it, or to the top.
    """
    result = Conversion(
        copy_containers(root), "FP16_Optimizer" if parts.wrappers else "a loss scaler of its own", level
    )
    scales = {}
    for place, state in parts.wrappers.items():
        if raw_scale(state) is not None or "loss_scaler" in state:
            scales[".".join(place)] = held_scale(state)
        result.lost += lost_flags(state)
        result.changed.append(f"{'.'.join(place)}: the state of the optimizer inside of it")
        holder = at_place(result.state, place[:-1])
        key = key_at(holder, place[-1])
        holder[key] = next(entry for entry in holder[key].values() if is_optimizer(entry))
    inner = {place: place[:-1] if place[:-1] in parts.wrappers else place for place in parts.optimizers}
    parts.optimizers = {place: at_place(result.state, place) for place in inner.values()}
    scales |= {".".join(place): held_scale(state) for place, state in parts.loss_scales.items()}
    for place, state in parts.loss_scales.items():
        if is_number(state):
            at_place(result.state, place[:-1]).pop(place[-1])
    of_parts = next((place for place, state in parts.loss_scales.items() if not is_number(state)), None)
    if to == "native":
        entry: Any = one_or_list(grad_scalers_of(scales, lost=result.lost, changed=result.changed)) if scales else {}
    else:
        entry = apex_state_of(list(scales.values()), level=level, lost=result.lost, changed=result.changed)
    if of_parts is not None and len(scales) == 1:
        replace(result.state, of_parts, of_parts[-1] if to == "native" else "amp", entry)
    elif scales:
        result.state["scaler" if to == "native" else "amp"] = entry
    else:
        result.lost.append("no loss scale was saved: the GradScaler starts at 65536 and skips its first steps")
    into_fp32(parts, result, None)
    if to == "apex" and level in ("O2", "O3", "O5"):
        result.lost.append(MASTERS_LOST.format(level))
    strip_prefix(parts, result)
    return result


def convert_file(
    source: Path,
    target: Path,
    to: Target,
    *,
    opt_level: str | None = None,
    legacy_layout: bool = False,
) -> Conversion:
    """Convert a file. An ampcompare checkpoint stays one; any other keeps the layout of its program.

    The legacy layout is precisely what a legacy script would save, with `to="apex"`.
    """
    if legacy_layout and to != "apex":
        raise ConversionError("--save-apex-format is what an Apex script saves; it needs --to apex")
    if target.suffix == ".safetensors":
        raise ConversionError(f"{target} would be no safetensors file, but an archive of torch; name it *.pt")
    if target.exists() and source.exists() and target.samefile(source):
        raise ConversionError(f"{source} would be overwritten; name another file")
    root, left_out = load_any(source)
    with name_faults(source):
        parts = find_parts(root)
        if legacy_layout and parts.is_ours and "amp" in root:
            result = Conversion(dict(root), "apex", guess_level(parts)[0], parts.arm)
        else:
            result = convert_state(root, to, opt_level=opt_level)
        result.notes += broken_values(parts)
        result.lost += [
            f"{printable(place, MAX_NAME, keep_end=49)} (no tensor and no plain value)" for place in left_out
        ]
        if legacy_layout and parts.is_ours:
            known = {"schema", "model", "optimizer", "amp", "progress", "best", CONVERTED, TRAINER}
            others = [key for key, value in result.state.items() if key not in known and value not in (None, {}, [])]
            result.lost += [f"{key}: an Apex script does not save it" for key in others]
            result.state, result.arm = apex_layout(result.state), None
    if parts.is_ours and not legacy_layout:
        write_checkpoint(target, {key: value for key, value in result.state.items() if key != "schema"})
    else:
        write_pickle(target, result.state)
    return result


def load_any(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Read a checkpoint of any program into tensors and plain values; whole models become state dicts.

    Returns it with place and class of each object that is left out.
    """
    contents = open_foreign(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return read_checkpoint(path), []
    with name_faults(path):
        state, left_out = contents.plain()
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a checkpoint")
    return state, left_out
