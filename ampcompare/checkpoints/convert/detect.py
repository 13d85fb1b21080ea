"""Find weights, optimizers and loss scalers in a checkpoint of any program, and identify the program."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ampcompare.checkpoints.convert.masters import find_masters, is_optimizer_state
from ampcompare.checkpoints.convert.scalers import is_loss_scaler_state, is_number_or_scalar_tensor
from ampcompare.checkpoints.store.layout import list_of_one_or_several

Place = tuple[str, ...]
BOOKKEEPING = {"callbacks", "loops"}
"""What Lightning's own callbacks and loops count and keep, under their own names: not part of the training state."""
SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
STATES_OF_OURS = ("model", "optimizer", "amp", "scaler", "parts")  # entries of ampcompare's own checkpoints
MAX_DEPTH = 6
SCALE_NAMES = ("loss_scale", "cur_scale")
LONGEST_ARM = 500
KEYS_OF_PROGRAMS = (
    ("Lightning", "pytorch-lightning_version"),
    ("mmengine", "meta", "message_hub"),
    ("mmengine", "meta", "state_dict"),
    ("timm", "arch", "state_dict", "version"),
    ("timm", "state_dict", "amp_scaler"),
    ("fairseq", "optimizer_history", "extra_state"),
    ("Megatron", "checkpoint_version", "iteration"),
    ("DeepSpeed", "module", "mp_world_size"),
)
"""The keys by which the files of programs are known."""


@dataclass
class CheckpointContents:
    """What a checkpoint holds, by kind. A place is the path of keys to an entry.

    Wrappers are states of optimizers that keep a loss scale or fp32 copies, each around one of `optimizers`: of Apex's
    two `FP16_Optimizer`, of Megatron and DeepSpeed. Masters are fp32 copies of 16-bit weights; layouts are those of
    `Masters`.
    """

    writer: str  # "ampcompare", another program, a kind of script, or what stands alone
    because: str  # the evidence for the writer
    models: dict[Place, dict[str, Any]] = field(default_factory=dict)  # state dicts of weights
    averages: dict[Place, dict[str, Any]] = field(default_factory=dict)  # of averaged weights
    optimizers: dict[Place, dict[str, Any]] = field(default_factory=dict)  # state dicts
    apex: dict[Place, dict[str, Any]] = field(default_factory=dict)  # states of `apex.amp`
    # of `GradScaler`; none that is disabled
    scalers: dict[Place, dict[str, Any]] = field(default_factory=dict)
    wrappers: dict[Place, dict[str, Any]] = field(default_factory=dict)
    # states of other loss scalers, or the scale alone
    loss_scales: dict[Place, Any] = field(default_factory=dict)
    masters: list[dict[str, Tensor]] = field(default_factory=list)  # per model, by name
    master_places: dict[Place, int] = field(default_factory=dict)  # with the number of weights found there
    unmatched: int = 0  # fp32 copies that round to no weight
    layouts: list[tuple[int, list[torch.Size]]] = field(default_factory=list)
    arm: str | None = None  # of an ampcompare checkpoint

    @property
    def is_of_ampcompare(self) -> bool:
        """Whether this is the layout of `layout`."""
        return self.writer == "ampcompare"

    @property
    def master_places_text(self) -> str:
        """The places of the masters in words, without the numbers of groups."""
        keys = dict.fromkeys(
            ".".join(key for key in place if not key.isdigit()) or "the top of the file"
            for place in self.master_places
        )
        return ", ".join(keys)


def is_apex_state(value: Any) -> bool:
    """Return whether a value is what `amp.state_dict()` returns."""
    return _is_filled_mapping(value) and all(
        isinstance(key, str)
        and "loss_scaler" in key
        and _is_filled_mapping(entry)
        and {"loss_scale", "unskipped"} <= set(entry)
        for key, entry in value.items()
    )


def is_grad_scaler_state(value: Any) -> bool:
    """Return whether a value is what `GradScaler.state_dict()` returns for a scaler that is enabled."""
    return _is_filled_mapping(value) and set(value) >= SCALER_KEYS


