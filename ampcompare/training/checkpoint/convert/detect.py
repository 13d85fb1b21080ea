"""Find weights, optimizers and loss scalers in a checkpoint of any program, and identify the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ampcompare.base.errors import ConversionError

__all__ = [
    "CheckpointContents",
    "find_parts",
    "is_apex_state",
    "is_fp16_optimizer",
    "is_scaler_state",
    "is_weights",
]

Place = tuple[str, ...]
BOOKKEEPING = {"callbacks", "loops"}
"""What Lightning's own callbacks and loops count and keep, under their own names: not part of the training state."""
FP16_OPTIMIZER_KEYS = ("loss_scaler", "optimizer_state_dict", "fp32_from_fp16")
SCALER_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
MAX_DEPTH = 3
LONGEST_ARM = 500


@dataclass
class CheckpointContents:
    """What a checkpoint holds, by kind. A place is the path of keys to an entry.

    Attributes:
        writer: "ampcompare", "Lightning", "mmengine", "timm", "an Apex script", "a script with FP16_Optimizer",
            "a torch.amp script", "a script" or "a state dict alone".
        because: the evidence for the writer.
        models: state dicts of weights.
        averages: state dicts of averaged weights.
        optimizers: state dicts of optimizers.
        apex: states of `apex.amp`.
        scalers: states of `GradScaler`; empty if ampcompare's is disabled.
        fp16_optimizers: states of `apex.fp16_utils.FP16_Optimizer`, each around one of `optimizers`.
        masters: per model, fp32 masters by name; only ampcompare and `FP16_Optimizer` save them.
        nameless: number of masters that match no weight.
        arm: of an ampcompare checkpoint.
    """

    writer: str
    because: str
    models: dict[Place, dict[str, Any]] = field(default_factory=dict)
    averages: dict[Place, dict[str, Any]] = field(default_factory=dict)
    optimizers: dict[Place, dict[str, Any]] = field(default_factory=dict)
    apex: dict[Place, dict[str, Any]] = field(default_factory=dict)
    scalers: dict[Place, dict[str, Any]] = field(default_factory=dict)
    fp16_optimizers: dict[Place, dict[str, Any]] = field(default_factory=dict)
    masters: list[dict[str, Tensor]] = field(default_factory=list)
    nameless: int = 0
    arm: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is the layout of `layout`."""
        return self.writer == "ampcompare"


def is_apex_state(value: Any) -> bool:
    """Return whether a value is what `amp.state_dict()` returns."""
    return _is_dict(value) and all(
        isinstance(key, str) and "loss_scaler" in key and _is_dict(entry) and {"loss_scale", "unskipped"} <= set(entry)
        for key, entry in value.items()
    )


def is_scaler_state(value: Any) -> bool:
    """Return whether a value is what `GradScaler.state_dict()` returns for a scaler that is enabled."""
    return _is_dict(value) and set(value) >= SCALER_KEYS


def is_fp16_optimizer(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is what `FP16_Optimizer.state_dict()` returns."""
    return (
        isinstance(value, Mapping)
        and all(key in value for key in FP16_OPTIMIZER_KEYS)
        and isinstance(inner := value["optimizer_state_dict"], Mapping)
        and isinstance(inner.get("param_groups"), list)
        and isinstance(value["fp32_from_fp16"], list)
    )


def is_weights(value: Any) -> bool:
    """Return whether a value is a state dict of a model: names to tensors, and at most some other entries."""
    if not _is_dict(value) or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(entry, Tensor) for entry in value.values())
    return tensors > 0 and 2 * tensors >= len(value) and not any(_is_dict(entry) for entry in value.values())


