"""The scalars that a script logs to TensorBoard, Weights & Biases or MLflow."""

import functools
import numbers
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ampcompare.base.import_hook import ImportHook
from ampcompare.base.metric_log import log_metric
from ampcompare.base.patches import Layer, Subscriptions

WRITERS = ("torch.utils.tensorboard", "tensorboardX")
LIBRARIES = (*WRITERS, "wandb", "mlflow")


def start_logging_scalars() -> Callable[[], None]:
    """Log what scripts of this process write from now on; return a function that ends it."""
    events = Subscriptions(Layer.RECORD)
    hook = ImportHook({name: functools.partial(_log_scalars_of_tracker, events, name) for name in LIBRARIES})
    hook.begin()

    def end() -> None:
        hook.end()
        events.end()

    return end


def _log_scalars_of_tracker(events: Subscriptions, name: str) -> None:
    module: Any = sys.modules[name]
    if name in WRITERS:
        events.wrap(module.SummaryWriter, "add_scalar", _make_call_with_log(_log_tensorboard_scalar))
    elif name == "wandb":
        events.wrap(module, "log", _make_call_with_log(_log_wandb_scalars))
        run = getattr(getattr(module, "wandb_run", None), "Run", None) or getattr(module, "Run", None)
        if run is not None:  # `run = wandb.init()`, `run.log(...)`
            events.wrap(
                run,
                "log",
                _make_call_with_log(lambda _run, *args, **kwargs: _log_wandb_scalars(*args, **kwargs)),
            )
    else:
        events.wrap(module, "log_metric", _make_call_with_log(_log_mlflow_metric))
        events.wrap(module, "log_metrics", _make_call_with_log(_log_mlflow_metrics))


def _make_call_with_log(log: Callable[..., None]) -> Callable[..., Any]:
    def call_logged(original: Any, *args: Any, **kwargs: Any) -> Any:
        log(*args, **kwargs)
        return original(*args, **kwargs)

    return call_logged


def _log_tensorboard_scalar(
    _writer: Any, tag: str = "", scalar_value: Any = None, *_args: Any, **_kwargs: Any
) -> None:
    log_numbers({tag: scalar_value}, "SummaryWriter.add_scalar")


def _log_wandb_scalars(data: Any = None, *_args: Any, **_kwargs: Any) -> None:
    log_numbers(data, "wandb.log")


def _log_mlflow_metric(key: str = "", value: Any = None, *_args: Any, **_kwargs: Any) -> None:
    log_numbers({key: value}, "mlflow.log_metric")


def _log_mlflow_metrics(metrics: Any = None, *_args: Any, **_kwargs: Any) -> None:
    log_numbers(metrics, "mlflow.log_metric")


def log_numbers(values: Any, source: str, prefix: str = "") -> None:
    """Log the numbers of a mapping, and those of mappings in it as `outer/inner`."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            log_numbers(value, source, f"{prefix}{name}/")
        elif isinstance(value, numbers.Real) or getattr(value, "shape", None) in ((), (1,)):
            # torch warns of one that needs gradients
            detached = value.detach() if hasattr(value, "detach") else value
            log_metric(f"{prefix}{name}", float(detached), source=source)
