"""What the record of a script's cell holds besides its losses and steps, and the end of a cell after some steps.

Scalars are those that the script logs to TensorBoard, Weights & Biases or MLflow; where such a library is not
installed, the script gets a stand-in that does nothing else.
"""

from __future__ import annotations

import functools
import importlib.util
import numbers
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import distributed

from ampcompare.base.metric_log import listen, log_metric
from ampcompare.base.patches import Layer, Points, Subscriptions
from ampcompare.guards.import_hook import ImportHook
from ampcompare.script.planned_steps import planned_steps
from ampcompare.script.recording.recorder import Recorder
from ampcompare.training.hashes import inputs_sha256, parameters_sha256
from ampcompare.training.meters import MemoryMeter, make_memory_meter
from ampcompare.training.precision.base import owned_params

__all__ = [
    "EnoughSteps",
    "FirstBatches",
    "Watch",
    "catch_scalars",
    "seed_all",
]

MAX_BATCHES = 3

WRITERS = ("torch.utils.tensorboard", "tensorboardX")
LIBRARIES = (*WRITERS, "wandb", "mlflow")


def seed_all(seed: int) -> None:
    """Seed Python, NumPy if it is installed, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed % 2**32)


class _Stepped:
    """The parameters of an optimizer, as of a model."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def parameters(self) -> list[Any]:
        """Return the present parameters."""
        return owned_params(self._optimizer)


class FirstBatches:
    """Hashes what the script passes to the first module that it calls, at the start and after each backward pass.

    Steps would not do: a step that an arm skips or records late begins no batch of its own.

    Args:
        found: called with the hashes when there are enough.
    """

    def __init__(self, found: Callable[[list[str]], None]) -> None:
        self.hashes: list[str] = []
        self._found = found
        self._awaited = True
        self._events = Subscriptions(Layer.RECORD)  # around an arm, which may cast what a module gets
        self._events.wrap(*Points.FORWARD, self._call)
        self._events.wrap(*Points.BACKWARD, self._backward)

    def end(self) -> None:
        """Report what was found, if that was not done yet."""
        if self._events.active:
            self._events.end()
            self._found(self.hashes)

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._awaited = True
        return result

    def _call(self, original: Any, module: Any, *inputs: Any, **named: Any) -> Any:
        # Inside of vmap or torch.func.grad tensors have no data that could be read.
        if self._awaited and torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            self._hash(inputs or named)
        return original(module, *inputs, **named)

    def _hash(self, inputs: Any) -> None:
        digest = inputs_sha256(inputs)
        if digest is None:
            return
        self._awaited = False
        self.hashes.append(digest)
        if len(self.hashes) == MAX_BATCHES:
            self.end()


class EnoughSteps(SystemExit):
    """Ends a script after as many steps as were asked for; its exit code is 0."""


