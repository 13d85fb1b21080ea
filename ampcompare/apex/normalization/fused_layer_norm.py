"""Layer and RMS normalization: statistics in fp32 (fp64 for fp64 input), result in a dtype of choice.

An autograd function takes the arguments of the function that has its name, without casting for autocast. Its backward
pass keeps the input, or with `memory_efficient` the output, so that the memory of the input can be freed. Modules have
the arithmetic and dtypes of the functions, without the memory-efficient form under TorchScript, which has no autograd
functions; autocast is left to TorchScript's own pass there.

Source: Apex 25.05, `apex.normalization.fused_layer_norm`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex import fused_layer_norm_cuda
from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_layer_norm_cuda",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


def fused_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` with mean 0 and variance 1 over its last dimensions, in the input's dtype.

    Under autocast `input` is first cast to the autocast dtype, here and in the functions below.

    Args:
        normalized_shape: sizes of the dimensions to normalize over.
        memory_efficient: keep the output for backward instead of the input.
    """
    return _layer_norm(input, None, None, normalized_shape, eps, memory_efficient, mixed=False)


def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return the normalized `input`, times `weight`, plus `bias` (both of `normalized_shape`), in the input's dtype.

    With `memory_efficient` the backward pass divides the output by `weight`: magnitudes of weights below `eps` count as
    `eps` there.
    """
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Do as `fused_layer_norm_affine`, with the result in the dtype of `weight`."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, memory_efficient, mixed=True)


def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` divided by the root of its mean square over the last dimensions, in the input's dtype."""
    return _rms_norm(input, None, normalized_shape, eps, memory_efficient, mixed=False)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return what `fused_rms_norm` gives times `weight` (of `normalized_shape`), in the input's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, mixed=False)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Do as `fused_rms_norm_affine`, with the result in the dtype of `weight`."""
    return _rms_norm(input, weight, normalized_shape, eps, memory_efficient, mixed=True)


