"""Give autocast on the CPU the casts of autocast for CUDA, whose lists of functions are other ones.

On the CPU, `torch.autocast` computes softmax, sums, norms, exponentials and powers in fp16. For CUDA it computes them
in fp32, so without this a loss can round, or overflow, where it would not on a GPU. The lists are those of torch's
`ATen/autocast_mode.h`; functions for which torch has a cast on the CPU already keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["cast_as_for_cuda"]

FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
    "sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm",
    "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList", "norm.Scalar",
    "norm.ScalarOpt_dim",
)  # fmt: skip
LOWER = (
    "prelu", "addmv", "addr", "mv", "einsum", "linalg_vecdot", "chain_matmul", "linalg_multi_dot",
    "lstm_cell", "gru_cell",
)  # fmt: skip


def cast_as_for_cuda() -> torch.library.Library:
    """Register the casts; they act where autocast for CUDA is enabled, while the result is alive."""
    library = torch.library.Library("aten", "IMPL")
    for name in (*FP32, *LOWER):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if function is None or torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            continue
        library.impl(name, _kernel(function, torch.float32 if name in FP32 else None), "AutocastCPU")
    return library


def _kernel(function: Any, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return what runs in the place of a function: it, on cast arguments, with autocast off inside.

    Args:
        dtype: to cast to; None for that of autocast.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if torch.is_autocast_enabled("cuda") and options.get("dtype") is None:
                to = dtype or torch.get_autocast_dtype("cuda")
                args = tuple(_cast(args, to))
                options = dict(zip(options, _cast(options.values(), to), strict=True))
            return function(*args, **options)

    return kernel


def _cast(values: Any, dtype: torch.dtype) -> Iterator[Any]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each
        elif isinstance(each, (list, tuple)):
            yield type(each)(_cast(each, dtype))
        else:
            yield each
