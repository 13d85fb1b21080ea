"""Convert a checkpoint file from Apex to torch.amp and back, and list what is lost."""

from collections.abc import Mapping
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, Literal

import torch

from ampcompare.backends.apex_levels import has_half_weights
from ampcompare.base.errors import CheckpointError, ConversionError
from ampcompare.base.formatting import printable_line
from ampcompare.checkpoints.convert.between_arms import (
    conversion_kind_of_arm,
    convert_state_to_arm,
    nearest_native_arm,
)
from ampcompare.checkpoints.convert.detect import CheckpointContents, contents_by_kind, is_grad_scaler_state
from ampcompare.checkpoints.convert.fp32_weights import (
    ConvertedCheckpoint,
    add_adam_step_to_groups,
    convert_to_fp32,
    copy_containers,
    drop_wrapper_prefixes,
    entry_at_place,
    key_named_by_place,
    rename_key,
)
from ampcompare.checkpoints.convert.inspect import broken_value_sentences, guess_opt_level_and_evidence
from ampcompare.checkpoints.convert.masters import half_type_of_weights, is_optimizer_state
from ampcompare.checkpoints.convert.scalers import (
    UNKNOWN_STATIC,
    LossScalerValues,
    apex_state_from_grad_scalers,
    apex_state_from_values,
    grad_scaler_states_from_apex,
    grad_scaler_states_from_values,
    is_number_or_scalar_tensor,
    unchecked_scale_of_state,
    unfinished_step_flag_lines,
    values_of_loss_scaler,
)
from ampcompare.checkpoints.reader.foreign import PlainContents, open_checkpoint, translate_parser_errors
from ampcompare.checkpoints.store.file import read_checkpoint, write_checkpoint, write_pickle_without_checksum
from ampcompare.checkpoints.store.layout import CONVERTED, TRAINER, only_entry_or_list, state_in_apex_layout

Target = Literal["native", "apex"]
MAX_NAME = 120
PROGRAMS = ("Lightning", "mmengine")  # read and name the entry themselves; of others scripts do it
# key of an Apex state: key of a GradScaler's in checkpoints of the same program
TWIN_KEYS = {"apex_amp": "loss_scaler", "amp_scaling_state": "MixedPrecision"}
MASTERS_LOST = "the last bits of the weights, when {} loads them: the layout of an Apex script has no masters"
# where Lightning had the state of a GradScaler up to 1.5, and from 1.6 to 1.9
LIGHTNING_BEFORE_2 = ("native_amp_scaling_state", "NativeMixedPrecisionPlugin")


def convert_state(
    root: Mapping[str, Any], to: Target, *, opt_level: str | None = None, static_scale: bool | None = None
) -> ConvertedCheckpoint:
    """Convert a checkpoint in memory, of tensors and plain values; the source is untouched.

    `opt_level` is that of the Apex side. By default it is inferred from the numbers of a source, and O1 for a result.
    `static_scale` says that the loss scale of an Apex source does not move; by default what the source shows.
    """
    parts = contents_by_kind(root)
    if not parts.models:
        what = f"it is {parts.writer}, and there" if parts.writer.endswith(" alone") else "there"
        raise ConversionError(
            f"{what} are no weights in it; `ampcompare convert --inspect` shows its contents"
        )
    if parts.wrappers or parts.loss_scales:
        level = opt_level or ("O2" if _half_types_in_checkpoint(parts) else "O1")
        return _convert_checkpoint_with_own_scalers(root, parts, to, level, static_scale)
    source = _layout_to_convert_to(parts, to, opt_level if to == "native" else None)
    if source == to:
        raise ConversionError(f"it is a checkpoint of {'Apex' if to == 'apex' else 'torch.amp'} already")
    if parts.arm is not None and static_scale:
        raise ConversionError(
            f"its arm, {parts.arm}, says whether the loss scale is static; leave out --static-scale"
        )
    if parts.arm is not None:
        return convert_state_to_arm(
            root, nearest_native_arm(parts.arm) if to == "native" else f"apex:{opt_level or 'O1'}"
        )
    result = ConvertedCheckpoint(copy_containers(root), source, opt_level)
    if to == "native":
        _convert_to_native(parts, result, opt_level, static_scale)
    else:
        if source == "16-bit weights":
            convert_to_fp32(parts, result, None)
        _convert_to_apex(parts, result, opt_level or "O1")
    drop_wrapper_prefixes(parts, result)
    return result


def _layout_to_convert_to(contents: CheckpointContents, to: Target, given_level: str | None) -> str:
    if contents.arm is not None:
        return conversion_kind_of_arm(contents.arm)
    if contents.apex or (given_level and not contents.scalers):
        return "apex"
    if _half_types_in_checkpoint(contents):
        return "16-bit weights"
    if contents.scalers or to == "apex":
        return "native"
    raise ConversionError(
        "it has no sign of Apex, only fp32 weights and no loss scaler; give --opt-level if a script with Apex saved it"
    )


