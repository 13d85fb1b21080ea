"""The scalars that a script logs to TensorBoard, Weights & Biases or MLflow.

Where such a library is not installed, the script gets a stand-in that does nothing else.
"""

from __future__ import annotations

import functools
import importlib.util
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ampcompare.base.metric_log import log_metric
from ampcompare.base.patches import Layer, Subscriptions
from ampcompare.guards.import_hook import ImportHook

__all__ = ["catch_scalars"]

WRITERS = ("torch.utils.tensorboard", "tensorboardX")
LIBRARIES = (*WRITERS, "wandb", "mlflow")


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
    def call_logged(original: Any, *args: Any, **kwargs: Any) -> Any:
        log(*args, **kwargs)
        return original(*args, **kwargs)

    return call_logged


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
        nothing = _Nothing()
        module.__dict__["__getattr__"] = nothing.__getattr__
        if name in WRITERS:
            module.__dict__["SummaryWriter"] = type("SummaryWriter", (_Nothing,), {"add_scalar": nothing})
        elif name == "wandb":
            module.__dict__.update(log=nothing, init=_Run)
        else:
            module.__dict__.update(log_metric=nothing, log_metrics=nothing)
        _watch(self._events, name)


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
    """What `wandb.init` returns."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as `wandb.log` does."""
        sys.modules["wandb"].log(*args, **kwargs)
