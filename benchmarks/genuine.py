"""Import the amp of the real Apex from a folder with its sources; nothing is built.

Its Python runs as it is. What it wants of CUDA is stood in for on a machine without: tensors call themselves CUDA
tensors, and the kernels of `amp_C` are calls of torch's kernels for lists, one for one. Nothing of Apex is needed to
import this file.
"""

import importlib
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CUDA_NAMES = {
    torch.float16: "torch.cuda.HalfTensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float64: "torch.cuda.DoubleTensor",
    torch.int64: "torch.cuda.LongTensor",
}
# Apex's `apex/__init__.py` imports what amp does not need, and these of its modules want compiled code.
_STANDS_IN = {
    "apex.parallel": ("DistributedDataParallel",),
    "apex.parallel.LARC": ("LARC",),
    "apex.optimizers": ("FusedSGD",),
    "apex.contrib": (),
    "apex.contrib.optimizers": ("FP16_Optimizer",),
}


def load_amp(source: Path, *, kernels: bool, weight_cache: bool, device: str = "cpu") -> Any:
    """Return `apex.amp`; this process is good for nothing else afterwards.

    Args:
        source: the folder that holds `apex/`, release 25.05.
        kernels: stand in for `amp_C`; without it Apex takes its Python path, with a host read per gradient.
        weight_cache: have `Tensor.half` leave the graph that O1's cache of weights expects, as before torch 1.10.
        device: "cpu" to have CUDA stood in for, "cuda" where it is there.

    Raises:
        ImportError: the folder has no `apex/amp`.
    """
    if not (source / "apex" / "amp").is_dir():
        raise ImportError(f"no apex/amp in {source}")
    if device == "cpu":
        _pose_as_cuda()
    if weight_cache:
        _halve_as_before_torch_1_10()
    package = types.ModuleType("apex")
    package.__path__ = [str(source / "apex")]
    package.deprecated_warning = lambda *_: None  # type: ignore[attr-defined]
    sys.modules["apex"] = package
    for name, classes in _STANDS_IN.items():
        module = types.ModuleType(name)
        module.__path__ = []
        for entry in classes:
            setattr(module, entry, type(entry, (), {}))
        sys.modules[name] = module
    if kernels:
        sys.modules["amp_C"] = _make_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("apex.amp")


def _pose_as_cuda() -> None:
    plain_type = Tensor.type

    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain_type(self, *args, **kwargs) if args or kwargs else _CUDA_NAMES[self.dtype]

    tensor: Any = Tensor
    tensor.type = type_of
    tensor.is_cuda = property(lambda self: True)
    torch.cuda.IntTensor = lambda values: torch.tensor(values, dtype=torch.float32)  # type: ignore[misc, assignment]
    torch.version.cuda = "12.4"


def _halve_as_before_torch_1_10() -> None:
    def half(self: Tensor) -> Tensor:
        if self.dtype is torch.float16:
            return self
        return torch.empty_like(self, dtype=torch.float16, requires_grad=False).copy_(self)

    tensor: Any = Tensor
    tensor.half = half


def _make_kernels() -> types.ModuleType:
    found = torch.zeros(())
    factors: dict[float, Tensor] = {}

    def unscale_and_check(grads: Any, flag: Tensor, scale: float) -> None:
        factor = factors.setdefault(scale, torch.tensor(scale))
        found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)
        flag.add_(found)

    def multi_tensor_scale(chunk: int, flag: Tensor, lists: Any, scale: float) -> None:
        sources, targets = lists
        with torch.no_grad():
            if sources[0] is not targets[0]:
                torch._foreach_copy_(targets, sources)
            if scale != 1.0 or sources[0] is targets[0]:
                unscale_and_check(targets, flag, scale)

    def multi_tensor_axpby(chunk: int, flag: Tensor, lists: Any, a: float, b: float, checked: int) -> None:
        sources, addends, targets = lists
        with torch.no_grad():
            fresh = torch._foreach_mul(sources, 1.0)
            unscale_and_check(fresh, flag, a)
            torch._foreach_add_(fresh, addends, alpha=b)
            torch._foreach_copy_(targets, fresh)

    module: Any = types.ModuleType("amp_C")
    module.multi_tensor_scale = multi_tensor_scale
    module.multi_tensor_axpby = multi_tensor_axpby
    module.multi_tensor_l2norm = None  # looked up, and not called by amp
    return module  # type: ignore[no-any-return]