def _half_types_in_checkpoint(contents: CheckpointContents) -> set[torch.dtype]:
    return {dtype for model in contents.models.values() if (dtype := half_type_of_weights(model)) is not None}


def _convert_to_native(
    contents: CheckpointContents,
    result: ConvertedCheckpoint,
    opt_level: str | None,
    static_scale: bool | None,
) -> None:
    level = result.level = opt_level or guess_opt_level_and_evidence(contents)[0]
    for place, state in contents.apex.items():
        scalers = grad_scaler_states_from_apex(
            state, level=level, static=static_scale, lost_lines=result.lost, changed_lines=result.changed
        )
        if contents.writer in PROGRAMS and place[-1] in TWIN_KEYS:
            key = TWIN_KEYS[place[-1]]
            result.changed.append(
                f"{'.'.join(place)}: under {key}, where {contents.writer} has the GradScaler"
            )
            _rename_key_noting_overwritten(result, place, key, only_entry_or_list(scalers))
        else:
            _put_grad_scalers(result, place, scalers, "amp_scaler" if contents.writer == "timm" else "scaler")
    if contents.apex:
        result.lost.append(
            "min_loss_scale and max_loss_scale, if they were set: no file has them, nor has GradScaler"
        )
    elif not contents.scalers and torch.bfloat16 not in _half_types_in_checkpoint(contents):
        result.lost.append(
            "no state of amp was saved: the GradScaler starts at 65536 and skips its first steps"
        )
    convert_to_fp32(contents, result, level)


def _put_grad_scalers(
    result: ConvertedCheckpoint, place: tuple[str, ...], scalers: list[dict[str, Any]], second_key: str
) -> None:
    """Put GradScalers where a script had the state of Apex, which a migrated script reads, and under `second_key` too.

    Of several scalers a migrated script reads the state of Apex: only it names them.
    """
    holder, name = entry_at_place(result.state, place[:-1]), ".".join(place)
    own = key_named_by_place(holder, place[-1])
    second_key = "scalers" if own == second_key else second_key
    is_free = isinstance(holder, dict) and (
        second_key not in holder or _is_empty_scaler_entry(holder[second_key])
    )
    if not is_free or (len(scalers) == 1 and own == "scaler"):
        holder[own] = only_entry_or_list(scalers)
        what = "a list of GradScalers" if len(scalers) > 1 else "the state of a GradScaler"
        result.changed.append(f"{name}: {what}, in place of that of Apex")
        return
    if len(scalers) > 1:
        result.changed.append(
            f"{name}: stays, for a script of `ampcompare migrate`; the GradScalers are under {second_key}"
        )
    else:
        result.changed.append(
            f"{name}: the GradScaler is also under {second_key}, as scripts with torch.amp have it"
        )
    entries = list(holder.items())
    holder.clear()
    for key, value in entries:
        if key == second_key:
            continue
        holder[key] = scalers[0] if key == own and len(scalers) == 1 else value
        if key == own:
            holder[second_key] = only_entry_or_list(scalers)


def _is_empty_scaler_entry(value: Any) -> bool:
    """Return whether an entry is what scripts save in place of a scaler that they do not have."""
    return value is None or value is False or (isinstance(value, Mapping | list | tuple | str) and not value)


def _convert_to_apex(contents: CheckpointContents, result: ConvertedCheckpoint, level: str) -> None:
    result.level = level
    into_groups = [(entry_at_place(result.state, place), ".".join(place)) for place in contents.optimizers]
    for optimizer, name in into_groups:
        add_adam_step_to_groups(optimizer, name, result)
    places, scalers = _scalers_in_order(contents, result)
    if len(scalers) > 1:
        names = ", ".join(".".join(place) for place in contents.scalers)
        result.changed.append(f"{len(scalers)} GradScalers ({names}) become one state, in their order")
    state = apex_state_from_grad_scalers(
        scalers, level=level, lost_lines=result.lost, changed_lines=result.changed
    )
    for place in reversed(places[1:]):
        holder = entry_at_place(result.state, place[:-1])
        del holder[key_named_by_place(holder, place[-1])]
    place = places[0] if places else (_key_for_apex_state_without_scaler(result),)
    has_own_name = len(scalers) < len(places)  # one state under two names: that of the script comes first
    key = place[-1] if has_own_name else _apex_keys_by_scaler_key(contents.writer).get(place[-1], "amp")
    _rename_key_noting_overwritten(result, place, key, state)
    if has_half_weights(level):
        result.lost.append(MASTERS_LOST.format(level))


