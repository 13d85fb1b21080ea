"""`--device cpu`: send what a script does on CUDA to the CPU, for a smoke test without a GPU.

Functions are replaced rather than watched by a torch function mode: a mode does not reach other threads, nor the
backward functions of the script's own autograd functions.

The autocast state for CUDA remains what the script sets and reads; the state for the CPU follows it.

Blocks of autocast for CUDA cast as they do on a GPU (`base/tensors/cuda_casts.py`), and those for the CPU as torch
does there.

Synchronized batch norm keeps torch's class, parameters and checkpoints; only `forward` is replaced.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import autocast_mode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _device

from ampcompare.base.patches import register_as_jit_builtin
from ampcompare.base.tensors.cuda_casts import install_cuda_casts, switch_cuda_casts
from ampcompare.script.invocation.stderr import say_once
from ampcompare.script.legacy.torch_functions import use_gloo_for_nccl
from ampcompare.training.precision.cpu_half import EmulatedHalf

FACTORIES = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "fft.fftfreq", "fft.rfftfreq", "from_file", "full", "full_like", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros", "zeros_like",
)  # fmt: skip
TENSOR_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
TYPES = ["Bool", "Byte", "Char", "Double", "Float", "Half", "BFloat16", "Int", "Long", "Short"]

_modes: list[EmulatedHalf] = []
# Versions that scripts compare and print, if torch itself has none: those of torch 2.4.
_CUDA_VERSION = "12.1"
_CUDNN_VERSION = 90100
_NCCL_VERSION = (2, 20, 5)
# The first capability with bfloat16; cuDNN refuses older ones.
CAPABILITY = (8, 0)
PARTS = (
    "_normalize",
    "_world_size",
    "_normalize_by_batch_statistics",
    "_update_running_statistics",
)  # of ampcompare's, which know torch's attributes


def means_cuda_device(device: Any) -> bool:
    """Return whether a value means a CUDA device: "cuda", "cuda:1", a `torch.device`, or its number."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def redirect_cuda_to_cpu(*, quiet: bool = False, autocast_lists: str = "cuda") -> None:
    """Replace the functions, for the life of this process, with a line on stderr unless `quiet`.

    Args:
        autocast_lists: whose casts autocast for CUDA makes: those of "cuda", or of the "cpu".
    """
    if not quiet:
        say_once(
            "--device cpu: CUDA calls run on the CPU; fp16 products are computed in fp32 and rounded once to fp16. "
            "Timings and memory figures of this run are meaningless"
        )
    _replace_cuda_functions()
    _redirect_tensor_factories_to_cpu()
    _replace_generator()
    _replace_tensor_methods()
    _replace_modules_and_loaders()
    _redirect_torch_load_and_defaults_to_cpu()
    _redirect_autocast_to_cpu(autocast_lists)
    use_gloo_for_nccl()
    _replace_sync_batch_norm()
    mode = EmulatedHalf()
    mode.__enter__()
    _modes.append(mode)


def _replace_cuda_functions() -> None:
    for name, function in FUNCTIONS.items():
        # libraries call them by either name
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    for name, function in _ACCELERATOR.items():
        if hasattr(torch.accelerator, name):
            setattr(torch.accelerator, name, function)
    for name in TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    torch.cuda.nvtx.range = _NoOperation  # type: ignore[assignment]
    for name in ("start", "stop", "init"):
        setattr(torch.cuda.profiler, name, lambda *args, **kwargs: None)
    torch.cuda.profiler.profile = _NoOperation  # type: ignore[assignment]
    if torch.version.cuda is None:  # a CUDA build has its own versions
        torch.version.cuda = _CUDA_VERSION
        torch.backends.cudnn.version = lambda: _CUDNN_VERSION
        torch.cuda.nccl.version = lambda: _NCCL_VERSION


