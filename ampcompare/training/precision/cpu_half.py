"""16-bit types on a CPU: compute products in fp32 and round each result once, as tensor cores do.

A CPU's own fp16 kernels are 15 to 100 times slower than those for fp32, the backward pass of a convolution even on
processors with fp16 instructions; bf16 is as slow without bf16 instructions. The dispatch mode below runs under
autograd, autocast and DDP: models, dtypes and overflow to infinity do not change.
"""

import functools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.base.tensors.cuda_casts import TwoNestedContexts, cast_as_on_cuda
from ampcompare.base.tensors.products import HALF_DTYPES

aten = torch.ops.aten
X86 = ("x86_64", "amd64")


# What kernels of CUDA compute in fp32 and round once, forward and backward, and those of a CPU sum up in 16 bits, or
# do not know: pads, pools, resizing, sampling, windows and tables.
SUMMED = (
    "reflection_pad", "replication_pad", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool", "adaptive_max_pool",
    "fractional_max_pool", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "max_unpool",
    "upsample_", "_upsample_", "grid_sampler_2d", "grid_sampler_3d", "col2im", "im2col", "embedding_dense_backward",
    "_embedding_bag", "index_put", "_index_put_impl", "_unsafe_index_put",
)  # fmt: skip
ACCUMULATES = ("index_put", "_index_put_impl", "_unsafe_index_put")  # if their fourth argument says so


def _aten_operations_named(starts: Sequence[str], ends: str = "") -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten" and packet.startswith(tuple(starts)) and packet.endswith(ends):
            yield getattr(getattr(aten, packet), overload or "default", None)


EMULATED = frozenset(
    getattr(aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution", "convolution_backward")
)
# oneDNN has these in 16 bits on few processors only, and raises on the others.
RECURRENT = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})
# Operations that write into a list of tensors: below a mode their kernels leave the versions of these as they are.
WRITES_LISTS = frozenset(_aten_operations_named(["_foreach_"], "_"))
ROUNDED_ONCE = frozenset(
    each
    for each in _aten_operations_named(SUMMED)
    if each is not None and each._overloadname in ("default", "vec")
)
# An operation hashes in Python, and is one object for the life of a process.
COMPUTED = frozenset(map(id, EMULATED | RECURRENT | WRITES_LISTS | ROUNDED_ONCE))


def _is_half_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF_DTYPES


class EmulatedHalf(TorchDispatchMode):
    """Run products, convolutions and sums of one 16-bit type in fp32, rounding every result once to that type."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would switch its compiler off and on around each operation, a tenth of a small step.
        return False

    def __enter__(self) -> Any:
        _leave_handlers_uncompiled()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if id(func) not in COMPUTED:  # nearly all: one look
            return func(*args, **kwargs)
        if func in WRITES_LISTS:
            result = func(*args, **kwargs)
            for one in args[0]:
                if not one.is_inference():
                    torch.autograd.graph.increment_version(one)
            return result
        half = next((arg.dtype for arg in args if _is_half_tensor(arg)), None) if func in RECURRENT else None
        if half is not None:
            # Of both types, with 32-bit states and a workspace of bytes among the arguments.
            wide = func(*[arg.float() if _is_half_tensor(arg) else arg for arg in args], **kwargs)
            return tuple(
                one.to(half) if isinstance(one, Tensor) and one.is_floating_point() else one for one in wide
            )
        if func in ROUNDED_ONCE:
            return self._run_sum_in_fp32_rounding_once(func, args, kwargs)
        # A subclass of tensors multiplies by itself; the products inside it come back here.
        if func not in EMULATED or types:
            return func(*args, **kwargs)
        if any(arg.dtype is not self.dtype for arg in args if isinstance(arg, Tensor)):
            return func(*args, **kwargs)  # mixed dtypes must raise as they do without the mode
        result = func(*[arg.float() if isinstance(arg, Tensor) else arg for arg in args], **kwargs)
        return (
            tuple(map(self._round_to_half, result))
            if isinstance(result, tuple)
            else self._round_to_half(result)
        )

    def _run_sum_in_fp32_rounding_once(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an operation that sums up values of this type in fp32, and round what it returns, or writes, once."""
        types = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()}
        writes = func._schema.is_mutable  # type: ignore[attr-defined]
        is_sum = not func.__name__.startswith(ACCUMULATES) or (len(args) > 3 and args[3])
        if types != {self.dtype} or not is_sum:
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        result = func(*wide, **kwargs)
        if writes:
            args[0].copy_(result)
            return args[0]
        return (
            tuple(map(self._round_to_half, result))
            if isinstance(result, tuple)
            else self._round_to_half(result)
        )

    def _round_to_half(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


@functools.cache
def _leave_handlers_uncompiled() -> None:
    """Let torch's compiler pass over what runs around each operation."""
    # slow to import; what trains has it, since optimizers import it
    from torch._dynamo.eval_frame import skip_code

    methods = (
        EmulatedHalf.__torch_dispatch__,
        EmulatedHalf._run_sum_in_fp32_rounding_once,
        EmulatedHalf._round_to_half,
        _is_half_tensor,
    )
    left = [each.__code__ for each in methods]
    while left:
        code = left.pop()
        skip_code(code)
        left += [one for one in code.co_consts if isinstance(one, CodeType)]  # comprehensions


def has_bf16_instructions() -> bool:
    """Return whether this CPU multiplies bf16 in hardware, as torch and oneDNN see it."""
    # where oneDNN also says yes to AVX-512 without AVX512_BF16, which is slow
    if platform.machine().lower() in X86:
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def choose_cpu_half_mode_and_context(
    choice: str, half_dtype: torch.dtype | None, device: torch.device, lists: str = "cuda"
) -> tuple[str | None, AbstractContextManager[Any]]:
    """Return how 16-bit arithmetic is computed, such as "fp16 emulated", and the context to train in.

    Args:
        choice: "native", "emulated", or "auto": fp16 is emulated, and bf16 where this CPU has no instructions for it.
        half_dtype: the 16-bit type of the arm; None if it has none, for which the answer is None and an empty context.
        device: where it trains; only a CPU emulates.
        lists: "cuda" lets `torch.autocast` on a CPU cast what it casts on CUDA; "cpu" leaves it its own lists.

    Returns:
        The words that records keep, and a context for forward passes, backward passes and steps.
    """
    if half_dtype is None:
        return None, nullcontext()
    name = "bf16" if half_dtype is torch.bfloat16 else "fp16"
    is_slow = half_dtype is torch.float16 or not has_bf16_instructions()
    casts = cast_as_on_cuda(device.type, lists)
    if device.type == "cpu" and (choice == "emulated" or (choice == "auto" and is_slow)):
        return f"{name} emulated", TwoNestedContexts(casts, EmulatedHalf(half_dtype))
    return f"{name} native", casts