def _is_weights(value: Any) -> bool:
    """Return whether a value is a state dict of a model: names to tensors, and at most some other entries."""
    if not _is_filled_mapping(value) or not all(isinstance(key, str) for key in value):
        return False
    tensors = [entry for entry in value.values() if isinstance(entry, Tensor)]
    has_weights = any(tensor.is_floating_point() and tensor.ndim for tensor in tensors)
    return (
        has_weights
        and 2 * len(tensors) >= len(value)
        and not any(_is_filled_mapping(entry) for entry in value.values())
    )


def _is_in_optimizer_state(place: Place) -> bool:
    """Return whether a place lies in the state of an optimizer, by parameter; Composer has all it saves below `state`.

    What is known as an optimizer's state dict is not walked; this is of those in another form.
    """
    held = [number for number, key in enumerate(place[:-1]) if key == "state"]
    return any(
        place[number + 1].isdigit()
        or any(word in key.lower() for key in place[:number] for word in ("opt", "adam"))
        for number in held
    )


def _key_of_inner_optimizer(value: Any, place: Place) -> str | None:
    """Return the key of the optimizer that another optimizer's state wraps; None if it is no such state.

    The state of a wrapper has fp32 copies of weights, or a loss scale of a kind of its own.
    """
    if not isinstance(value, Mapping) or not any("opt" in key.lower() for key in place):
        return None
    inner = [str(key) for key, entry in value.items() if is_optimizer_state(entry)]
    if len(inner) != 1 or any(_is_weights(entry) for entry in value.values()):
        return None
    keeps_scale = (
        any(is_number_or_scalar_tensor(value.get(name)) for name in SCALE_NAMES) or "loss_scaler" in value
    )
    keeps_copies = any(
        isinstance(entry, list) and any(isinstance(item, Tensor | list) for item in entry)
        for entry in value.values()
    )
    has_scaler = any(
        is_loss_scaler_state(entry) and not is_grad_scaler_state(entry) for entry in value.values()
    )
    return inner[0] if keeps_scale or keeps_copies or has_scaler else None


def _is_filled_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0


def contents_by_kind(root: Any) -> CheckpointContents:
    """Sort the entries of a checkpoint, of tensors and plain values, looking at most six levels deep."""
    alone = _contents_of_lone_state(root)
    if alone is not None:
        return alone
    if not isinstance(root, Mapping):
        return CheckpointContents("a script", f"it holds a {type(root).__name__}")
    is_ours = isinstance(root.get("schema"), int) and "model" in root and isinstance(root.get("arm"), str)
    parts = CheckpointContents("", "")
    lightning = "pytorch-lightning_version" in root
    walked = {key: value for key, value in root.items() if not (lightning and key in BOOKKEEPING)}
    _note_loss_scale(parts, root, ())
    for place, value in _walk_entries(walked, (), set()):
        if is_ours and place[0] not in STATES_OF_OURS:
            continue
        name = _contents_field_of_entry(value, place)
        if name is not None:
            getattr(parts, name)[place] = value
        if name != "wrappers":
            _note_loss_scale(parts, value, place)
    if is_ours:
        parts.writer, parts.because = "ampcompare", f"schema {root['schema']}"
        parts.arm = root["arm"][:LONGEST_ARM]
        parts.masters = [dict(held) for held in list_of_one_or_several(root.get("masters") or {})]
        return parts
    if not parts.models:
        parts.models, parts.averages = parts.averages, {}
    parts.writer, parts.because = _writer_of_file(root, parts)
    _separate_masters_from_models(root, parts)
    return parts


def _contents_field_of_entry(value: Any, place: Place) -> str | None:
    """Return the field of `CheckpointContents` to which an entry belongs; None for an entry of no kind."""
    if is_apex_state(value):
        return "apex"
    if is_grad_scaler_state(value):
        return "scalers"
    if _key_of_inner_optimizer(value, place) is not None:
        return "wrappers"
    if is_optimizer_state(value):
        return "optimizers"
    if is_loss_scaler_state(value):
        return "loss_scales"
    if _is_weights(value) and not _is_in_optimizer_state(place):
        is_averaged = place[0] == "parts" or any(
            "ema" in key.lower() or "averag" in key.lower() for key in place
        )
        return "averages" if is_averaged else "models"
    return None