def _make_factory_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if means_cuda_device(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _redirect_tensor_factories_to_cpu() -> None:
    # `with torch.device("meta")` and the like know torch's own functions, by a list that is made at its first use.
    _device._device_constructors()
    for name in FACTORIES:
        path, _, function = f"torch.{name}".rpartition(".")
        module = importlib.import_module(path)
        original = getattr(module, function, None)
        if original is not None:
            replacement = _make_factory_on_cpu(original)
            setattr(module, function, replacement)
            register_as_jit_builtin(original, replacement)
    for name in TENSOR_FACTORIES:
        setattr(Tensor, name, _make_factory_on_cpu(getattr(Tensor, name)))


def _replace_generator() -> None:
    original: Any = torch.Generator

    class AnyGenerator(type(original)):  # type: ignore[misc]
        def __instancecheck__(self, value: object) -> bool:
            return isinstance(value, original)

    class Generator(original, metaclass=AnyGenerator):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            return original("cpu" if means_cuda_device(device) else device)

    torch.Generator = Generator  # type: ignore[misc]


def _copy_if_result_is_source(source: Tensor, result: Tensor) -> Tensor:
    """Return a copy if CUDA would have made one, so that writing to it leaves the source unchanged.

    A tensor that needs gradients is returned itself: it must remain a leaf, as if it were on the device already.
    """
    return (
        result
        if result is not source or source.requires_grad or isinstance(source, nn.Parameter)
        else source.clone()
    )


def _replace_tensor_methods() -> None:
    tensor_to, tensor_type = Tensor.to, Tensor.type

    @functools.wraps(tensor_to)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and means_cuda_device(args[0]):
            return _copy_if_result_is_source(self, tensor_to(self, "cpu", *args[1:], **kwargs))
        if means_cuda_device(kwargs.get("device")):
            return _copy_if_result_is_source(self, tensor_to(self, *args, **{**kwargs, "device": "cpu"}))
        return tensor_to(self, *args, **kwargs)

    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        return _copy_if_result_is_source(self, tensor_to(self, "cpu", memory_format=memory_format))

    @functools.wraps(tensor_type)
    def of_type(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return tensor_type(self) if dtype is None else tensor_type(self, dtype, *args, **kwargs)

    patches: dict[str, Any] = {
        "to": to,
        "cuda": cuda,
        "type": of_type,
        "pin_memory": lambda self, device=None: self,
        "is_pinned": lambda self, device=None: False,
        "record_stream": lambda self, stream: None,
    }
    for name, patch in patches.items():
        setattr(Tensor, name, patch)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        storage.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
        storage.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_modules_and_loaders() -> None:
    module_to = nn.Module.to

    @functools.wraps(module_to)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A torch without CUDA cannot resolve the number of a device.
        if args and means_cuda_device(args[0]):
            args = ("cuda", *args[1:])
        if means_cuda_device(kwargs.get("device")):
            kwargs["device"] = "cuda"
        return module_to(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign]
    ddp = nn.parallel.DistributedDataParallel
    ddp_init = ddp.__init__

    @functools.wraps(ddp_init)
    def init_ddp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kw: Any
    ) -> None:
        ddp_init(self, module, None, None, *args, **kw)

    ddp.__init__ = init_ddp  # type: ignore[method-assign]

    def init_dp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.device_ids = []
        self.dim = dim

    nn.DataParallel.__init__ = init_dp  # type: ignore[method-assign]
    loader_init = torch.utils.data.DataLoader.__init__

    @functools.wraps(loader_init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        loader_init(self, *args, **kwargs)
        self.pin_memory = False

    torch.utils.data.DataLoader.__init__ = init_loader  # type: ignore[method-assign]


def _redirect_torch_load_and_defaults_to_cpu() -> None:
    load = torch.load
    set_type = torch.set_default_tensor_type
    made = _device.DeviceContext.__init__

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not callable(map_location):
            map_location = "cpu"
        return load(f, map_location, *args, **kwargs)

    torch.load = load_on_cpu

    @functools.wraps(set_type)
    def set_default_tensor_type(t: Any) -> None:
        set_type(t.replace("torch.cuda.", "torch.") if isinstance(t, str) else t)

    torch.set_default_tensor_type = set_default_tensor_type

    @functools.wraps(made)
    def make_context(self: Any, device: Any) -> None:
        made(self, "cpu" if means_cuda_device(device) else device)

    _device.DeviceContext.__init__ = make_context  # type: ignore[method-assign]


class _NoOperation(AbstractContextManager[Any]):
    """Accepts any arguments and does nothing, as a context or as a decorator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        return None

    def __call__(self, function: Any) -> Any:
        """Return a decorated function as it is."""
        return function


def _make_function_returning(value: Any) -> Any:
    def constant(*args: Any, **kwargs: Any) -> Any:
        return value

    return constant


class _StreamOnCpu(_NoOperation):
    """A stream whose work is always complete."""

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0
    wait_stream = wait_event = synchronize = _make_function_returning(None)
    query = _make_function_returning(True)
    is_capturing = _make_function_returning(False)  # there are no graphs

    def record_event(self, event: _EventOnCpu | None = None) -> _EventOnCpu:
        """Return an event recorded now."""
        event = event or _EventOnCpu()
        event.record(self)
        return event


class _EventOnCpu:
    """A time on the wall clock; all work before it is complete."""

    wait = synchronize = _make_function_returning(None)
    query = _make_function_returning(True)

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: _EventOnCpu) -> float:
        """Return the milliseconds until another event."""
        return 1e3 * (end_event._seconds - self._seconds)


def _made_up_device_properties(device: Any = None) -> SimpleNamespace:
    """Return the properties that scripts print of a GPU."""
    return SimpleNamespace(
        name="CPU in place of CUDA",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=1,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _cudart_stand_in() -> SimpleNamespace:
    """Return the profiler's calls, which do nothing."""
    return SimpleNamespace(
        cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0, cudaGetErrorString=lambda error: "no error"
    )


_stream = _StreamOnCpu()


def _free_and_total_memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _cuda_function_stand_ins() -> dict[str, Any]:
    """Return what stands in for functions of `torch.cuda`; TorchDynamo takes no function under two names."""
    return {
        **{
            name: _make_function_returning(None)  # the CPU's generator is seeded by torch.manual_seed
            for name in (
                *("empty_cache", "init", "ipc_collect", "manual_seed", "manual_seed_all", "seed", "seed_all"),
                *("reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
                *("reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction", "set_stream"),
                "synchronize",
            )
        },
        **{
            name: _make_function_returning(0)
            for name in (
                *("current_blas_handle", "current_device", "utilization"),
                *("memory_allocated", "memory_cached", "memory_reserved"),
                *("max_memory_allocated", "max_memory_cached", "max_memory_reserved"),
            )
        },
        **dict.fromkeys(("StreamContext", "device", "device_of", "stream"), _NoOperation),
        **{name: _make_function_returning(_stream) for name in ("current_stream", "default_stream")},
        **{
            name: _make_function_returning(False)
            for name in ("can_device_access_peer", "is_current_stream_capturing")
        },
        **{name: _make_function_returning(True) for name in ("is_available", "is_bf16_supported")},
        "Event": _EventOnCpu,
        "Stream": _StreamOnCpu,
        "cudart": _cudart_stand_in,
        "device_count": _make_function_returning(1),
        "get_arch_list": lambda: [],
        "get_device_capability": _make_function_returning(CAPABILITY),
        "get_device_name": _make_function_returning("CPU in place of CUDA"),
        "get_device_properties": _made_up_device_properties,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": lambda: torch.initial_seed(),
        "mem_get_info": lambda device=None: _free_and_total_memory(),
        "memory_snapshot": lambda *args, **kwargs: [],
        "memory_stats": lambda device=None: defaultdict(int),
        "memory_summary": _make_function_returning("no CUDA memory: this run uses the CPU\n"),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
    }


FUNCTIONS = _cuda_function_stand_ins()
# `torch.accelerator` on a machine with a GPU, where it differs; each version of torch has more of them.
_ACCELERATOR: dict[str, Any] = {
    **_cuda_function_stand_ins(),
    **{name: _make_function_returning(None) for name in ("set_device_idx", "set_device_index")},
    **{name: _make_function_returning(0) for name in ("current_device_idx", "current_device_index")},
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "device_index": _NoOperation,
    "get_device_capability": _make_function_returning(
        {"supported_dtypes": {torch.float32, torch.float16, torch.bfloat16}}
    ),
    "get_memory_info": lambda device_index=None: _free_and_total_memory(),
}


def _redirect_autocast_to_cpu(cast_lists: str) -> None:
    """Let autocast for CUDA act on CPU tensors, by whichever call it is enabled, for the life of this process."""
    if cast_lists == "cuda":
        install_cuda_casts()
    _follow_autocast_setters(switch_cuda_casts if cast_lists == "cuda" else _make_function_returning(None))
    _restore_cpu_autocast_state_after_cuda_blocks()
    _patch_custom_fwd_for_cpu()


def _follow_autocast_setters(follow: Callable[[bool], Any]) -> None:
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    @functools.wraps(set_enabled)
    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        if len(args) == 1 or args[0] == "cuda":  # without a device, torch means CUDA
            set_enabled("cpu", args[-1])
            follow(bool(args[-1]))

    @functools.wraps(set_dtype)
    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        if device_type == "cuda":
            set_dtype("cpu", dtype)

    torch.set_autocast_enabled = set_autocast_enabled  # type: ignore[assignment]  # torch has two overloads
    torch.set_autocast_dtype = set_autocast_dtype
    torch.set_autocast_gpu_dtype = functools.partial(set_autocast_dtype, "cuda")


def _restore_cpu_autocast_state_after_cuda_blocks() -> None:
    """Restore the CPU's own state at the end of a block for CUDA: its default dtype is bfloat16, not float16."""
    autocast = autocast_mode.autocast
    enter, leave = autocast.__enter__, autocast.__exit__

    @functools.wraps(enter)
    def enter_keeping(self: Any) -> Any:
        if self.device == "cuda":
            self._ampcompare_cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return enter(self)  # type: ignore[no-untyped-call]

    @functools.wraps(leave)
    def leave_restoring(self: Any, *exception: Any) -> Any:
        result = leave(self, *exception)
        if self.device == "cuda":
            enabled, dtype = self._ampcompare_cpu
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return result

    autocast.__enter__ = enter_keeping  # type: ignore[method-assign]
    autocast.__exit__ = leave_restoring  # type: ignore[method-assign]


def _patch_custom_fwd_for_cpu() -> None:
    """Let `custom_fwd(cast_inputs=...)` of functions for CUDA cast inputs on the CPU."""
    cast = autocast_mode._cast

    @functools.wraps(cast)
    def cast_on_cpu(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" else device_type, dtype)

    autocast_mode._cast = cast_on_cpu


def _replace_sync_batch_norm() -> None:
    """Replace what torch refuses on a CPU: plain batch norm on one rank, ampcompare's over several."""
    kind: Any = nn.SyncBatchNorm

    def forward(self: Any, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if (
            not (dist.is_available() and dist.is_initialized())
            or dist.get_world_size(self.process_group) == 1
        ):
            return _BatchNorm.forward(self, input)
        _add_sync_batch_norm_methods(kind)
        result: Tensor = self._normalize(input, None)
        return result

    kind.forward = forward
    # It only refuses to wrap such layers on a CPU.
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = (  # type: ignore[method-assign]
        lambda self, module: None
    )


def _add_sync_batch_norm_methods(kind: Any) -> None:
    if hasattr(kind, PARTS[0]):
        return
    ours = importlib.import_module("ampcompare.apex.parallel.optimized_sync_batchnorm").SyncBatchNorm
    for name in PARTS:
        setattr(kind, name, vars(ours)[name])
    kind.fuse_relu = False
