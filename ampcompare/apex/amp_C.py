"""Apex's compiled operations by their names and argument order, on torch's list kernels, for any device.

Each takes `(chunk_size, noop_flag, tensor_lists, ...)`; `chunk_size` has no part here. `noop_flag` is an int32 tensor
of one element; an operation that checks for inf or NaN sets it to 1 on the device and never clears it. Lists must be
non-empty, of equal length, row by row of one shape, floating, and on the device of the flag; else `RuntimeError`.
Dtypes may differ within a list; all arithmetic is fp32. Source: Apex 25.05, the bindings of its module `amp_C`.
"""

from __future__ import annotations

import torch

from ampcompare.apex.multi_tensor_apply.arithmetic import update_scale_with_hysteresis
from ampcompare.apex.multi_tensor_apply.optimizer_ops import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from ampcompare.apex.multi_tensor_apply.scaling_ops import (
    multi_tensor_axpby,
    multi_tensor_l2norm,
    multi_tensor_l2norm_mp,
    multi_tensor_l2norm_scale,
    multi_tensor_scale,
    multi_tensor_unscale_l2norm,
)

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

update_scale_hysteresis = torch.no_grad()(update_scale_with_hysteresis)
