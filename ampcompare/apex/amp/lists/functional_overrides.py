"""Functions of `torch.nn.functional` that O1 casts.

Source: Apex 25.05, `apex/amp/lists/functional_overrides.py`.
"""

from types import ModuleType

import torch.nn.functional

MODULE: ModuleType = torch.nn.functional

FP16_FUNCS: list[str] = [
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d"),
    *("conv_transpose2d", "conv_transpose3d", "conv_tbc", "linear"),
]

FP32_FUNCS: list[str] = [
    # resampling and pointwise functions that lose range or precision
    *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu"),
    # normalization
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity"),
    # losses
    *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy"),
    *("hinge_embedding_loss", "kl_div", "l1_loss"),
    *("mse_loss", "margin_ranking_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "multi_margin_loss"),
    *("nll_loss", "binary_cross_entropy_with_logits"),
    *("smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss"),
    "ctc_loss",
]

BANNED_FUNCS: list[tuple[str, str]] = [
    (
        "binary_cross_entropy",
        "F.binary_cross_entropy and torch.nn.BCELoss need float32 probabilities, but under O1 the layer before them "
        "gave float16.  Use torch.nn.BCEWithLogitsLoss (or F.binary_cross_entropy_with_logits) in place of sigmoid and "
        "BCELoss; or call amp.register_float_function(torch, 'sigmoid') before amp.initialize; or pass "
        "allow_banned=True to amp.init if the rounding of probabilities to float16 does not matter.",
    )
]