def _scalers_in_order(
    contents: CheckpointContents, result: ConvertedCheckpoint
) -> tuple[list[tuple[str, ...]], list[Mapping[str, Any]]]:
    """Return the places of the GradScalers of a file, and their states, each once.

    A list or dict of scalers is one place; where it holds what a script saves in place of a scaler that it does not
    have, the state is empty, so that the others keep their numbers.
    """
    places = list(contents.scalers)
    scalers: list[Mapping[str, Any]] = list(
        {id(scaler): scaler for scaler in contents.scalers.values()}.values()
    )
    group = places[0][:-1] if places else ()
    if not group:
        return places, scalers
    held = entry_at_place(result.state, group)
    entries = list(held.values() if isinstance(held, Mapping) else held)
    if not entries or not all(
        is_grad_scaler_state(entry) or _is_empty_scaler_entry(entry) for entry in entries
    ):
        return places, scalers
    others = {place: scaler for place, scaler in contents.scalers.items() if place[:-1] != group}
    return [group, *others], [*(entry or {} for entry in entries), *others.values()]


def _apex_keys_by_scaler_key(writer: str) -> dict[str, str]:
    """Return the key that the state of Apex has in files of a program, by that of its GradScaler."""
    keys = {theirs: own for own, theirs in TWIN_KEYS.items()}
    if writer == "timm":
        keys["amp_scaler"] = "amp"
    if writer == "Lightning":
        keys |= dict.fromkeys(LIGHTNING_BEFORE_2, "amp_scaling_state")
    return keys


def _key_for_apex_state_without_scaler(result: ConvertedCheckpoint) -> str:
    """Return where the state of Apex goes in a file that has no scaler: where a script has left an entry empty."""
    return next(
        (key for key in ("scaler", "amp_scaler") if _is_empty_scaler_entry(result.state.get(key, "none"))),
        "amp",
    )


def _rename_key_noting_overwritten(
    result: ConvertedCheckpoint, place: tuple[str, ...], key: str, value: Any
) -> None:
    """Put an entry under another key; note as lost another entry that had this key."""
    holder = entry_at_place(result.state, place[:-1])
    if isinstance(holder, list):
        holder[int(place[-1])] = {key: value}
        return
    own = key_named_by_place(holder, place[-1])
    if key in holder and (key != own or place[-1] not in holder) and not _is_empty_scaler_entry(holder[key]):
        result.lost.append(f"{'.'.join((*place[:-1], key))}: another entry has this key now")
    rename_key(result.state, place, key, value)


def _convert_checkpoint_with_own_scalers(
    root: Mapping[str, Any], contents: CheckpointContents, to: Target, level: str, static_scale: bool | None
) -> ConvertedCheckpoint:
    """Convert what a script with `FP16_Optimizer`, or with a loss scaler of its own, saved.

    The inner optimizer replaces one that wraps it; the scale goes where the file has it, or to the top.
    """
    result = ConvertedCheckpoint(
        copy_containers(root), "FP16_Optimizer" if contents.wrappers else "a loss scaler of its own", level
    )
    scales = _unwrap_optimizers_and_take_scales(contents, result)
    scales |= {".".join(place): values_of_loss_scaler(state) for place, state in contents.loss_scales.items()}
    if static_scale:
        scales = {name: replace_fields(held, dynamic=False, interval=None) for name, held in scales.items()}
    elif any(map(is_number_or_scalar_tensor, contents.loss_scales.values())):
        result.lost.append(UNKNOWN_STATIC)
    _put_loss_scales(scales, contents, result, to, level)
    convert_to_fp32(contents, result, None)
    if to == "apex" and has_half_weights(level):
        result.lost.append(MASTERS_LOST.format(level))
    drop_wrapper_prefixes(contents, result)
    return result


def _unwrap_optimizers_and_take_scales(
    contents: CheckpointContents, result: ConvertedCheckpoint
) -> dict[str, LossScalerValues]:
    """Put the inner optimizer in place of each that wraps one, and return the scales of those, by place."""
    scales = {}
    for place, state in contents.wrappers.items():
        if unchecked_scale_of_state(state) is not None or "loss_scaler" in state:
            scales[".".join(place)] = values_of_loss_scaler(state)
        result.lost += unfinished_step_flag_lines(state)
        result.changed.append(f"{'.'.join(place)}: the state of the optimizer inside of it")
        holder = entry_at_place(result.state, place[:-1])
        key = key_named_by_place(holder, place[-1])
        holder[key] = next(entry for entry in holder[key].values() if is_optimizer_state(entry))
    inner = {place: place[:-1] if place[:-1] in contents.wrappers else place for place in contents.optimizers}
    contents.optimizers = {place: entry_at_place(result.state, place) for place in inner.values()}
    return scales


