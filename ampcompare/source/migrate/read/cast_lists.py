"""Which functions and layers of torch autocast on CUDA, and O1, compute in another type than that of their inputs.

By bare names, of `torch`, `torch.nn.functional` and methods of tensors. Sources: the list of
https://docs.pytorch.org/docs/stable/amp.html, and Apex 25.05, `apex/amp/lists`; tests measure both.
"""

# In fp16, whatever they get.
HALF_UNDER_BOTH = frozenset({
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm", "mv",
})  # fmt: skip
HALF_UNDER_AUTOCAST = HALF_UNDER_BOTH | {"chain_matmul", "prelu", "einsum", "scaled_dot_product_attention"}
# In fp32 under autocast, by themselves or by what they call; a model of O2 computes them in fp16.
WIDE_UNDER_AUTOCAST = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "square", "cumsum", "cumprod", "sum", "prod", "norm", "dist", "cdist", "logsumexp", "softmax",
    "log_softmax", "softmin", "softplus", "layer_norm", "group_norm", "rms_norm", "cosine_similarity", "normalize",
    "pairwise_distance", "pdist",
})  # fmt: skip
LOSSES_UNDER_AUTOCAST = frozenset({
    "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "kl_div",
    "l1_loss", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss",
    "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss",
})  # fmt: skip
CAST_BY_AUTOCAST = HALF_UNDER_AUTOCAST | WIDE_UNDER_AUTOCAST | LOSSES_UNDER_AUTOCAST | {"renorm"}
# In fp32 under O1, and in the type of their inputs under autocast.
WIDE_UNDER_O1_ALONE = frozenset({"gelu", "std", "var", "interpolate", "grid_sample", "local_response_norm"})
CAST_BY_O1 = HALF_UNDER_BOTH | WIDE_UNDER_AUTOCAST | LOSSES_UNDER_AUTOCAST | WIDE_UNDER_O1_ALONE
# Layers of torch.nn, with the functions of `WIDE_UNDER_AUTOCAST` that they call.
WIDE_LAYERS = {
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Softmin": "softmin", "Softplus": "softplus",
    "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm",
    "CosineSimilarity": "cosine_similarity", "PairwiseDistance": "pairwise_distance",
}  # fmt: skip
