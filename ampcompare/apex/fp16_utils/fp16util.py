"""Convert models to half precision, and carry values between model parameters and fp32 master parameters.

Source: Apex 25.05, `apex.fp16_utils.fp16util`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from ampcompare.apex import deprecated_warning
from ampcompare.base.tensors.lists import copy_tensors_by_dtype, flatten, unflatten

clip_grad_norm = clip_grad_norm_


class tofp16(nn.Module):
    """Cast the input to fp16; a first layer for a half-precision model."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` in fp16."""
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Return `module` with all its batch norms that have affine parameters turned to fp32, in place."""
    if _is_affine_batch_norm(module):
        module.float()
    for child in module.children():
        BN_convert_float(child)
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Return `network`, cast to fp16 except affine batch norms, behind a layer that casts its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of `module` itself, not those of its children.

    Parameters stay the same objects, so optimizers and hooks keep their hold on them.
    """
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return `network` with everything cast to `dtype` in place, except batch norms with affine parameters.

    A batch norm without affine parameters is cast, its running statistics included.
    """
    for module in network.modules():
        if _is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """Run a converted model on fp16 inputs; the model passed in is converted in place."""

    def __init__(self, network: nn.Module) -> None:
        deprecated_warning(
            "fp16_utils.FP16Model is deprecated in Apex; torch.autocast needs no converted model"
        )
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        """Return the model's output for the inputs, each cast to fp16."""
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return the trainable parameters of `model`, and fp32 masters for an optimizer; with `flat_master` one vector."""
    model_params = [param for param in model.parameters() if param.requires_grad]
    if flat_master:
        flat = nn.Parameter(flatten([param.data.float() for param in model_params]))
        flat.grad = torch.empty_like(flat)
        return model_params, [flat]
    return model_params, [param.detach().clone().float().requires_grad_() for param in model_params]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the model to the masters that `prep_param_lists` made, with the same `flat_master`.

    A parameter without gradient leaves its master without one, or zeros in a flat master.
    """
    if flat_master:
        grads = [torch.zeros_like(param) if param.grad is None else param.grad.data for param in model_params]
        flat = flatten([grad.float() for grad in grads])
        if master_params[0].grad is None:
            master_params[0].grad = torch.empty_like(master_params[0])
        master_params[0].grad.data.copy_(flat)
        return
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        sources.append(model.grad.data)
        targets.append(master.grad.data)
    copy_tensors_by_dtype(targets, sources)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the values of the masters back to the model, rounding to its dtypes."""
    values = [master.data for master in master_params]
    if flat_master:
        values = list(unflatten(values[0], model_params))
    copy_tensors_by_dtype([param.data for param in model_params], values)


def to_python_float(t: Any) -> Any:
    """Return the number that a one-element tensor (or a sequence, which has no `item`) contains."""
    return t.item() if hasattr(t, "item") else t[0]


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine is True
