"""Report what a checkpoint holds: who wrote it, at which level, in which types, and what was lost when it was saved."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import CheckpointError, ConfigError, ConversionError
from ampcompare.base.formatting import format_bytes, printable_line
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.checkpoints.convert.detect import CheckpointContents, contents_by_kind
from ampcompare.checkpoints.convert.fp32_weights import common_wrapper_prefix
from ampcompare.checkpoints.convert.masters import (
    are_representable_in,
    floating_entries_of_model,
    half_type_of_weights,
)
from ampcompare.checkpoints.convert.scalers import (
    SMALLEST_NORMAL,
    is_loss_scaler_state,
    plain_number_or_value,
    unchecked_scale_of_state,
    values_of_loss_scaler,
)
from ampcompare.checkpoints.reader.foreign import FileContents, open_checkpoint, translate_parser_errors
from ampcompare.checkpoints.reader.placeholders import translate_entry_errors
from ampcompare.checkpoints.store.file import verify_checksum_of_file

MAX_LINES = 20
MAX_LENGTH = 500
MAX_BROKEN = 3
STATISTICS = {"mean", "std", "var", "variance", "min", "max", "count", "median", "center", "scale", "shift"}


@dataclass
class CheckpointInspection:
    """What was found in a file; plain data throughout."""

    path: str
    format: str
    size: int
    checksum: str  # "right", "none", or what is wrong with it
    writer: str
    because: str
    level: str | None  # opt level as far as it can be inferred; None if nothing is from Apex
    level_because: str
    arm: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)  # place, kind, entries, bytes, dtypes
    scales: list[dict[str, Any]] = field(default_factory=list)  # of each loss scaler
    notes: list[str] = field(default_factory=list)
    traps: list[str] = field(default_factory=list)  # what would go wrong in a resume
    objects: list[str] = field(default_factory=list)  # places of those that a safe loader refuses
    calls: list[str] = field(default_factory=list)  # what unpickling would call
    keys: list[str] = field(default_factory=list)  # other top-level entries


def inspect_file(path: Path) -> CheckpointInspection:
    """Look into a checkpoint of any program without running anything in it."""
    contents = open_checkpoint(path)
    with translate_parser_errors(path), torch.no_grad():
        return _inspect_contents(path, contents)


def _inspect_contents(path: Path, contents: FileContents) -> CheckpointInspection:
    root, objects, _ = contents.plain_contents()
    parts = contents_by_kind(root)
    level, because = guess_opt_level_and_evidence(parts)
    inspection = CheckpointInspection(
        path=str(path),
        format=contents.format,
        size=contents.size,
        checksum=_checksum_text(path, contents),
        writer=parts.writer,
        because=parts.because,
        level=level,
        level_because=because,
        arm=parts.arm,
        rows=list(_inspection_rows(parts)),
        scales=list(_loss_scale_rows(parts)),
        notes=list(_wrapper_and_unmatched_master_sentences(parts)),
        traps=list(_resume_hazard_sentences(parts)),
        objects=objects,
        calls=contents.calls,
    )
    kinds: tuple[Mapping[tuple[str, ...], Any], ...] = (
        *(parts.models, parts.averages, parts.optimizers, parts.apex, parts.scalers),
        *(parts.wrappers, parts.loss_scales, parts.master_places),
    )
    used = {place[0] for kind in kinds for place in kind if place}
    if isinstance(root, Mapping) and not parts.writer.endswith(" alone"):
        inspection.keys = [str(key) for key in root if str(key) not in used and key != "masters"][:50]
    return inspection


def _checksum_text(path: Path, contents: FileContents) -> str:
    if not contents.comment.startswith(b"ampcompare checkpoint"):
        return "none"
    try:
        verify_checksum_of_file(path)
    except CheckpointError as error:
        return str(error)
    return "right"


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors anywhere in an entry, each container once."""
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            todo += reversed(list(value.values() if isinstance(value, Mapping) else value))