def _is_optimizer(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return _is_dict(value) and isinstance(value.get("param_groups"), list) and _has_dict(value, "state")


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0


def _has_dict(value: Mapping[str, Any], key: str) -> bool:
    return isinstance(value.get(key), Mapping)


def find_parts(root: Any) -> CheckpointContents:
    """Sort the entries of a checkpoint, looking at most three levels deep.

    Args:
        root: tensors and plain values.
    """
    if is_weights(root):
        return CheckpointContents("a state dict alone", "its entries are all tensors", models={(): dict(root)})
    if not isinstance(root, Mapping):
        return CheckpointContents("a script", f"it holds a {type(root).__name__}")
    ours = isinstance(root.get("schema"), int) and "model" in root and isinstance(root.get("arm"), str)
    parts = CheckpointContents("", "")
    lightning = "pytorch-lightning_version" in root
    walked = {key: value for key, value in root.items() if not (lightning and key in BOOKKEEPING)}
    for place, value in _walk(walked, (), set()):
        kind: dict[Place, dict[str, Any]] | None = None
        if ours and place[0] not in ("model", "optimizer", "amp", "scaler", "parts"):
            continue
        if is_apex_state(value):
            kind = parts.apex
        elif is_scaler_state(value):
            kind = parts.scalers
        elif is_fp16_optimizer(value):
            kind = parts.fp16_optimizers
        elif _is_optimizer(value):
            kind = parts.optimizers
        elif is_weights(value) and "state" not in place[:-1]:
            averaged = place[0] == "parts" or any("ema" in key.lower() or "averag" in key.lower() for key in place)
            kind = parts.averages if averaged else parts.models
        if kind is not None:
            kind[place] = dict(value)
    if ours:
        parts.writer, parts.because = "ampcompare", f"schema {root['schema']}"
        parts.arm = root["arm"][:LONGEST_ARM]
        parts.masters = _masters(root.get("masters") or {})
    else:
        parts.writer, parts.because = _writer(root, parts)
        if parts.fp16_optimizers:
            states: list[Mapping[str, Any]] = list(parts.fp16_optimizers.values())
            parts.masters, parts.nameless = _match_masters(list(parts.models.values()), states)
    return parts


def _masters(entry: Any) -> list[dict[str, Tensor]]:
    """Return the masters of each model, by name.

    Raises:
        ConversionError: the entry holds something else.
    """
    masters = entry if isinstance(entry, list) else [entry]
    for held in masters:
        if not isinstance(held, Mapping) or not all(isinstance(value, Tensor) for value in held.values()):
            raise ConversionError("its entry masters is damaged: it does not hold tensors by name")
    return [dict(held) for held in masters]


def _walk(value: Any, place: Place, seen: set[int]) -> Iterator[tuple[Place, Any]]:
    """Yield entries with their places; the insides of weights and optimizer state are not walked."""
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, entry in items:
        path = (*place, str(key))
        if not isinstance(entry, Mapping | list):
            continue
        yield path, entry
        if len(path) >= MAX_DEPTH or id(entry) in seen or is_weights(entry) or is_apex_state(entry):
            continue
        seen.add(id(entry))
        if is_fp16_optimizer(entry):
            yield from _walk({"optimizer_state_dict": entry["optimizer_state_dict"]}, path, seen)
        elif _is_optimizer(entry):
            others = {name: item for name, item in entry.items() if name not in ("state", "param_groups")}
            yield from _walk(others, path, seen)
        else:
            yield from _walk(entry, path, seen)


def _writer(root: Mapping[Any, Any], parts: CheckpointContents) -> tuple[str, str]:
    keys = {key for key in root if isinstance(key, str)}
    tells: list[tuple[str, Callable[[], bool], str]] = [
        ("Lightning", lambda: "pytorch-lightning_version" in keys, "the key pytorch-lightning_version"),
        ("mmengine", lambda: {"meta", "message_hub"} <= keys, "the keys meta and message_hub"),
        (
            "mmengine",
            lambda: {"meta", "state_dict"} <= keys and _has_dict(root, "meta"),
            "the keys meta and state_dict",
        ),
        (
            "timm",
            lambda: {"arch", "state_dict", "version"} <= keys or {"state_dict", "amp_scaler"} <= keys,
            "the keys arch, state_dict and version",
        ),
        ("an Apex script", lambda: bool(parts.apex), f"amp.state_dict() under {_shown(parts.apex)}"),
        (
            "a script with FP16_Optimizer",
            lambda: bool(parts.fp16_optimizers),
            f"what it holds under {_shown(parts.fp16_optimizers)}",
        ),
        ("a torch.amp script", lambda: bool(parts.scalers), f"a GradScaler's state under {_shown(parts.scalers)}"),
    ]
    for writer, holds, because in tells:
        if holds():
            return writer, because
    return "a script", "it has no loss scaler"


def _shown(places: Mapping[Place, Any]) -> str:
    return ", ".join(".".join(place) for place in places)


def _match_masters(
    models: list[Mapping[str, Any]], states: list[Mapping[str, Any]]
) -> tuple[list[dict[str, Tensor]], int]:
    """Give the masters their names: those of the fp16 weights that have their values, in the order of both.

    Returns:
        Masters by name, for each model, and the number of masters that match no weight.
    """
    found: list[dict[str, Tensor]] = [{} for _ in models]
    weights = [
        (index, name, value)
        for index, model in enumerate(models)
        for name, value in model.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    unmatched = begin = 0
    for master in _fp16_masters(states):
        # of weights that are alike, such as biases of zeros, the next one; groups may have another order
        order = [*range(begin, len(weights)), *range(begin)]
        place = next((at for at in order if _is_master(master, weights[at][2])), None)
        if place is None:
            unmatched += 1
            continue
        index, name, _ = weights.pop(place)
        found[index][name] = master.detach()
        begin = place
    return found, unmatched


def _fp16_masters(states: list[Mapping[str, Any]]) -> Iterator[Tensor]:
    for state in states:
        for group in state["fp32_from_fp16"]:
            for master in group if isinstance(group, list) else ():
                if isinstance(master, Tensor) and master.is_floating_point():
                    yield master


def _is_master(master: Tensor, weight: Tensor) -> bool:
    """Return whether a weight is the master as fp16; a script may have made it fp32 again."""
    return master.shape == weight.shape and torch.equal(master.half().float(), weight.float())
