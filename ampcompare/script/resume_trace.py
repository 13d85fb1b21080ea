"""Write what each step of a script starts from and computes, and what the script saves and loads.

A step starts at its first forward pass that can be differentiated. What is written there is all that a checkpoint has
to restore, as digests: values in fp32, and these values rounded to each 16-bit type, so that a rounding is known later.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ampcompare.base.patches import Layer, Points, Subscriptions
from ampcompare.guards.location import user_location
from ampcompare.settings.resume_trace import Row

if TYPE_CHECKING:
    from ampcompare.script.recording.recorder import Recorder

DEPTH = 6  # of containers in what is saved


class ResumeTrace:
    """Watches the script of this process and writes rows of the kinds of `Row` to a file, each at once.

    Args:
        path: of the file.
        stop_at: ends the process as a kill would, at the first step after a file was saved at or behind this step;
            None lets the script run to its end.
    """

    def __init__(self, path: str, stop_at: int | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        self._process = os.getpid()
        self._stop_at = stop_at
        self._step = 0  # steps that have ended
        self._is_started = self._is_inside = self._has_saved = self._has_trained = False
        self._first: nn.Module | None = None  # that the step has called
        self._depth = 0
        self._models: list[nn.Module] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []

    def install(self, recorder: Recorder) -> None:
        """Watch until the process ends."""
        recorder.after_row(self._row)
        events = Subscriptions(Layer.WATCH)
        events.wrap(*Points.FORWARD, self._forward)
        events.wrap(*Points.MAKE_OPTIMIZER, self._keep(self._optimizers))
        events.wrap(*Points.MAKE_SCALER, self._keep(self._scalers))
        events.wrap(torch, "save", self._save)
        events.wrap(torch, "load", self._load)
        for name in ("replace", "rename"):  # which pathlib and shutil call
            events.wrap(os, name, self._move)
        for kind in (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler):
            events.wrap(kind, "load_state_dict", self._restore)
        events.wrap(torch, "set_rng_state", self._set_generator)

    def _write(self, kind: str, **values: Any) -> None:
        if os.getpid() == self._process:  # workers of a data loader are forks
            line = json.dumps({"kind": kind, "step": self._step, **values}) + "\n"
            os.write(self._file, line.encode("utf-8"))

    def _keep(self, into: list[weakref.ref[Any]]) -> Callable[..., Any]:
        def make(inner: Any, made: Any, *args: Any, **options: Any) -> Any:
            into.append(weakref.ref(made))
            return inner(made, *args, **options)

        return make

    def _row(self, row: dict[str, Any]) -> None:
        """Follow the record: losses, and the ends of steps of its first optimizer."""
        if row["kind"] in ("backward", "plain_backward"):
            self._write(Row.LOSS, loss=_number(row["loss"]))
        elif row["kind"] == "step" and row["optimizer"] == 0 and self._is_started:
            self._write(Row.STEP)
            self._step += 1
            self._is_started = False

    def _forward(self, inner: Any, module: nn.Module, *args: Any, **options: Any) -> Any:
        if self._depth or self._is_inside or not self._trains(module):
            return inner(module, *args, **options)
        if not any(module is each for each in self._models):
            self._models.append(module)
        self._is_inside = True
        try:
            if self._has_saved:
                self._write(Row.STOP)
                os._exit(0)
            if not self._is_started:
                self._is_started, self._first = True, module
                with torch.no_grad():
                    self._write(Row.START, state=self._state())
            if module is self._first:  # others get what it returns
                self._write(Row.BATCH, batch=_digest_of((args, options)))
        finally:
            self._is_inside = False
        self._depth += 1
        try:
            return inner(module, *args, **options)
        finally:
            self._depth -= 1

    def _trains(self, module: nn.Module) -> bool:
        """Return whether a call of a module may be part of a step: not an evaluation, nor a loss without weights."""
        if not torch.is_grad_enabled() or os.getpid() != self._process:
            return False
        if module.training:
            self._has_trained = True
        elif self._has_trained:  # a script may train a model that it has put into the mode for evaluation
            return False
        return next(module.parameters(), None) is not None

    # What is saved and loaded.

    def _save(self, inner: Any, value: Any, file: Any, *args: Any, **options: Any) -> Any:
        place = user_location()
        result = inner(value, file, *args, **options)
        name = getattr(file, "name", file)
        if not isinstance(name, (str, os.PathLike)):  # a buffer: the script may write it anywhere
            return result
        self._write(
            Row.SAVE, path=os.path.abspath(os.fspath(name)), line=_place(place), holds=sorted(set(_parts(value)))
        )
        if self._stop_at is not None and self._step >= self._stop_at:
            self._has_saved = True
        return result

    def _move(self, inner: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
        before = os.path.abspath(os.fsdecode(source))
        result = inner(source, target, *args, **options)
        self._write(Row.MOVE, path=before, to=os.path.abspath(os.fsdecode(target)))
        return result

    def _load(self, inner: Any, file: Any, *args: Any, **options: Any) -> Any:
        result = inner(file, *args, **options)
        name = getattr(file, "name", file)
        if isinstance(name, (str, os.PathLike)):
            self._write(Row.LOAD, path=os.path.abspath(os.fspath(name)), line=_place(user_location()))
        return result

    def _restore(self, inner: Any, owner: Any, *args: Any, **options: Any) -> Any:
        kinds = ((nn.Module, "model"), (torch.optim.Optimizer, "optimizer"), (torch.amp.GradScaler, "scaler"))
        what = next((name for kind, name in kinds if isinstance(owner, kind)), "scheduler")
        self._write(Row.RESTORE, what=what, line=_place(user_location()))
        return inner(owner, *args, **options)

    def _set_generator(self, inner: Any, *args: Any, **options: Any) -> Any:
        self._write(Row.RESTORE, what="generator", line=_place(user_location()))
        return inner(*args, **options)

    # What a step starts from.

    def _state(self) -> dict[str, Any]:
        names: dict[int, str] = {}
        weights: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for number, model in enumerate(self._models):
            head = f"{number + 1}." if number else ""
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), head + name)
                weights[head + name] = _digests(parameter)
            for name, buffer in model.named_buffers():
                buffers[head + name] = _digests(buffer)
        masters: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        rates: list[float] = []
        for number, optimizer in enumerate(self._living(self._optimizers)):
            head = f"{number + 1}." if number else ""
            rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
            given = [each for group in optimizer.param_groups for each in group["params"]]
            trained = [name for name in weights if not name[:1].isdigit()] if number == 0 else []
            for index, parameter in enumerate(given):
                name = names.get(id(parameter), "")
                if not name:
                    name = trained[index] if len(trained) == len(given) else f"parameter {index + 1}"
                    masters[head + name] = _digests(parameter)
                state = optimizer.state.get(parameter, {})
                moments[head + name] = {
                    key: _digests(value) for key, value in state.items() if isinstance(value, (Tensor, int, float))
                }
        return {
            "weights": weights,
            "buffers": buffers,
            "masters": masters,
            "moments": moments,
            "scales": [*self._scales()],
            "rates": rates,
            "generators": _generators(),
        }

    def _living(self, found: list[weakref.ref[Any]]) -> list[Any]:
        return [one for each in found if (one := each()) is not None]

    def _scales(self) -> Iterator[list[float]]:
        """Yield each loss scale, and for how many steps there was no overflow."""
        for scaler in self._living(self._scalers):
            if scaler.is_enabled():
                yield [float(scaler.get_scale()), float(scaler._get_growth_tracker())]
        amp = sys.modules.get("ampcompare.apex.amp") or sys.modules.get("apex.amp")
        for scaler in getattr(getattr(amp, "_amp_state", None), "loss_scalers", ()):
            yield [float(scaler.loss_scale()), float(scaler._unskipped)]


def _number(loss: Any) -> float | None:
    loss = loss() if callable(loss) else loss
    return None if loss is None else float(loss)


def _place(location: Any) -> str:
    return f"{os.path.basename(location.file)}:{location.line}"


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return flat.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _digests(value: Any) -> dict[str, str]:
    """Return digests of a tensor's values in fp32, or its integers, and as roundings to 16 bits would leave them."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if not tensor.is_floating_point():
        return {"values": _hash([_bytes(tensor)])}
    wide = tensor.detach().float()
    rounded = {str(half).removeprefix("torch."): wide.to(half).float() for half in (torch.float16, torch.bfloat16)}
    found = {"values": _hash([_bytes(wide)]), **{name: _hash([_bytes(each)]) for name, each in rounded.items()}}
    if not bool(wide.count_nonzero()):
        found["zero"] = "yes"
    return found