def _inspection_rows(contents: CheckpointContents) -> Iterator[dict[str, Any]]:
    kinds = (
        ("weights", contents.models),
        ("averaged weights", contents.averages),
        ("optimizer", contents.optimizers),
    )
    for kind, entries in kinds:
        for place, entry in entries.items():
            is_other = kind == "weights" and len(contents.models) > 1 and _is_input_normalization(entry)
            with translate_entry_errors(*place):
                row = _inspection_row("tensors" if is_other else kind, ".".join(place) or "(all)", entry)
            yield row
    where = contents.master_places_text or "masters"
    for index, masters in enumerate(contents.masters):
        if masters:
            yield _inspection_row(
                "fp32 masters", f"{where}.{index}" if len(contents.masters) > 1 else where, masters
            )


def _is_input_normalization(entry: Mapping[str, Any]) -> bool:
    """Return whether a dict of tensors next to weights holds what inputs are normalized by, say, and no parameters."""
    return all(key.lower().strip("_") in STATISTICS for key in entry)


def _inspection_row(kind: str, place: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    inner = entry["state"] if kind == "optimizer" else entry
    tensors = list(_tensors_in(inner))
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return {
        "place": place,
        "kind": kind,
        "entries": len(inner),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "dtypes": dict(dtypes.most_common()),
    }


def _loss_scale_rows(contents: CheckpointContents) -> Iterator[dict[str, Any]]:
    for place, state in contents.apex.items():
        for name, own in state.items():
            yield {
                "place": ".".join((*place, name)),
                "scale": plain_number_or_value(own["loss_scale"]),
                "clean_steps": plain_number_or_value(own["unskipped"]),
            }
    for place, state in (*contents.wrappers.items(), *contents.loss_scales.items()):
        if (scale := unchecked_scale_of_state(state)) is None:
            continue  # none, or an object of another program, which is listed as such
        holds = state.items() if isinstance(state, Mapping) else ()
        inner = [key for key, value in holds if key == "loss_scaler" or is_loss_scaler_state(value)]
        entry: dict[str, Any] = {"place": ".".join((*place, *inner[:1])) or "(all)", "scale": scale}
        try:
            held = values_of_loss_scaler(state)
        except ConversionError:
            yield {**entry, "clean_steps": None}
            continue
        entry["clean_steps"] = held.clean
        yield entry if held.interval is None else {**entry, "growth_interval": held.interval}
    for place, state in contents.scalers.items():
        yield {
            "place": ".".join(place) or "(all)",
            "scale": plain_number_or_value(state["scale"]),
            "clean_steps": plain_number_or_value(state["_growth_tracker"]),
            "growth_interval": plain_number_or_value(state["growth_interval"]),
        }


def _wrapper_and_unmatched_master_sentences(contents: CheckpointContents) -> Iterator[str]:
    for place, model in contents.models.items():
        if prefix := common_wrapper_prefix(model):
            yield f"the names in {'.'.join(place) or 'it'} begin with `{prefix}`: saved from inside of a wrapper"
    if contents.unmatched:
        yield f"{contents.unmatched} masters have no weight with their values in 16 bits"


def _iter_weights(contents: CheckpointContents, *, of_norms: bool) -> Iterator[Tensor]:
    for model in contents.models.values():
        yield from floating_entries_of_model(model, of_norms=of_norms)


def guess_opt_level_and_evidence(contents: CheckpointContents) -> tuple[str | None, str]:
    """Return the opt level that a file was written at, as far as its numbers show, and the evidence."""
    if contents.arm is not None:
        try:
            arm = Arm.parse(contents.arm)
        except ConfigError:  # of a backend that is not installed here
            return None, ""
        level = arm.spec.checkpoint.opt_level(arm.options)
        return (level, "its arm") if level else (None, "")
    if contents.wrappers:
        return None, "FP16_Optimizer has none; its masters are those of O2"
    weights = list(_iter_weights(contents, of_norms=False))
    half = next(
        (kind for model in contents.models.values() if (kind := half_type_of_weights(model)) is not None),
        None,
    )
    if not contents.apex:
        if any(contents.masters):
            return None, "weights are 16-bit values with fp32 masters, as O2 trains them"
        if half is torch.bfloat16:
            return None, "weights are bf16 values: saved at O5, or by .bfloat16()"
        if half is not None:
            return None, "weights are fp16 values: saved at O2 or O3, or by .half()"
        return None, ""
    if half is torch.bfloat16:
        return "O5", "weights are bf16 values"
    if half is not None:
        norms = are_representable_in(_iter_weights(contents, of_norms=True))
        state = are_representable_in(_iter_moments(contents))
        if norms is False or state is False:
            return "O2", "weights are fp16 values, batch norms or optimizer state are not"
        if norms or _has_half_state(contents):
            return "O3", "weights, batch norms and optimizer state are fp16 values"
        return "O2", "weights are fp16 values; O3 looks the same in this model"
    if _has_half_state(contents):
        return "O3", "optimizer state is fp16"
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights}
    if kinds != {"float32"}:
        return None, f"weights are {' and '.join(sorted(kinds)) or 'of other types'}, which no level trains"
    scales = [entry["loss_scale"] for state in contents.apex.values() for entry in state.values()]
    if all(scale == 1.0 for scale in scales):
        return "O0", "fp32 weights and a loss scale of 1"
    return "O1", "fp32 weights and a loss scale"