class Watch:
    """Adds to a record: first weights and batches, scalars, peak memory.

    Args:
        max_steps: steps of its first optimizer after which the script ends.
        half: how 16-bit types are computed.
    """

    def __init__(self, recorder: Recorder, max_steps: int | None = None, half: str | None = None) -> None:
        self._half = half
        self._recorder = recorder
        self._max_steps = max_steps
        self._has_raised = False
        self._steps: dict[int, int] = {}
        self._memory: MemoryMeter | None = None
        self._batches = FirstBatches(lambda hashes: recorder.add_row({"kind": "batches", "sha256": hashes}))
        self._ends: list[Callable[[], None]] = [listen(self._metric), catch_scalars(), _before_exit(recorder)]
        recorder.after_row(self._row)
        recorder.before_close(self.end)

    def weights(self, models: list[Any], optimizers: list[Any]) -> None:
        """Record the weights as the script has made them, before an arm casts them."""
        held = [model for model in models if hasattr(model, "parameters")] or [_Stepped(one) for one in optimizers]
        names = [type(one).__name__ for one in optimizers]
        self._recorder.add_row({"kind": "weights", "sha256": parameters_sha256(held), "optimizers": names})
        if self._memory is None:
            device = next((param.device for model in held for param in model.parameters()), torch.device("cpu"))
            self._recorder.add_row({"kind": "setup", "half": self._half, "device": _device_facts(device)})
            self._memory = make_memory_meter(device)

    def end(self) -> None:
        """Record what is known at the end, once."""
        if not self._ends:
            return
        self._max_steps = None
        for end in self._ends:
            end()
        self._ends.clear()
        self._batches.end()
        if self._memory is not None:
            peak = self._memory.peak()
            self._recorder.add_row({"kind": "memory", "peak_bytes": peak.used, "peak_reserved_bytes": peak.reserved})

    def _metric(self, name: str, value: float, source: str) -> None:
        self._recorder.add_row({"kind": "metric", "name": name, "value": value, "source": source})

    def _row(self, row: dict[str, Any]) -> None:
        if row["kind"] != "step":
            return
        if not self._steps and distributed.is_available() and distributed.is_initialized():
            self._recorder.add_row(
                {"kind": "rank", "rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            )
        if self._max_steps is None:
            return
        if not self._steps:
            self._recorder.add_row({"kind": "planned", "steps": planned_steps()})
            self._recorder.flush()
        self._steps[row["optimizer"]] = self._steps.get(row["optimizer"], 0) + 1
        if self._has_raised:  # the script catches everything, and goes on
            sys.stdout.flush()
            os._exit(0)
        if self._steps[min(self._steps)] >= self._max_steps:
            self._has_raised = True
            raise EnoughSteps(0)


def _before_exit(recorder: Recorder) -> Callable[[], None]:
    """Close the record also where a script ends by `os._exit`; return a function that ends this."""
    leave = os._exit

    def close_and_leave(status: int) -> NoReturn:
        recorder.close(status, None)  # in a forked child it has nothing to close
        leave(status)

    os._exit = close_and_leave

    def end() -> None:
        os._exit = leave

    return end


def _device_facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": str(device), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        names = {"device_name": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
        facts |= {**names, "cuda": torch.version.cuda}
    return facts


def catch_scalars() -> Callable[[], None]:
    """Log what scripts of this process write from now on; return a function that ends it."""
    events = Subscriptions(Layer.RECORD)
    absent = _Absent(events, {name for name in LIBRARIES if not _is_installed(name)})
    sys.meta_path.insert(0, absent)
    watch = functools.partial(_watch, events)
    hook = ImportHook({name: functools.partial(watch, name) for name in LIBRARIES if name not in absent.names})
    hook.begin()

    def end() -> None:
        hook.end()
        sys.meta_path.remove(absent)
        events.end()

    return end


def _watch(events: Subscriptions, name: str) -> None:
    module: Any = sys.modules[name]
    if name in WRITERS:
        events.wrap(module.SummaryWriter, "add_scalar", _before(_add_scalar))
    elif name == "wandb":
        events.wrap(module, "log", _before(_wandb_log))
        run = getattr(getattr(module, "wandb_run", None), "Run", None) or getattr(module, "Run", None)
        if run is not None:  # `run = wandb.init()`, `run.log(...)`
            events.wrap(run, "log", _before(lambda _run, *args, **kwargs: _wandb_log(*args, **kwargs)))
    else:
        events.wrap(module, "log_metric", _before(_mlflow_metric))
        events.wrap(module, "log_metrics", _before(_mlflow_metrics))


def _before(log: Callable[..., None]) -> Callable[..., Any]:
    def logged(original: Any, *args: Any, **kwargs: Any) -> Any:
        log(*args, **kwargs)
        return original(*args, **kwargs)

    return logged


def _add_scalar(_writer: Any, tag: str = "", scalar_value: Any = None, *_args: Any, **_kwargs: Any) -> None:
    _log({tag: scalar_value}, "SummaryWriter.add_scalar")


def _wandb_log(data: Any = None, *_args: Any, **_kwargs: Any) -> None:
    _log(data, "wandb.log")


def _mlflow_metric(key: str = "", value: Any = None, *_args: Any, **_kwargs: Any) -> None:
    _log({key: value}, "mlflow.log_metric")


def _mlflow_metrics(metrics: Any = None, *_args: Any, **_kwargs: Any) -> None:
    _log(metrics, "mlflow.log_metric")


def _log(values: Any, source: str, prefix: str = "") -> None:
    """Log the numbers of a mapping, and those of mappings in it as `outer/inner`."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            _log(value, source, f"{prefix}{name}/")
        elif isinstance(value, numbers.Real) or getattr(value, "shape", None) in ((), (1,)):
            detached = value.detach() if hasattr(value, "detach") else value  # torch warns of one that needs gradients
            log_metric(f"{prefix}{name}", float(detached), source=source)


def _is_installed(name: str) -> bool:
    package = "tensorboard" if name == "torch.utils.tensorboard" else name
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of results has none


class _Absent(MetaPathFinder, Loader):
    """Provides libraries that are not installed."""

    def __init__(self, events: Subscriptions, names: set[str]) -> None:
        self._events = events
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__dict__["__getattr__"] = _nothing_for
        if name in WRITERS:
            module.__dict__["SummaryWriter"] = type("SummaryWriter", (_Nothing,), {"add_scalar": _does_nothing})
        elif name == "wandb":
            module.__dict__.update(log=_does_nothing, init=_no_run)
        else:
            module.__dict__.update(log_metric=_does_nothing, log_metrics=_does_nothing)
        _watch(self._events, name)
        if name == "wandb":
            _Run.log = module.__dict__["log"]


class _Nothing:
    """Any object of an absent library: it can be called, entered and asked for attributes, and does nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return _Nothing()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None


class _Run(_Nothing):
    log: Any = None

    def __getattribute__(self, name: str) -> Any:
        return _Run.__dict__["log"] if name == "log" else super().__getattribute__(name)


def _no_run(*_args: Any, **_kwargs: Any) -> _Run:
    return _Run()


def _does_nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _nothing_for(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Nothing()
