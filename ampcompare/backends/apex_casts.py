"""Which functions O1 and autocast cast, as plain names.

Source: Apex 25.05, `apex/amp/lists`; torch's documentation of autocast on CUDA.
"""

from __future__ import annotations

__all__ = ["O1_TO_FP16", "O1_TO_FP32", "O1_WIDEST", "OTHERWISE_IN_AUTOCAST"]

# Group: names; a name without a prefix is of torch, of torch.nn.functional or of both.
O1_TO_FP16: dict[str, tuple[str, ...]] = {
    "convolutions": (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc"),
    ),
    "matrix products": (
        *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "__matmul__"),
    ),
    "activations": ("prelu",),
}
O1_TO_FP32: dict[str, tuple[str, ...]] = {
    "softmax and the like": ("softmax", "log_softmax", "softmin", "softplus", "gelu"),
    "norms": ("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    "resampling": ("interpolate", "grid_sample"),
    "losses": (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div", "ctc_loss"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss"),
        *("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "poisson_nll_loss"),
        *("soft_margin_loss", "triplet_margin_loss"),
    ),
    "functions": (
        *("exp", "expm1", "log", "log2", "log10", "pow", "reciprocal", "rsqrt", "acos", "asin", "cosh", "sinh", "tan"),
        *("erfinv", "renorm", "__pow__", "__rpow__", "__ipow__"),
    ),
    "reductions": ("sum", "prod", "cumsum", "cumprod", "norm", "dist", "std", "var"),
    "moves": ("cpu",),
}
O1_WIDEST: dict[str, tuple[str, ...]] = {
    "arithmetic": (
        *("add", "mul", "div", "addcmul", "addcdiv", "atan2", "bilinear", "cross", "dot"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
        *("__truediv__", "__rtruediv__", "__itruediv__", "__div__", "__rdiv__", "__idiv__"),
    ),
    "comparisons": (
        *("eq", "ne", "lt", "le", "gt", "ge", "equal", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    ),
    "joins": ("cat", "stack"),
}
# Visible differences: name, type under O1, type under autocast on CUDA.
OTHERWISE_IN_AUTOCAST: tuple[tuple[str, str, str], ...] = (
    ("F.gelu", "fp32", "as its input"),
    ("std, var", "fp32", "as their input"),
    ("x.softmax(), torch.softmax", "as their input", "fp32"),
    ("log1p, logsumexp, cdist", "as their input", "fp32"),
    ("x.cpu()", "fp32", "as its input"),
    ("products of fp64", "fp16", "fp64"),
)