def _iter_moments(contents: CheckpointContents) -> Iterator[Tensor]:
    for optimizer in contents.optimizers.values():
        for state in optimizer["state"].values():
            if isinstance(state, Mapping):
                yield from (
                    value for key, value in state.items() if isinstance(value, Tensor) and key != "step"
                )


def _has_half_state(contents: CheckpointContents) -> bool:
    return any(tensor.dtype is torch.float16 for tensor in _iter_moments(contents))


def _resume_hazard_sentences(contents: CheckpointContents) -> Iterator[str]:
    yield from broken_value_sentences(contents)
    kinds = {half_type_of_weights(model) for model in contents.models.values()} - {None}
    rounded = bool(kinds)
    masters = [*contents.masters, *({} for _ in contents.models)]
    bare = sum(
        isinstance(value, Tensor) and value.dtype in HALF_DTYPES and name not in masters[index]
        for index, model in enumerate(contents.models.values())
        for name, value in model.items()
    )
    if rounded and not any(contents.masters):
        yield (
            "weights are 16-bit values and no masters were saved: O2 or O5 resumes from rounded masters, and the first "
            "step after the resume differs from an uninterrupted run"
        )
    elif rounded and bare:
        yield f"{bare} weights in 16 bits have no fp32 master: a resume begins with their rounded values"
    if _has_half_state(contents):
        yield "optimizer state is fp16, rounded to 11 bits"
    elif any(tensor.dtype is torch.bfloat16 for tensor in _iter_moments(contents)):
        yield "optimizer state is bf16, rounded to 8 bits"
    elif are_representable_in(_iter_moments(contents)):
        yield "optimizer state holds fp16 values only, so it is one step old or went through fp16 on a resume"
    if contents.optimizers and torch.float16 in kinds and not list(_loss_scale_rows(contents)):
        yield "no state of the loss scaler: its scale restarts at 65536, and the first steps after a resume are skipped"
    for state in contents.apex.values():
        for name, entry in state.items():
            if isinstance(entry["unskipped"], int) and entry["unskipped"] >= 2000:
                yield f"{name}: {entry['unskipped']} clean steps; a dynamic scale grows at 2000, so this one was static"


