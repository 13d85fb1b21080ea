"""A backend in one file: bfloat16 weights and activations, with fp32 master weights that the optimizer steps.

It is what O2 would be in bfloat16, of which Apex knows nothing. bfloat16 has the range of fp32, so no loss is scaled
and no step is skipped; it has 8 bits of precision, so masters keep the updates that a bfloat16 weight would round away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampcompare.training.precision.base import Precision, StepOutcome

__all__ = ["BF16Params"]


class BF16Params(Precision):
    """Models in bfloat16, batch norm in fp32 unless told otherwise, optimizers on fp32 masters.

    Args:
        device: where the models are; any will do.
        bn_fp32: keep weights and statistics of batch norm in fp32.
    """

    half_dtype = torch.bfloat16

    def __init__(self, *, device: str = "cpu", bn_fp32: bool = True) -> None:
        self.bn_fp32 = bn_fp32
        self._exact_output_of: dict[Tensor, Tensor] = {}
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        for model in models:
            for module in model.modules():
                if not (self.bn_fp32 and isinstance(module, _BatchNorm)):
                    self._cast_module(module)
            model.register_forward_pre_hook(_cast_inputs, with_kwargs=True)
            model.register_forward_hook(_cast_outputs)
            model.register_load_state_dict_post_hook(self._start_from_loaded)
        for optimizer in optimizers:
            self._adopt(optimizer)
        self._exact_output_of.clear()
        return list(models), list(optimizers)

    def _cast_module(self, module: nn.Module) -> None:
        """Cast the tensors that belong to `module` itself, in place, and remember the weights as they were."""
        for param in module.parameters(recurse=False):
            if param.dtype == torch.float32:
                self._exact_output_of[param] = param.detach().clone()
                param.data = param.data.to(torch.bfloat16)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:
                setattr(module, name, buffer.to(torch.bfloat16))

    def _adopt(self, optimizer: Optimizer) -> None:
        """Replace each bfloat16 parameter of `optimizer` by a master, in groups that were added later too."""
        pairs = self._pairs.setdefault(id(optimizer), [])
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if param.dtype == torch.bfloat16 and param.requires_grad:
                    master = self._exact_output_of.get(param, param.detach().float()).requires_grad_()
                    group["params"][index] = master
                    if param in optimizer.state:
                        optimizer.state[master] = optimizer.state.pop(param)
                    pairs.append((param, master))

    def _start_from_loaded(self, module: nn.Module, keys: Any) -> None:
        """Set the masters to weights that a checkpoint loaded, which were rounded to bfloat16."""
        with torch.no_grad():
            for pairs in self._pairs.values():
                for param, master in pairs:
                    master.copy_(param)

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizers: Sequence[Optimizer], *, loss_id: int = 0, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        for optimizer in optimizers:
            self._adopt(optimizer)
        yield loss
        if delay_unscale:
            # ranks exchange gradients in the last pass only: what was moved before would stay unshared
            return
        for optimizer in optimizers:
            for param, master in self._pairs[id(optimizer)]:
                if param.grad is not None:
                    grad = param.grad.float()
                    master.grad = grad if master.grad is None else master.grad + grad
                    param.grad = None

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = super().step(*optimizers)
        with torch.no_grad():
            for optimizer in optimizers:
                for param, master in self._pairs[id(optimizer)]:
                    param.copy_(master)
        return outcome


def _cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(map(_to_bf16, args)), {name: _to_bf16(value) for name, value in kwargs.items()}


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


def _cast_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return a tensor in fp32, so that losses outside the model are computed in it; anything else as it is."""
    return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output