def _separate_masters_from_models(root: Mapping[Any, Any], contents: CheckpointContents) -> None:
    """Find the fp32 copies of 16-bit weights, which are then no models."""
    masters = find_masters(root, contents.models, list(contents.wrappers))
    own = [
        place not in masters.places for place in contents.models
    ]  # the others are copies under their names
    contents.models = dict(compress(contents.models.items(), own))
    contents.masters, contents.master_places = list(compress(masters.by_model, own)), masters.places
    contents.unmatched, contents.layouts = masters.unmatched, masters.layouts


def _contents_of_lone_state(root: Any) -> CheckpointContents | None:
    """Return the contents of a file that is one state without a holder; None for others."""
    kinds: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
        ("optimizers", "an optimizer's state", is_optimizer_state),
        ("apex", "a state of apex.amp", is_apex_state),
        ("scalers", "a GradScaler's state", is_grad_scaler_state),
        ("loss_scales", "a loss scaler's state", is_loss_scaler_state),
        ("models", "a state dict", _is_weights),
    )
    for name, what, is_kind in kinds:
        if is_kind(root):
            parts = CheckpointContents(f"{what} alone", "it holds nothing else")
            setattr(parts, name, {(): dict(root)})
            _note_loss_scale(parts, root, ())
            return parts
    return None


def _note_loss_scale(contents: CheckpointContents, value: Any, place: Place) -> None:
    """Note a loss scale that is a number next to the state of an optimizer or inside of it; settings have such too."""
    if isinstance(value, Mapping) and (
        is_optimizer_state(value) or any(is_optimizer_state(entry) for entry in value.values())
    ):
        for name in SCALE_NAMES:
            if is_number_or_scalar_tensor(value.get(name)):
                contents.loss_scales[(*place, name)] = value[name]


def _walk_entries(value: Any, place: Place, seen_ids: set[int]) -> Iterator[tuple[Place, Any]]:
    """Yield entries with their places; the insides of weights and optimizer state are not walked."""
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, entry in items:
        path = (*place, str(key))
        if not isinstance(entry, Mapping | list):
            continue
        yield path, entry
        if len(path) >= MAX_DEPTH or id(entry) in seen_ids or _is_weights(entry) or is_apex_state(entry):
            continue
        seen_ids.add(id(entry))
        inner = _key_of_inner_optimizer(entry, path)
        if inner is not None:
            held = entry.values() if isinstance(entry, Mapping) else entry
            yield from _walk_entries({inner: next(filter(is_optimizer_state, held))}, path, seen_ids)
        elif is_optimizer_state(entry):
            others = {name: item for name, item in entry.items() if name not in ("state", "param_groups")}
            yield from _walk_entries(others, path, seen_ids)
        else:
            yield from _walk_entries(entry, path, seen_ids)


def _writer_of_file(root: Mapping[Any, Any], contents: CheckpointContents) -> tuple[str, str]:
    """Return who wrote a file, and the evidence."""
    keys = {key for key in root if isinstance(key, str)}
    meta = root.get("meta")
    if isinstance(meta, Mapping) and "mmcv_version" in meta:
        return "mmcv", "it has meta.mmcv_version"
    for writer, *own in KEYS_OF_PROGRAMS:
        if keys.issuperset(own) and (writer != "mmengine" or isinstance(meta, Mapping)):
            return writer, f"it has {', '.join(own)}"
    kinds: tuple[tuple[str, str, Mapping[Place, Any]], ...] = (
        ("an Apex script", "amp.state_dict()", contents.apex),
        ("a script with FP16_Optimizer", "its state", contents.wrappers),
        ("a torch.amp script", "a GradScaler's state", contents.scalers),
        ("a script with a loss scaler of its own", "a loss scale", contents.loss_scales),
    )
    for writer, what, places in kinds:
        if places:
            return writer, f"{what} under {', '.join(map('.'.join, places))}"
    return "a script", "it has no loss scaler"