def _digest_of(values: Any) -> str:
    """Return a digest of all tensors in the arguments of a call that nothing has computed from weights."""
    return _hash(_bytes(one) for one in _tensors(values, DEPTH))


def _tensors(values: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        if not values.requires_grad:
            yield values
    elif depth and isinstance(values, dict):
        for key in values:
            yield from _tensors(values[key], depth - 1)
    elif depth and isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value, depth - 1)


def _parts(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """Yield what a saved object holds, as far as its form tells: the state of an optimizer, a scaler, a generator."""
    if isinstance(value, dict):
        keys = set(value)
        if {"state", "param_groups"} <= keys:
            yield "optimizer"
            return
        if {"scale", "growth_factor"} <= keys or any(str(key).startswith("loss_scaler") for key in keys):
            yield "scaler"
            return
        if "last_epoch" in keys or "_last_lr" in keys:
            yield "scheduler"
            return
        if value and all(isinstance(one, Tensor) for one in value.values()):
            yield "model"
        for one in value.values() if depth else ():
            yield from _parts(one, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for one in value:
            yield from _parts(one, depth - 1)
    elif isinstance(value, Tensor) and value.dtype is torch.uint8 and value.dim() == 1:
        yield "generator"


def _generators() -> dict[str, str]:
    return {
        "torch": _hash([_bytes(torch.get_rng_state())]),
        "numpy": _hash([str(np.random.get_state()[1:3]).encode(), np.random.get_state()[1].tobytes()]),  # type: ignore[index]
        "random": _hash([repr(random.getstate()).encode()]),
    }
