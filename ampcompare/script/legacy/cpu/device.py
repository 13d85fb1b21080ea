"""`--device cpu`: send what a script does on CUDA to the CPU, for a smoke test without a GPU.

Functions are replaced rather than watched by a torch function mode: a mode does not reach other threads, nor the
backward functions of the script's own autograd functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.precision.cpu_half import EmulatedHalf
from ampcompare.script.legacy.cpu import fake_cuda
from ampcompare.script.legacy.cpu.autocast import autocast_on_cpu
from ampcompare.script.legacy.cpu.sync_batch_norm import sync_batch_norm_on_cpu
from ampcompare.script.legacy.jit import keep_for_jit
from ampcompare.script.legacy.process_group import gloo_for_nccl
from ampcompare.script.legacy.stderr import note

__all__ = ["is_cuda", "run_on_cpu"]

FACTORIES = [
    "arange",
    "as_tensor",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "from_file",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
TENSOR_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
TYPES = ["Bool", "Byte", "Char", "Double", "Float", "Half", "BFloat16", "Int", "Long", "Short"]

_modes: list[EmulatedHalf] = []


def is_cuda(device: Any) -> bool:
    """Return whether a value means a CUDA device: "cuda", "cuda:1", a `torch.device`, or its number."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def run_on_cpu(*, quiet: bool = False) -> None:
    """Replace the functions, for the life of this process, with a line on stderr unless `quiet`."""
    if not quiet:
        note(
            "--device cpu: CUDA calls run on the CPU; fp16 products are computed in fp32 and rounded once to fp16. "
            "Timings and memory figures of this run are meaningless"
        )
    _replace_cuda_functions()
    _replace_factories()
    _replace_tensor_methods()
    _replace_module_methods()
    _replace_loading()
    autocast_on_cpu()
    gloo_for_nccl()
    sync_batch_norm_on_cpu(quiet=quiet)
    mode = EmulatedHalf()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _modes.append(mode)


def _replace_cuda_functions() -> None:
    for name, function in fake_cuda.FUNCTIONS.items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory):  # libraries call them by either name
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, function)
    for name, function in fake_cuda.ACCELERATOR.items():
        if hasattr(torch.accelerator, name):  # each version has more of them
            setattr(torch.accelerator, name, function)
    for name in TYPES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: 0)
    torch.cuda.nvtx.range = fake_cuda.Nothing  # type: ignore[assignment]
    for name in ("start", "stop", "init"):
        setattr(torch.cuda.profiler, name, lambda *args, **kwargs: None)
    torch.cuda.profiler.profile = fake_cuda.Nothing  # type: ignore[assignment]
    if torch.version.cuda is None:  # a CUDA build has its own versions
        torch.version.cuda = fake_cuda.CUDA_VERSION
        torch.backends.cudnn.version = lambda: fake_cuda.CUDNN_VERSION
        torch.cuda.nccl.version = lambda: fake_cuda.NCCL_VERSION


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return factory


def _replace_factories() -> None:
    for name in FACTORIES:
        original = getattr(torch, name, None)
        if original is not None:
            replacement = _factory(original)
            setattr(torch, name, replacement)
            keep_for_jit(original, replacement)
    for name in TENSOR_FACTORIES:
        setattr(Tensor, name, _factory(getattr(Tensor, name)))


def _moved(source: Tensor, result: Tensor) -> Tensor:
    """Return a copy if CUDA would have made one, so that writing to it leaves the source unchanged.

    A tensor that needs gradients is returned itself: it must remain a leaf, as if it were on the device already.
    """
    return (
        result if result is not source or source.requires_grad or isinstance(source, nn.Parameter) else source.clone()
    )


def _replace_tensor_methods() -> None:
    tensor_to, tensor_type = Tensor.to, Tensor.type

    @functools.wraps(tensor_to)
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda(args[0]):
            return _moved(self, tensor_to(self, "cpu", *args[1:], **kwargs))
        if is_cuda(kwargs.get("device")):
            return _moved(self, tensor_to(self, *args, **{**kwargs, "device": "cpu"}))
        return tensor_to(self, *args, **kwargs)

    def cuda(
        self: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> Tensor:
        return _moved(self, tensor_to(self, "cpu", memory_format=memory_format))

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


def _replace_module_methods() -> None:
    module_to = nn.Module.to

    @functools.wraps(module_to)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A torch without CUDA cannot resolve the number of a device.
        if args and is_cuda(args[0]):
            args = ("cuda", *args[1:])
        if is_cuda(kwargs.get("device")):
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

    def init_dp(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, [], dim

    nn.DataParallel.__init__ = init_dp  # type: ignore[method-assign]
    loader_init = torch.utils.data.DataLoader.__init__

    @functools.wraps(loader_init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        loader_init(self, *args, **kwargs)
        self.pin_memory = False

    torch.utils.data.DataLoader.__init__ = init_loader  # type: ignore[method-assign]


def _replace_loading() -> None:
    load, set_type, set_device = torch.load, torch.set_default_tensor_type, torch.set_default_device

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
    torch.set_default_device = functools.wraps(set_device)(
        lambda device: set_device("cpu" if is_cuda(device) else device)
    )