def manual_rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm written out: fp32 for low-precision input, or in the dtype of a low-precision `weight`.

    This is Apex's reference; the functions above are the ones to train with.
    """
    square = input.float().square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    output = torch.rsqrt(square + eps) * input
    if weight is None:
        return output
    return weight * (output.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else output)


def _layer_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> Tensor:
    input, weight, bias = _cast_if_autocast_enabled(input, weight, bias)
    result = weight.dtype if mixed and weight is not None else input.dtype
    shape = list(normalized_shape)
    with torch.autocast(input.device.type, enabled=False):
        if memory_efficient:
            if weight is None:
                return FusedLayerNormFunction.apply(input, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
            affine = FusedLayerNormAffineMixedDtypesFunction if mixed else FusedLayerNormAffineFunction
            return affine.apply(input, weight, bias, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
        if _one_dtype(input, weight, bias, result):
            return F.layer_norm(input, shape, weight, bias, eps)
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.layer_norm(input.to(wide), shape, _to(weight, wide), _to(bias, wide), eps).to(result)


def _rms_norm(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    mixed: bool,
) -> Tensor:
    input, weight = _cast_if_autocast_enabled(input, weight)
    result = weight.dtype if mixed and weight is not None else input.dtype
    shape = list(normalized_shape)
    with torch.autocast(input.device.type, enabled=False):
        if memory_efficient:
            if weight is None:
                return FusedRMSNormFunction.apply(input, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
            affine = FusedRMSNormAffineMixedDtypesFunction if mixed else FusedRMSNormAffineFunction
            return affine.apply(input, weight, shape, eps, True)  # type: ignore[no-any-return, no-untyped-call]
        wide = torch.promote_types(input.dtype, torch.float32)
        return F.rms_norm(input.to(wide), shape, _to(weight, wide), eps).to(result)


def _one_dtype(input: Tensor, weight: Tensor | None, bias: Tensor | None, result: torch.dtype) -> bool:
    return all(tensor is None or tensor.dtype is result for tensor in (input, weight, bias))


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """Layer normalization with `weight` and `bias`; the result has the input's dtype."""

    _kernel: Callable[..., tuple[Tensor, Tensor, Tensor]] = staticmethod(fused_layer_norm_cuda.forward_affine)

    @classmethod
    def _run(
        cls,
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool,
    ) -> Tensor:
        output, mean, invvar = cls._kernel(input, normalized_shape, weight, bias, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, weight, bias, mean, invvar)
        return output

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`, plus `bias`."""
        return FusedLayerNormAffineFunction._run(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients of `input`, `weight` and `bias`, each in the dtype of its tensor."""
        kept, weight, bias, mean, invvar = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = fused_layer_norm_cuda.backward_affine(
            grad_output, mean, invvar, kept, ctx.normalized_shape, weight, bias, ctx.eps, ctx.memory_efficient
        )
        return grad_input.to(ctx.input_dtype), grad_weight, grad_bias, None, None, None


class FusedLayerNormAffineMixedDtypesFunction(FusedLayerNormAffineFunction):
    """Layer normalization with `weight` and `bias`; the result has the dtype of `weight`."""

    _kernel = staticmethod(fused_layer_norm_cuda.forward_affine_mixed_dtypes)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`, plus `bias`."""
        run = FusedLayerNormAffineMixedDtypesFunction._run
        return run(ctx, input, weight, bias, normalized_shape, eps, memory_efficient)


class FusedLayerNormFunction(torch.autograd.Function):
    """Layer normalization without parameters."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the normalized input."""
        output, mean, invvar = fused_layer_norm_cuda.forward(input, normalized_shape, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, mean, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient of `input`."""
        kept, mean, invvar = ctx.saved_tensors
        grad = fused_layer_norm_cuda.backward(
            grad_output, mean, invvar, kept, ctx.normalized_shape, ctx.eps, ctx.memory_efficient
        )
        return grad, None, None, None


class FusedRMSNormAffineFunction(torch.autograd.Function):
    """RMS normalization with `weight`; the result has the input's dtype."""

    _kernel: Callable[..., tuple[Tensor, Tensor]] = staticmethod(fused_layer_norm_cuda.rms_forward_affine)

    @classmethod
    def _run(
        cls,
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool,
    ) -> Tensor:
        output, invvar = cls._kernel(input, normalized_shape, weight, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, weight, invvar)
        return output

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`."""
        return FusedRMSNormAffineFunction._run(ctx, input, weight, normalized_shape, eps, memory_efficient)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return gradients of `input` and `weight`, each in the dtype of its tensor."""
        kept, weight, invvar = ctx.saved_tensors
        grad_input, grad_weight = fused_layer_norm_cuda.rms_backward_affine(
            grad_output, invvar, kept, ctx.normalized_shape, weight, ctx.eps, ctx.memory_efficient
        )
        return grad_input.to(ctx.input_dtype), grad_weight, None, None, None


class FusedRMSNormAffineMixedDtypesFunction(FusedRMSNormAffineFunction):
    """RMS normalization with `weight`; the result has the dtype of `weight`."""

    _kernel = staticmethod(fused_layer_norm_cuda.rms_forward_affine_mixed_dtypes)

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        normalized_shape: Sequence[int],
        eps: float,
        memory_efficient: bool = False,
    ) -> Tensor:
        """Return the normalized input, times `weight`."""
        return FusedRMSNormAffineMixedDtypesFunction._run(ctx, input, weight, normalized_shape, eps, memory_efficient)


class FusedRMSNormFunction(torch.autograd.Function):
    """RMS normalization without parameters."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool = False
    ) -> Tensor:
        """Return the normalized input."""
        output, invvar = fused_layer_norm_cuda.rms_forward(input, normalized_shape, eps)
        _note(ctx, input, normalized_shape, eps, memory_efficient)
        ctx.save_for_backward(output if memory_efficient else input, invvar)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Return the gradient of `input`."""
        kept, invvar = ctx.saved_tensors
        grad = fused_layer_norm_cuda.rms_backward(
            grad_output, invvar, kept, ctx.normalized_shape, ctx.eps, ctx.memory_efficient
        )
        return grad, None, None, None


def _note(ctx: Any, input: Tensor, normalized_shape: Sequence[int], eps: float, memory_efficient: bool) -> None:
    ctx.normalized_shape = tuple(normalized_shape)
    ctx.eps = eps
    ctx.memory_efficient = memory_efficient
    ctx.input_dtype = input.dtype


class _Norm(nn.Module):
    if TYPE_CHECKING:  # torch.jit.script refuses the type of a parameter that may be None
        weight: nn.Parameter | None
        normalized_shape: Any
    _own_parameters: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = torch.Size(sizes)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.memory_efficient = memory_efficient
        for name in self._own_parameters:
            self.register_parameter(name, nn.Parameter(torch.empty(sizes)) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Return the arguments in the module's repr."""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer normalization over the last dimensions; the output has the input's dtype.

    Args:
        normalized_shape: sizes of those dimensions; an int means the last one.
        elementwise_affine: own `weight` (ones) and `bias` (zeros) of that shape; else both are None.
        memory_efficient: keep the output for backward instead of the input.

    Works on any device, and needs no compiled extension.
    """

    if TYPE_CHECKING:
        bias: nn.Parameter | None
    _own_parameters = ("weight", "bias")

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, False)
        else:  # the compiler leaves out this branch, and only this form of it
            if self.weight is None or self.bias is None:
                return fused_layer_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
            return fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )


class FusedRMSNorm(_Norm):
    """RMS normalization over the last dimensions; arguments and dtypes as for `FusedLayerNorm`, without `bias`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_rms_norm(input, self.weight, self.normalized_shape, self.eps, False)
        else:
            if self.weight is None:
                return fused_rms_norm(input, self.normalized_shape, self.eps, self.memory_efficient)
            return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer normalization whose output has the dtype of its parameters; always affine.

    Raises:
        RuntimeError: `elementwise_affine=False`; `True` only warns, and other unknown keywords are ignored, as in Apex.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_non_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in the dtype of `weight`."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_layer_norm(input, self.weight, self.bias, self.normalized_shape, self.eps, True)
        else:
            assert self.weight is not None
            assert self.bias is not None
            return mixed_dtype_fused_layer_norm_affine(
                input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
            )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS normalization whose output has the dtype of its weight; arguments as for `MixedFusedLayerNorm`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_non_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in the dtype of `weight`."""
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return _scripted_rms_norm(input, self.weight, self.normalized_shape, self.eps, True)
        else:
            assert self.weight is not None
            return mixed_dtype_fused_rms_norm_affine(
                input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
            )


def _refuse_non_affine(name: str, kwargs: dict[str, Any]) -> None:
    if "elementwise_affine" not in kwargs:
        return
    warnings.warn(f"{name} is always affine: leave elementwise_affine out", stacklevel=3)
    if not kwargs["elementwise_affine"]:
        raise RuntimeError(f"{name} got elementwise_affine=False, but it is always affine; use the class without Mixed")


def _scripted_layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, normalized_shape: list[int], eps: float, mixed: bool
) -> Tensor:
    """Return the layer norm of `input` in its dtype, or with `mixed` in the dtype of `weight`."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    result = input.dtype
    if weight is not None:
        if mixed:
            result = weight.dtype
        weight = weight.to(wide)
    if bias is not None:
        bias = bias.to(wide)
    return F.layer_norm(input.to(wide), normalized_shape, weight, bias, eps).to(result)


def _scripted_rms_norm(
    input: Tensor, weight: Tensor | None, normalized_shape: list[int], eps: float, mixed: bool
) -> Tensor:
    """Return the RMS norm of `input` in its dtype, or with `mixed` in the dtype of `weight`."""
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    result = input.dtype
    if weight is not None:
        if mixed:
            result = weight.dtype
        weight = weight.to(wide)
    return torch.rms_norm(input.to(wide), normalized_shape, weight, eps).to(result)