def broken_value_sentences(contents: CheckpointContents) -> Iterator[str]:
    """Report weights, moments and loss scales that no training resumes from."""
    entries = [
        *contents.models.items(),
        *contents.averages.items(),
        *((place, held["state"]) for place, held in contents.optimizers.items()),
    ]
    for place, entry in entries:
        counts = {
            str(name): sum(
                _num_nonfinite_elements(one) for one in _tensors_in([value]) if one.is_floating_point()
            )
            for name, value in entry.items()
        }
        bad = {name: count for name, count in counts.items() if count}
        if bad:
            names = ", ".join(f"{count} in {name}" for name, count in list(bad.items())[:MAX_BROKEN])
            more = f" and {len(bad) - MAX_BROKEN} more" if len(bad) > MAX_BROKEN else ""
            yield (
                f"{'.'.join(place) or 'the file'} holds {sum(bad.values())} values that are NaN or infinite "
                f"({names}{more}): no training resumes from it; take a checkpoint from before"
            )
    for scale in _loss_scale_rows(contents):
        value = scale["scale"]
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            yield f"the loss scale {scale['place']} is {value}, not a positive number: no gradient is usable with it"
        elif value < SMALLEST_NORMAL:
            yield f"the loss scale {scale['place']} is {value:g}, subnormal in fp32: steps have overflowed without end"


def _num_nonfinite_elements(tensor: Tensor) -> int:
    """Return how many elements are NaN or infinite; 0 for two 4-bit numbers in a byte, which have neither."""
    if tensor.dtype.itemsize == 1:
        if "float4" in str(tensor.dtype):
            return 0
        tensor = tensor.float()  # torch asks this of no 8-bit type
    return int((~tensor.isfinite()).sum())


def inspection_lines(inspection: CheckpointInspection) -> list[str]:
    """Return what was found in a checkpoint, for a terminal."""
    lines = [
        f"{inspection.path}: {inspection.format}, {format_bytes(inspection.size)}, checksum: {inspection.checksum}"
    ]
    lines.append(
        f"written by: {inspection.writer} ({inspection.because})"
        + (f", arm {inspection.arm}" if inspection.arm else "")
    )
    if inspection.level_because:
        lines.append(f"opt level: {inspection.level or 'unknown'} ({inspection.level_because})")
    if inspection.rows:
        rows = []
        for row in inspection.rows[:MAX_LINES]:
            dtypes = ", ".join(f"{count} {name}" for name, count in row["dtypes"].items())
            rows.append([row["place"], row["kind"], row["entries"], format_bytes(row["bytes"]), dtypes])
        lines += tabulate(
            rows, headers=["key", "what", "entries", "size", "dtypes"], tablefmt="simple"
        ).splitlines()
    for scale in inspection.scales[:MAX_LINES]:
        interval = f", grows after {scale['growth_interval']}" if "growth_interval" in scale else ""
        lines.append(
            f"{scale['place']}: loss scale {scale['scale']}, {scale['clean_steps']} clean steps{interval}"
        )
    if inspection.keys:
        lines.append(f"also: {', '.join(inspection.keys)}")
    lines += inspection.notes
    lines += [f"trap: {trap}" for trap in inspection.traps]
    if inspection.objects:
        lines.append("objects, which only unpickling with their code would make:")
        lines += [f"  {place}" for place in inspection.objects[:MAX_LINES]]
        if len(inspection.objects) > MAX_LINES:
            lines.append(f"  and {len(inspection.objects) - MAX_LINES} more")
    hidden = [
        name
        for name in inspection.calls
        if not any(place.endswith(f": {name}") for place in inspection.objects)
    ]
    if hidden:
        lines.append(f"unpickling would also call: {', '.join(hidden[:MAX_LINES])}")
    return [printable_line(line, MAX_LENGTH, keep_spaces=True) for line in lines]


def conversion_report_lines(document: dict[str, Any]) -> list[str]:
    """Return what a conversion did, for a terminal; `document` is what `--json` prints."""
    level = f" {document['opt_level']}" if document["opt_level"] else ""
    names = {"apex": "Apex" + level, "native": "torch.amp"}
    was, becomes = names.get(document["from"], document["from"]), names[document["to"]]
    lines = [
        f"{document['out']}: {was} to {becomes}" + (f", arm {document['arm']}" if document["arm"] else "")
    ]
    lines += [f"  carried: {line}" for line in document["changed"]]
    lines += [f"  not carried: {line}" for line in document["lost"]] or ["  nothing was lost"]
    lines += [f"  note: {line}" for line in document["notes"]]
    return [printable_line(line, MAX_LENGTH, keep_spaces=True) for line in lines]
