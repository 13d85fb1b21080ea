"""What the record of a script's cell holds besides its losses and steps, and the end of a cell after some steps.

Scalars are those that the script logs to TensorBoard, Weights & Biases or MLflow; where such a library is not
installed, the script gets a stand-in that does nothing else.

Most files are seen by an audit hook on `open`. `torch.save`, TorchScript and safetensors open theirs outside of Python.

Where the process belongs to a cell, each file is also listed in the folder of the cell when it is first opened, so that
processes that the script has started add theirs, and other cells can look there. What a process has written before its
first forward pass is listed once more at that moment, with its content: that is data, on which no arm has acted.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import numbers
import os
import random
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.jit._script import RecursiveScriptModule

from ampcompare.base.files.loaded_code import CODE, TRACKERS, WRITING, digest_of, is_users_code, on_file_events
from ampcompare.base.files.run_files import CellFile
from ampcompare.base.metric_log import listen, log_metric
from ampcompare.base.rank_marks import CELL_FOLDER
from ampcompare.guards.events import Layer, Points, Subscriptions
from ampcompare.guards.import_hook import ImportHook
from ampcompare.script.legacy.record.recorder import Recorder
from ampcompare.training.hashes import inputs_sha256, parameters_sha256
from ampcompare.training.meters import MemoryMeter, make_memory_meter
from ampcompare.training.precision.base import owned_params

__all__ = [
    "EnoughSteps",
    "FirstBatches",
    "Watch",
    "WrittenFiles",
    "catch_scalars",
    "seed_all",
]

MAX_BATCHES = 3

WRITERS = ("torch.utils.tensorboard", "tensorboardX")
LIBRARIES = (*WRITERS, "wandb", "mlflow")
MAX_FILES = 200
MAX_READ = 5000
MAX_AGE_SECONDS = 30 * 86400.0  # an older file is data, and none that a cell of this comparison wrote
CELL_STARTED = "AMPCOMPARE_CELL_STARTED"
SAFETENSORS = ("safetensors.torch", "safetensors.numpy")
# Of other programs, which read and write them for themselves: compiled kernels, downloads, trackers of experiments.
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "TORCH_HOME")
IN_HOME = (".cache", ".triton", ".config", ".nv", ".keras", ".netrc")


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
    """Adds to a record: first weights and batches, scalars, files written, peak memory.

    Args:
        max_steps: steps of its first optimizer after which the script ends.
        half: how 16-bit types are computed.
    """

    def __init__(self, recorder: Recorder, max_steps: int | None = None, half: str | None = None) -> None:
        self._half = half
        self._recorder = recorder
        self._max_steps = max_steps
        self._steps: dict[int, int] = {}
        self._files = WrittenFiles()
        self._memory: MemoryMeter | None = None
        self._batches = FirstBatches(lambda hashes: recorder.add_row({"kind": "batches", "sha256": hashes}))
        self._ends: list[Callable[[], None]] = [listen(self._metric), catch_scalars(), _before_exit(recorder)]
        recorder.after_row(self._row)
        recorder.before_close(self.end)

    def weights(self, models: list[Any], optimizers: list[Any]) -> None:
        """Record the weights as the script has made them, before an arm casts them."""
        self._files.begin()
        held = [model for model in models if hasattr(model, "parameters")] or [_Stepped(one) for one in optimizers]
        self._recorder.add_row({"kind": "weights", "sha256": parameters_sha256(held)})
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
        if written := self._files.end():
            self._recorder.add_row({"kind": "files", "written": written})

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
        self._steps[row["optimizer"]] = self._steps.get(row["optimizer"], 0) + 1
        if self._steps[min(self._steps)] >= self._max_steps:
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
            log_metric(f"{prefix}{name}", float(value), source=source)


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


class WrittenFiles:
    """Notes each file that this process writes or reads from now on, outside the folders that no other cell uses."""

    def __init__(self) -> None:
        self._files: dict[str, None] = {}
        self._read: set[str] = set()
        self._busy: set[int] = set()
        self._own = os.path.join(os.environ[CELL_FOLDER], "") if CELL_FOLDER in os.environ else None
        self._started = float(os.environ.get(CELL_STARTED, time.time()))
        # Found now: a hook that looks for the folder of temporary files waits for the lock of who looks for it.
        self._temporary = os.path.join(tempfile.gettempdir(), "tmp")
        self._here = os.path.join(os.getcwd(), "")
        home = os.path.expanduser("~")
        found = [*(os.environ.get(name) for name in CACHES), *(os.path.join(home, name) for name in IN_HOME)]
        self._caches = tuple(path for path in found if path)
        self._events = Subscriptions(Layer.RECORD)
        for module in (torch, torch.serialization):
            self._events.wrap(module, "save", functools.partial(self._save, "f"))
        # `torch.jit.save` calls this method.
        self._events.wrap(RecursiveScriptModule, "save", functools.partial(self._save, "f"))
        self._events.wrap(torch.jit, "load", functools.partial(self._load, "f"))
        hooks = {name: functools.partial(self._watch_safetensors, name) for name in SAFETENSORS}
        self._imports = ImportHook({"safetensors": self._watch_safe_open, **hooks})
        self._imports.begin()
        self._before = Subscriptions(Layer.RECORD)
        self._before.wrap(*Points.FORWARD, self._called)
        self._before.wrap(*Points.ENTER_AUTOCAST, self._computed)
        self._before.wrap(*Points.BACKWARD, self._computed)
        self._end_audit = on_file_events(self._audit)

    def begin(self) -> None:
        """List with its content what this process has written before it computes, under an arm, what can be written."""
        if self._before.active:
            self._before.end()
            for file in list(self._files):
                if os.path.isfile(file) and (digest := digest_of(file)) is not None:
                    self._list({"made": file, "sha256": digest})

    def _called(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        if next(module.parameters(), None) is not None:  # else it is a transform of data
            self.begin()
        return original(module, *args, **kwargs)

    def _computed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin()
        return original(*args, **kwargs)

    def end(self) -> list[str]:
        """Watch no longer, and return the full paths of those written, in the order of their first opening."""
        self._end_audit()
        self._before.end()
        self._events.end()
        self._imports.end()
        return list(self._files)

    def _watch_safetensors(self, name: str) -> None:
        self._events.wrap(sys.modules[name], "save_file", functools.partial(self._save, "filename"))

    def _watch_safe_open(self) -> None:
        self._events.wrap(sys.modules["safetensors"], "safe_open", functools.partial(self._load, "filename"))

    def _save(self, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file of a function whose second argument, of that name, says where to save the first."""
        self._tell(args[1] if len(args) > 1 else kwargs.get(keyword), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(*args, **kwargs)

    def _load(self, keyword: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the file of a function whose first argument, of that name, says what to load."""
        self._tell(args[0] if args else kwargs.get(keyword), "rb", os.O_RDONLY)
        return original(*args, **kwargs)

    @staticmethod
    def _tell(path: Any, mode: str, flags: int) -> None:
        """Tell all that listen that a file is opened, which code outside of Python does without a word."""
        if isinstance(path, str | bytes | os.PathLike):
            sys.audit("open", path, mode, flags)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note a file that is opened, or gets another's name.

        It runs inside any `open` of the process, so it takes no lock.
        """
        if threading.get_ident() in self._busy:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
            if not writes or (isinstance(flags, int) and flags & os.O_RDWR and not flags & os.O_TRUNC):
                self._note_read(path)
            if writes:
                self._note(path)
        elif event == "os.rename":
            self._note(arguments[1])

    def _note(self, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike) or len(self._files) >= MAX_FILES:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._files or self._is_private(file) or "__pycache__" in file:
            return
        self._files[file] = None
        self._list({"wrote": file})

    def _note_read(self, path: Any) -> None:
        """Note a file that another cell may have written, and what an earlier attempt has left in its own folder."""
        if self._own is None or not isinstance(path, str | bytes | os.PathLike) or len(self._read) >= MAX_READ:
            return
        file = os.path.abspath(os.fsdecode(path))
        if file in self._read or file in self._files or file.endswith(CODE):
            return
        is_own = file.startswith(self._own)
        if is_own and os.path.dirname(file) == self._own.rstrip(os.sep) and _is_ampcompares(os.path.basename(file)):
            return
        if not is_own and (self._is_private(file) or file.startswith(self._caches) or not is_users_code(file)):
            return
        if any(part in file.split(os.sep) for part in TRACKERS):
            return
        try:
            found = os.stat(file)
        except OSError:
            return
        if not stat.S_ISREG(found.st_mode) or not found.st_size or found.st_mtime < self._started - MAX_AGE_SECONDS:
            return
        if is_own and found.st_mtime >= self._started:
            return
        self._read.add(file)
        self._list({"resumed" if is_own else "read": file, "sha256": digest_of(file) or ""})

    def _is_private(self, file: str) -> bool:
        if file.startswith(("/dev/", "/proc/", "/sys/")) or (self._own is not None and file.startswith(self._own)):
            return True
        return file.startswith(self._temporary) and not file.startswith(self._here)

    def _list(self, line: dict[str, str]) -> None:
        if self._own is None:
            return
        thread = threading.get_ident()
        self._busy.add(thread)
        try:
            file = self._own + CellFile.OPENED
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError:  # a full disk must not end the training
            pass
        finally:
            self._busy.discard(thread)


def _is_ampcompares(name: str) -> bool:
    """Return whether a file in the folder of a cell is one that ampcompare writes."""
    return name.endswith((".json", ".jsonl", ".txt", ".log")) and name.startswith(
        ("config.", "record.", "steps.", "epochs.", "script", "log.", "loaded.", "opened.", "progress.", "launcher.")
    )
