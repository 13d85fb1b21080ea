"""Layer and RMS normalization: statistics in fp32 (fp64 for fp64 input), result in a dtype of choice.

An autograd function takes the arguments of the function that has its name, without casting for autocast. Its backward
pass keeps the input, or with `memory_efficient` the output, so that the memory of the input can be freed.

Source: Apex 25.05, `apex.normalization.fused_layer_norm`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampcompare.apex import fused_layer_norm_cuda
from ampcompare.apex._autocast_utils import _cast_if_autocast_enabled

Kernel = Callable[..., Any]


def fused_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` with mean 0 and variance 1 over its last dimensions, in the input's dtype.

    Under autocast `input` is first cast to the autocast dtype, here and in the functions below. With
    `memory_efficient` the output is kept for backward instead of the input.
    """
    return _normalize_with_params(
        input, (None, None), normalized_shape, eps, memory_efficient, rms=False, mixed=False
    )


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
    return _normalize_with_params(
        input, (weight, bias), normalized_shape, eps, memory_efficient, rms=False, mixed=False
    )


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Do as `fused_layer_norm_affine`, with the result in the dtype of `weight`."""
    return _normalize_with_params(
        input, (weight, bias), normalized_shape, eps, memory_efficient, rms=False, mixed=True
    )


def fused_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Return `input` divided by the root of its mean square over the last dimensions, in the input's dtype."""
    return _normalize_with_params(
        input, (None,), normalized_shape, eps, memory_efficient, rms=True, mixed=False
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Return what `fused_rms_norm` gives times `weight` (of `normalized_shape`), in the input's dtype."""
    return _normalize_with_params(
        input, (weight,), normalized_shape, eps, memory_efficient, rms=True, mixed=False
    )


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Do as `fused_rms_norm_affine`, with the result in the dtype of `weight`."""
    return _normalize_with_params(
        input, (weight,), normalized_shape, eps, memory_efficient, rms=True, mixed=True
    )


def manual_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float
) -> Tensor:
    """Return the RMS norm written out: fp32 for low-precision input, or in the dtype of a low-precision `weight`.

    This is Apex's reference; the functions above are the ones to train with.
    """
    square = input.float().square().mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
    output = torch.rsqrt(square + eps) * input
    if weight is None:
        return output
    return weight * (output.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else output)


def _normalize_with_params(
    input: Tensor,
    params: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    eps: float,
    memory_efficient: bool,
    *,
    rms: bool,
    mixed: bool,
) -> Tensor:
    """Normalize with `params`, weight and bias, or for RMS the weight alone; None for no affine part."""
    input, *params = _cast_if_autocast_enabled(input, *params)
    weight = params[0]
    result = weight.dtype if mixed and weight is not None else input.dtype
    shape = list(normalized_shape)
    with torch.autocast(input.device.type, enabled=False):
        if memory_efficient and weight is None:
            plain = FusedRMSNormFunction if rms else FusedLayerNormFunction
            return plain.apply(input, shape, eps, True)  # type: ignore[no-any-return]
        if memory_efficient:
            of_rms = FusedRMSNormAffineFunction, FusedRMSNormAffineMixedDtypesFunction
            of_layer = FusedLayerNormAffineFunction, FusedLayerNormAffineMixedDtypesFunction
            return (of_rms if rms else of_layer)[mixed].apply(input, *params, shape, eps, True)  # type: ignore[no-any-return]
        wide = torch.promote_types(input.dtype, torch.float32)
        if not rms and all(tensor is None or tensor.dtype is result for tensor in (input, *params)):
            wide = input.dtype
        wide_params: Any = [None if param is None else param.to(wide) for param in params]
        norm: Any = F.rms_norm if rms else F.layer_norm
        normalized: Tensor = norm(input.to(wide), shape, *wide_params, eps)
        return normalized.to(result)


def _make_norm_function(name: str, forward: Kernel, backward: Kernel, parameters: int) -> Any:
    """Return an autograd function that is applied to input, parameters, `normalized_shape`, `eps`, `memory_efficient`.

    Gradients have the dtypes of their tensors. Without the last argument the input is kept.
    """

    def run(ctx: Any, input: Tensor, *args: Any) -> Tensor:
        params, (normalized_shape, eps, *memory_efficient) = args[:parameters], args[parameters:]
        keeps_output = bool(memory_efficient and memory_efficient[0])
        output, *statistics = forward(input, normalized_shape, *params, eps)
        ctx.settings, ctx.input_dtype = (tuple(normalized_shape), eps, keeps_output), input.dtype
        ctx.save_for_backward(output if keeps_output else input, *params, *statistics)
        return output  # type: ignore[no-any-return]

    def run_back(ctx: Any, grad_output: Tensor) -> Any:
        kept, *saved = ctx.saved_tensors
        params, statistics = saved[:parameters], saved[parameters:]
        normalized_shape, eps, keeps_output = ctx.settings
        found = backward(grad_output, *statistics, kept, normalized_shape, *params, eps, keeps_output)
        grad_input, *others = found if parameters else (found,)
        return grad_input.to(ctx.input_dtype), *others, None, None, None

    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(run), "backward": staticmethod(run_back)}
    )


_kernels = fused_layer_norm_cuda
FusedLayerNormFunction = _make_norm_function("FusedLayerNormFunction", _kernels.forward, _kernels.backward, 0)
FusedLayerNormAffineFunction = _make_norm_function(
    "FusedLayerNormAffineFunction", _kernels.forward_affine, _kernels.backward_affine, 2
)
FusedLayerNormAffineMixedDtypesFunction = _make_norm_function(
    "FusedLayerNormAffineMixedDtypesFunction",
    _kernels.forward_affine_mixed_dtypes,
    _kernels.backward_affine,
    2,
)
FusedRMSNormFunction = _make_norm_function(
    "FusedRMSNormFunction", _kernels.rms_forward, _kernels.rms_backward, 0
)
FusedRMSNormAffineFunction = _make_norm_function(
    "FusedRMSNormAffineFunction", _kernels.rms_forward_affine, _kernels.rms_backward_affine, 1
)
FusedRMSNormAffineMixedDtypesFunction = _make_norm_function(
    "FusedRMSNormAffineMixedDtypesFunction",
    _kernels.rms_forward_affine_mixed_dtypes,
    _kernels.rms_backward_affine,
    1,
)


class _NormModule(nn.Module):
    weight: nn.Parameter | None
    _own_parameters: ClassVar[tuple[str, ...]] = ("weight",)
    _mixed: ClassVar[bool] = False

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


class FusedLayerNorm(_NormModule):
    """Layer normalization over the last dimensions; the output has the input's dtype.

    With `elementwise_affine` it owns `weight` (ones) and `bias` (zeros) of `normalized_shape`; else both are None.
    """

    bias: nn.Parameter | None
    _own_parameters = ("weight", "bias")

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros."""
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        params = self.weight, self.bias
        settings = self.normalized_shape, self.eps, self.memory_efficient
        return _normalize_with_params(input, params, *settings, rms=False, mixed=self._mixed)


class FusedRMSNorm(_NormModule):
    """RMS normalization over the last dimensions; arguments and dtypes as for `FusedLayerNorm`, without `bias`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, in its dtype."""
        settings = self.normalized_shape, self.eps, self.memory_efficient
        return _normalize_with_params(input, (self.weight,), *settings, rms=True, mixed=self._mixed)


class _AlwaysAffineNorm(_NormModule):
    _mixed = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        **kwargs: Any,
    ) -> None:
        if "elementwise_affine" in kwargs:
            name = type(self).__name__
            warnings.warn(f"{name} is always affine: leave elementwise_affine out", stacklevel=2)
            if not kwargs["elementwise_affine"]:
                raise RuntimeError(
                    f"{name} got elementwise_affine=False; use the class without Mixed in its name"
                )
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_AlwaysAffineNorm, FusedLayerNorm):
    """Layer normalization whose output has the dtype of its parameters; always affine.

    Raises:
        RuntimeError: `elementwise_affine=False`; `True` only warns, and other unknown keywords are ignored, as in Apex.
    """


class MixedFusedRMSNorm(_AlwaysAffineNorm, FusedRMSNorm):
    """RMS normalization whose output has the dtype of its weight; arguments as for `MixedFusedLayerNorm`."""
