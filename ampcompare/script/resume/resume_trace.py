"""Write what each step of a script starts from and computes, and what the script saves and loads.

A step starts at its first forward pass that can be differentiated. What is written there is all that a checkpoint has
to restore, as digests: values in fp32, and these values rounded to each 16-bit type, so that a rounding is known later.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.base.import_hook import ImportHook
from ampcompare.base.live_objects import live_objects_of
from ampcompare.base.location import is_installed_file, is_users_or_installed_file
from ampcompare.base.patches import Layer, PatchPoints, Subscriptions
from ampcompare.base.tensors.products import HALF_DTYPES
from ampcompare.script.imports.adapter_imports import adapter_keeps_own_functions, call_with_each_adapter
from ampcompare.script.resume.killed_saves import FileChangeReporter, SaveKiller
from ampcompare.script.resume.saved_files import DEPTH, SavedFilesWatch, script_location_text
from ampcompare.settings.resume_trace import TraceRowKind

if TYPE_CHECKING:
    from ampcompare.script.recording.recorder import Recorder

MAX_SAMPLES = 64  # of a batch that are looked at one by one
SEARCHES = 2  # steps before which objects of the script are searched for: it may make some behind the first
# in a key of an optimizer's state: that of an fp32 copy of a 16-bit weight
OF_MASTERS = ("master", "fp32", "float32")


class ResumeTraceRecorder:
    """Watches the script of this process and writes rows of the kinds of `TraceRowKind` to a file, each at once.

    Args:
        path: of the file.
        ends_with: the number of the optimizer in the record whose step ends a step: that behind which the script saves.
        stop_at: ends the process as a kill would, at the first step after a file was saved at or behind this step;
            None lets the script run to its end.
        first_only: ends it behind its first step.
        kill: kills copies of the process while they save behind a step: that `step`, how many `points`, and the
            `folder` for what they leave; the process ends then.
        trainers: called with `note` and the events before the script begins, to start trainers again.
    """

    def __init__(
        self,
        path: str,
        stop_at: int | None,
        *,
        ends_with: int = 0,
        first_only: bool = False,
        kill: dict[str, Any] | None = None,
        trainers: Callable[[Callable[..., None], Subscriptions], None] | None = None,
    ) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        self._process = os.getpid()
        self._stop_at, self._ends_with = stop_at, ends_with
        self._counts: dict[int, int] = {}  # of steps of each optimizer
        self._behind: int | None = None  # the optimizer that made the last one
        self._stepping: weakref.ref[Any] | None = None  # the optimizer whose step is running, or was the last
        self._first_only = first_only
        self._kill = kill
        self._trainers = trainers
        self._changes: FileChangeReporter | None = None  # in a copy that is to be killed
        self._files = SavedFilesWatch(self._write_row_of_file, self._report_file_before_save)
        self._step = 0  # steps that have ended
        self._is_started = self._is_inside = self._has_saved = self._has_trained = False
        self._first: nn.Module | None = None  # that the step has called
        self._depth = 0
        self._owners: list[Any] = []  # objects of the script's own classes
        self._models: list[nn.Module] = []
        self._called: list[nn.Module] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._adapter: Any = None  # the module in the place of Apex, where the script takes it

    def install(self, recorder: Recorder) -> None:
        """Watch until the process ends."""
        recorder.call_after_each_row(self._trace_losses_and_steps_of_row)
        events = Subscriptions(Layer.WATCH)
        events.wrap(*PatchPoints.FORWARD, self._trace_forward_call)
        events.wrap(*PatchPoints.MAKE_OPTIMIZER, self._make_wrapper_listing_objects(self._optimizers))
        events.wrap(*PatchPoints.MAKE_SCALER, self._make_wrapper_listing_objects(self._scalers))
        events.call_at_end(register_optimizer_step_pre_hook(self._before_optimizer_step).remove)
        self._files.install(events)
        for kind in (
            nn.Module,
            torch.optim.Optimizer,
            torch.amp.GradScaler,
            *_lr_scheduler_classes_with_load(),
        ):
            events.wrap(kind, "load_state_dict", self._note_restored_object)
        events.wrap(torch, "set_rng_state", self._note_restored_generator)
        # the second is NVIDIA's, or an alias, which is not followed
        names = ("ampcompare.apex.amp", "apex.amp")
        imports = ImportHook(
            {name: functools.partial(self._follow_amp_restores, events, name) for name in names}
        )
        imports.begin()
        events.call_at_end(imports.end)
        call_with_each_adapter(functools.partial(self._follow_adapter_unless_arm_answers, events), events)
        if self._trainers is not None:
            self._trainers(self._write_trace_row, events)

    def _follow_adapter_unless_arm_answers(self, events: Subscriptions, adapter: Any) -> None:
        """Watch the adapter that `migrate` writes, whose scales are those of the script, unless an arm's are."""
        if adapter_keeps_own_functions(adapter):
            self._adapter = adapter
            events.wrap(adapter, "load_state_dict", self._note_restored_scales)

    def _follow_amp_restores(self, events: Subscriptions, name: str) -> None:
        events.wrap(sys.modules[name], "load_state_dict", self._note_restored_scales)

    def _note_restored_scales(self, inner: Any, *args: Any, **options: Any) -> Any:
        self._write_trace_row(TraceRowKind.RESTORE, what="scaler", number=None, line=script_location_text())
        return inner(*args, **options)

    def _write_trace_row(self, kind: str, **values: Any) -> None:
        if os.getpid() == self._process:  # workers of a data loader are forks
            line = json.dumps({"kind": kind, "step": self._step, **values}) + "\n"
            os.write(self._file, line.encode("utf-8"))

    def _make_wrapper_listing_objects(self, into: list[weakref.ref[Any]]) -> Callable[..., Any]:
        def make(inner: Any, made: Any, *args: Any, **options: Any) -> Any:
            into.append(weakref.ref(made))
            return inner(made, *args, **options)

        return make

    def _before_optimizer_step(self, optimizer: Any, *_arguments: Any) -> None:
        self._stepping = weakref.ref(optimizer)

    def _trace_losses_and_steps_of_row(self, row: dict[str, Any]) -> None:
        """Follow the record: losses, and steps of its optimizers."""
        if row["kind"] in ("backward", "plain_backward"):
            self._write_trace_row(TraceRowKind.LOSS, loss=_loss_as_float(row["loss"]))
        elif row["kind"] == "step":
            self._behind = int(row["optimizer"])
            self._counts[self._behind] = self._counts.get(self._behind, 0) + 1
            if self._behind != self._ends_with or not self._is_started:
                return
            self._write_trace_row(TraceRowKind.STEP)
            self._step += 1
            self._is_started = False
            if self._first_only:
                os._exit(0)
            if self._kill is not None and self._step == self._kill["step"] and self._changes is None:
                self._fork_copies_to_kill(self._kill)

    def _fork_copies_to_kill(self, kill: dict[str, Any]) -> None:
        """Let copies of this process save and die, and end it; return in a copy."""
        if torch.cuda.is_initialized():
            raise UnsupportedCombination(
                "a process that uses a GPU cannot be copied: --fault kill needs --device cpu"
            )
        folder = os.path.dirname(os.path.abspath(kill["folder"]))
        kills = SaveKiller(kill["points"], Path(kill["folder"]), [folder])
        if not kills.kill_copies(
            self._follow_changes_in_copy, lambda found: self._write_trace_row(TraceRowKind.KILLED, **found)
        ):
            os._exit(0)

    def _follow_changes_in_copy(self, changes: FileChangeReporter) -> None:
        self._changes = changes

    def _trace_forward_call(self, inner: Any, module: nn.Module, *args: Any, **options: Any) -> Any:
        if self._changes is not None and torch.is_grad_enabled() and module.training:
            os._exit(0)  # it has saved, and was not killed
        if self._depth or self._is_inside or not self._is_training_call(module):
            return inner(module, *args, **options)
        if not any(module is each for each in self._called):
            self._called.append(module)
            # Parts of a model that is known already, as of one whose parts alone are called, are no other models.
            known = {id(each) for model in self._models for each in model.parameters()}
            if any(id(each) not in known for each in module.parameters()):
                self._models.append(module)
        self._is_inside = True
        try:
            if self._has_saved and self._files.have_other_threads_saved():
                self._write_trace_row(TraceRowKind.STOP)
                os._exit(0)
            if not self._is_started:
                self._is_started, self._first = True, module
                if self._step < SEARCHES:
                    # an optimizer and its schedule hold each other, also when they were replaced
                    gc.collect()
                    self._owners = _objects_of_script_classes_but_models()
                    self._add_uncalled_models()
                with torch.no_grad():
                    self._write_trace_row(
                        TraceRowKind.START,
                        state=self._state_digests_at_step(),
                        made=self._numbers_of_living_objects(),
                    )
            if module is self._first:  # others get what it returns
                given = list(_tensors_without_grad_fn((args, options), DEPTH))
                self._write_trace_row(
                    TraceRowKind.BATCH,
                    batch=_hex_hash_of_chunks(map(_bytes_of_tensor, given)),
                    samples=_digests_of_first_samples(given),
                )
        finally:
            self._is_inside = False
        self._depth += 1
        try:
            return inner(module, *args, **options)
        finally:
            self._depth -= 1

    def _is_training_call(self, module: nn.Module) -> bool:
        """Return whether a call of a module may be part of a step: not an evaluation, nor a loss without weights."""
        if not torch.is_grad_enabled() or os.getpid() != self._process:
            return False
        if module.training:
            self._has_trained = True
        elif self._has_trained:  # a script may train a model that it has put into the mode for evaluation
            return False
        return next(module.parameters(), None) is not None

    # What is saved and loaded.

    def _write_row_of_file(self, kind: str, **values: Any) -> None:
        """Note a row about a file, and whether the process may be stopped now."""
        if kind == TraceRowKind.SAVE:
            made = None if self._stepping is None else self._stepping()
            number = next(
                (at for at, each in enumerate(self._living_objects(self._optimizers)) if each is made),
                self._behind,
            )
            values.update(behind=self._behind, number=number, counts=self._counts)
        self._write_trace_row(kind, **values)
        if kind == TraceRowKind.SAVE and self._stop_at is not None and self._step >= self._stop_at:
            self._has_saved = True

    def _report_file_before_save(self, path: str) -> None:
        if self._changes is not None:
            self._changes.report_write_to_parent(path)

    def _note_restored_object(self, inner: Any, owner: Any, *args: Any, **options: Any) -> Any:
        kinds = ((nn.Module, "model"), (torch.optim.Optimizer, "optimizer"), (torch.amp.GradScaler, "scaler"))
        what = next((name for kind, name in kinds if isinstance(owner, kind)), "scheduler")
        made = {"optimizer": self._optimizers, "scaler": self._scalers}.get(what, [])
        number = next((at for at, each in enumerate(made) if each() is owner), None)
        self._write_trace_row(TraceRowKind.RESTORE, what=what, number=number, line=script_location_text())
        return inner(owner, *args, **options)

    def _note_restored_generator(self, inner: Any, *args: Any, **options: Any) -> Any:
        self._write_trace_row(TraceRowKind.RESTORE, what="generator", line=script_location_text())
        return inner(*args, **options)

    # What a step starts from.

    def _state_digests_at_step(self) -> dict[str, Any]:
        names: dict[int, str] = {}
        weights: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for number, model in enumerate(self._models):
            tail = f" of model {number + 1}" if number else ""
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), name + tail)
                weights[name + tail] = _digests_of_tensor_and_roundings(parameter)
            for name, buffer in model.named_buffers():
                buffers[name + tail] = _digests_of_tensor_and_roundings(buffer)
        masters, moments = self._digests_of_masters_and_moments(names)
        groups = [optimizer.param_groups for optimizer in self._living_objects(self._optimizers)]
        owned = {id(each) for each in self._parameters_of_optimizers()}
        return {
            "weights": weights,
            "buffers": buffers,
            "masters": masters,
            "moments": moments,
            "averages": _digests_of_averages(self._models, owned, self._owners),
            "together": [
                _hex_hash_of_chunks(_bytes_of_tensor(each.detach().float()) for each in one.parameters())
                for one in self._models
            ],
            "scales": [*self._loss_scales_with_counts()],
            "rates": [float(group["lr"]) for each in groups for group in each if "lr" in group],
            "options": [[_group_options_without_rate(group) for group in each] for each in groups],
            "generators": _digests_of_generators(),
        }

    def _digests_of_masters_and_moments(self, names: dict[int, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return digests of masters and of moments by the names of their parameters.

        Args:
            names: of the weights of models, by their identity.
        """
        trained = [each for model in self._models[:1] for each in model.parameters()]
        masters: dict[str, Any] = {}
        moments: dict[str, Any] = {}
        for number, optimizer in enumerate(self._living_objects(self._optimizers)):
            tail = f" of optimizer {number + 1}" if number else ""
            given = [each for group in optimizer.param_groups for each in group["params"]]
            are_copies = number == 0 and [each.shape for each in given] == [each.shape for each in trained]
            of_adapter = _masters_of_adapter(optimizer, self._adapter)
            for index, parameter in enumerate(given):
                name = names.get(id(parameter), "")
                if not name:
                    half, values = of_adapter.get(
                        id(parameter), (trained[index] if are_copies else None, parameter)
                    )
                    name = names.get(id(half), f"parameter {index + 1}")
                    masters[name + tail] = _digests_of_tensor_and_roundings(values)
                state = _digests_of_parameter_state(optimizer.state.get(parameter, {}))
                for key in filter(_is_key_of_master, [*state]):
                    masters[name + tail] = state.pop(key)
                moments[name + tail] = state
        return masters, moments

    def _parameters_of_optimizers(self) -> list[Tensor]:
        """Return the parameters of all optimizers."""
        return [
            each
            for one in self._living_objects(self._optimizers)
            for group in one.param_groups
            for each in group["params"]
        ]

    def _add_uncalled_models(self) -> None:
        """Add models that the step has not called yet: those with parameters of an optimizer."""
        given = self._parameters_of_optimizers()
        known = {id(each) for model in self._models for each in model.parameters()}
        left = {id(each) for each in given} - known
        if not left:
            return
        owners: dict[int, tuple[int, nn.Module]] = {}
        for module in live_objects_of(nn.Module):
            inside = {id(each) for each in module.parameters()} & left
            size = sum(1 for _ in module.modules())
            owners.update(
                {each: (size, module) for each in inside if size > owners.get(each, (0, module))[0]}
            )
        for parameter in given:
            if id(parameter) in owners and not any(owners[id(parameter)][1] is each for each in self._models):
                self._models.append(owners[id(parameter)][1])

    def _living_objects(self, found: list[weakref.ref[Any]]) -> list[Any]:
        return [one for each in found if (one := each()) is not None]

    def _numbers_of_living_objects(self) -> dict[str, list[int]]:
        """Return which of the optimizers and the enabled scalers are left, in the order in which they were made."""
        optimizers, scalers = [each() for each in self._optimizers], [each() for each in self._scalers]
        return {
            "optimizer": [at for at, one in enumerate(optimizers) if one is not None],
            "scaler": [at for at, one in enumerate(scalers) if one is not None and one.is_enabled()],
        }

    def _loss_scales_with_counts(self) -> Iterator[list[float]]:
        """Yield each loss scale, and for how many steps there was no overflow."""
        for scaler in self._living_objects(self._scalers):
            if scaler.is_enabled():
                yield [float(scaler.get_scale()), float(scaler._get_growth_tracker())]
        amp = self._adapter or sys.modules.get("ampcompare.apex.amp") or sys.modules.get("apex.amp")
        for scaler in getattr(getattr(amp, "_amp_state", None), "loss_scalers", ()):
            yield [float(scaler.loss_scale()), float(scaler._unskipped)]


def _loss_as_float(loss: Any) -> float | None:
    loss = loss() if callable(loss) else loss
    return None if loss is None else float(loss)


def _bytes_of_tensor(tensor: Tensor) -> bytes:
    flat = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return flat.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _hex_hash_of_chunks(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _digests_of_tensor_and_roundings(value: Any) -> dict[str, str]:
    """Return digests of a tensor's values in fp32, or its integers, and as roundings to 16 bits would leave them."""
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if not tensor.is_floating_point():
        return {"values": _hex_hash_of_chunks([_bytes_of_tensor(tensor)])}
    wide = tensor.detach().float()
    rounded = {str(half).removeprefix("torch."): wide.to(half).float() for half in HALF_DTYPES}
    found = {
        "values": _hex_hash_of_chunks([_bytes_of_tensor(wide)]),
        **{name: _hex_hash_of_chunks([_bytes_of_tensor(each)]) for name, each in rounded.items()},
    }
    if tensor.dtype is not torch.float32:
        found["dtype"] = str(tensor.dtype).removeprefix("torch.")
    if not bool(wide.count_nonzero()):
        found["zero"] = "yes"
    return found


def _digests_of_parameter_state(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return digests of the numbers and tensors in the state of a parameter."""
    return {
        key: _digests_of_tensor_and_roundings(value)
        for key, value in state.items()
        if isinstance(value, (Tensor, int, float))
    }


def _masters_of_adapter(optimizer: Any, adapter: Any) -> dict[int, tuple[Tensor, Tensor]]:
    """Return the 16-bit weight of each master of the adapter, and the values that it steps, by its identity.

    Where a model has loaded weights, the adapter takes the master from the weight before the next step.

    Args:
        adapter: its module.
    """
    stash = getattr(optimizer, "_adapter_stash", None)
    if stash is None:
        return {}
    has_loaded = stash.loads != adapter._state.loads
    masters = zip(stash.all_fp32_from_fp16_params, stash.all_fp16_params, stash.versions, strict=True)
    found = {}
    for master, half, version in masters:
        is_replaced = has_loaded and half._version != version
        found[id(master)] = half, half.detach().float() if is_replaced else master
    return found


def _is_key_of_master(key: Any) -> bool:
    return isinstance(key, str) and any(part in key for part in OF_MASTERS)


def _group_options_without_rate(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters but its learning rate, as JSON holds them."""
    plain = {name: _as_json_value(value) for name, value in group.items() if name not in ("params", "lr")}
    return {name: value for name, value in plain.items() if value is not ...}


def _as_json_value(value: Any) -> Any:
    """Return a number, text or sequence as JSON holds it; the Ellipsis for what it does not hold."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else ...
    if isinstance(value, (list, tuple)):
        parts = [_as_json_value(each) for each in value]
        return ... if ... in parts else parts
    return value if value is None or isinstance(value, (bool, int, float, str)) else ...


def _digests_of_averages(models: list[nn.Module], owned: set[int], owners: list[Any]) -> dict[str, Any]:
    """Return digests of what the script holds as a copy of all weights of a model: a moving average, say, by its name.

    Looked at are variables of the script's own files, and the attributes of objects of its own classes, also where a
    trainer alone has them.
    """
    found: dict[str, Any] = {}
    parts = {id(part) for model in models for part in model.modules()}
    places = {parameter.data_ptr() for model in models for parameter in model.parameters()}
    of_models = [Counter(tuple(each.shape) for each in model.parameters()) for model in models]
    for name, value in itertools.chain(
        _variables_and_attributes_of_script(), _attributes_by_class_name(owners)
    ):
        tensors = [] if id(value) in parts else _parameters_or_items(value)
        if not tensors or not all(issubclass(type(each), Tensor) for each in tensors):
            continue
        own = [each for each in tensors if each.is_floating_point() and id(each) not in owned]
        own = [each for each in own if each.data_ptr() not in places]
        left = Counter(tuple(each.shape) for each in own)
        if any(shapes and shapes <= left for shapes in of_models):
            found[name] = {
                "values": _hex_hash_of_chunks(_bytes_of_tensor(each.detach().float()) for each in own)
            }
    return found


def _parameters_or_items(value: Any) -> list[Any]:
    """Return the parameters of a module, or what is in a container; nothing of the object's own code runs.

    Lazy mappings of libraries import what they hold when they are asked, and lazy objects do when their class is.
    """
    kind = type(value)
    if issubclass(kind, nn.Module):
        return list(value.parameters())
    if issubclass(kind, dict):
        return list(dict.values(value))
    if issubclass(kind, list):
        return list(list.__iter__(value))
    return list(tuple.__iter__(value)) if issubclass(kind, tuple) else []


def _variables_and_attributes_of_script() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions of the script that run, its globals, and attributes of its own objects."""
    spaces: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_or_installed_file(file) and not is_installed_file(file):
            spaces.append(frame.f_locals)
        frame = frame.f_back
    spaces.append(vars(sys.modules["__main__"]))
    seen: set[int] = set()
    for space in spaces:
        for name, value in list(space.items()):
            if id(value) in seen or name.startswith("__"):
                continue
            seen.add(id(value))
            yield name, value
            if (
                not issubclass(type(value), (type, nn.Module))
                and _is_class_of_script(type(value))
                and hasattr(value, "__dict__")
            ):
                yield from ((f"{name}.{key}", each) for key, each in list(vars(value).items()))


def _is_class_of_script(kind: type) -> bool:
    """Return whether a class is one of the script's own files."""
    file: str = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    # functions and modules are of no file
    return bool(file) and is_users_or_installed_file(file) and not is_installed_file(file)


def _objects_of_script_classes_but_models() -> list[Any]:
    """Return all objects of the script's own classes, but models: a callback that only a trainer has, say."""
    kinds: dict[type, bool] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in kinds:
            kinds[kind] = (
                not issubclass(kind, (type, nn.Module))
                and hasattr(kind, "__dict__")
                and _is_class_of_script(kind)
            )
        if kinds[kind] and hasattr(each, "__dict__"):
            found.append(each)
    return found


def _attributes_by_class_name(owners: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield attributes of objects, by the name of the class, and a number for a second object of it."""
    count: Counter[str] = Counter()
    for owner in owners:
        kind = type(owner).__name__
        count[kind] += 1
        head = kind if count[kind] == 1 else f"{kind} {count[kind]}"
        yield from ((f"{head}.{key}", each) for key, each in list(vars(owner).items()))


def _lr_scheduler_classes_with_load() -> list[Any]:
    """Return the classes of schedules with a `load_state_dict` of their own."""
    kinds: list[Any] = [torch.optim.lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    return [kind for kind in kinds if "load_state_dict" in vars(kind)]


def _digests_of_first_samples(tensors: list[Tensor]) -> list[str]:
    """Return digests of the first samples of a batch: of the parts of its first tensor along the first dimension."""
    batch = next((each for each in tensors if each.dim() and not each.is_sparse), None)
    return (
        []
        if batch is None
        else [_hex_hash_of_chunks([_bytes_of_tensor(each)]) for each in batch[:MAX_SAMPLES]]
    )


def _tensors_without_grad_fn(values: Any, depth: int) -> Iterator[Tensor]:
    """Yield all tensors in the arguments of a call that nothing has computed from weights."""
    if isinstance(values, Tensor):
        if not values.requires_grad:
            yield values
    elif depth and isinstance(values, dict):
        for key in values:
            yield from _tensors_without_grad_fn(values[key], depth - 1)
    elif depth and isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_without_grad_fn(value, depth - 1)


def _digests_of_generators() -> dict[str, str]:
    numpy_state: Any = np.random.get_state()
    return {
        "torch": _hex_hash_of_chunks([_bytes_of_tensor(torch.get_rng_state())]),
        "numpy": _hex_hash_of_chunks([str(numpy_state[1:3]).encode(), numpy_state[1].tobytes()]),
        "random": _hex_hash_of_chunks([repr(random.getstate()).encode()]),
    }