def _put_loss_scales(
    scales: dict[str, LossScalerValues],
    contents: CheckpointContents,
    result: ConvertedCheckpoint,
    to: Target,
    level: str,
) -> None:
    """Put loss scales where the file has the state of the one scaler, or else to the top; plain numbers go."""
    for place, state in contents.loss_scales.items():
        if is_number_or_scalar_tensor(state):
            entry_at_place(result.state, place[:-1]).pop(place[-1])
    if not scales:
        result.lost.append(
            "no loss scale was saved: the GradScaler starts at 65536 and skips its first steps"
        )
        return
    if to == "native":
        own_key, entry = (
            "scaler",
            only_entry_or_list(
                grad_scaler_states_from_values(scales, lost_lines=result.lost, changed_lines=result.changed)
            ),
        )
    else:
        own_key = "amp"
        entry = apex_state_from_values(
            list(scales.values()), level=level, lost_lines=result.lost, changed_lines=result.changed
        )
    with_state = next(
        (place for place, state in contents.loss_scales.items() if not is_number_or_scalar_tensor(state)),
        None,
    )
    if with_state is not None and len(scales) == 1:
        _rename_key_noting_overwritten(
            result, with_state, with_state[-1] if to == "native" else own_key, entry
        )
    else:
        _rename_key_noting_overwritten(result, (own_key,), own_key, entry)


def convert_file(
    source: Path,
    target: Path,
    to: Target,
    *,
    opt_level: str | None = None,
    legacy_layout: bool = False,
    static_scale: bool | None = None,
) -> ConvertedCheckpoint:
    """Convert a file. An ampcompare checkpoint stays one; any other keeps the layout of its program.

    Args:
        source: is read, and not changed.
        target: is written, with the suffix .pt.
        to: "native" or "apex".
        opt_level: of the side that is Apex's; None to infer it from a source, and for O1 as a result.
        legacy_layout: write precisely what a legacy script would save, with `to="apex"`.
        static_scale: the loss scale of an Apex source does not move; None for what the source shows.

    Returns:
        What was converted, with what was changed, lost and noticed.

    Raises:
        ConversionError: the state cannot be converted, an argument is for the other direction, or `target` is `source`.
        CheckpointError: the file cannot be read.
    """
    if legacy_layout and to != "apex":
        raise ConversionError("--save-apex-format is what an Apex script saves; it needs --to apex")
    if static_scale and to != "native":
        raise ConversionError("--static-scale is said of a loss scale of Apex; it needs --to native")
    _refuse_target(target, source)
    root, left_out, changed = load_any_checkpoint(source)
    with translate_parser_errors(source), torch.no_grad():
        parts = contents_by_kind(root)
        if legacy_layout and parts.is_of_ampcompare and "amp" in root:
            result = ConvertedCheckpoint(
                dict(root), "apex", guess_opt_level_and_evidence(parts)[0], parts.arm
            )
        else:
            result = convert_state(root, to, opt_level=opt_level, static_scale=static_scale)
        result.notes += broken_value_sentences(parts)
        result.changed += changed
        result.lost += [
            f"{printable_line(place, MAX_NAME, keep_end=49)} (no tensor and no plain value)"
            for place in left_out
        ]
        if legacy_layout and parts.is_of_ampcompare:
            _reduce_to_apex_script_layout(result)
    if parts.is_of_ampcompare and not legacy_layout:
        write_checkpoint(target, {key: value for key, value in result.state.items() if key != "schema"})
    else:
        write_pickle_without_checksum(target, result.state)
    return result


def _refuse_target(target: Path, source: Path) -> None:
    if target.suffix == ".safetensors":
        raise ConversionError(f"{target} would be no safetensors file, but an archive of torch; name it *.pt")
    if target.exists() and source.exists() and target.samefile(source):
        raise ConversionError(f"{source} would be overwritten; name another file")


def _reduce_to_apex_script_layout(result: ConvertedCheckpoint) -> None:
    """Bring the state of an ampcompare checkpoint into the layout of an Apex script; note what that lacks as lost."""
    known = {"schema", "model", "optimizer", "amp", "progress", "best", CONVERTED, TRAINER}
    filled = [key for key, value in result.state.items() if value not in (None, {}, [])]
    result.lost += [f"{key}: an Apex script does not save it" for key in filled if key not in known]
    result.state, result.arm = state_in_apex_layout(result.state), None


def load_any_checkpoint(path: Path) -> PlainContents:
    """Read a checkpoint of any program into a dict of tensors and plain values; whole models become state dicts."""
    contents = open_checkpoint(path)
    if contents.comment.startswith(b"ampcompare checkpoint"):
        return PlainContents(read_checkpoint(path), [], [])
    with translate_parser_errors(path):
        plain = contents.plain_contents()
    if not isinstance(plain.value, dict):
        raise CheckpointError(f"{path} holds a {type(plain.value).__name__}, not a checkpoint")
    return plain
