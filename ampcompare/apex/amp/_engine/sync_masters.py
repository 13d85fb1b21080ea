"""Update fp32 masters when weights are loaded into the model after the masters were created.

Apex does not, so its next step overwrites the loaded weights.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from ampcompare.apex.amp._amp_state import _amp_state

__all__ = ["refresh_masters", "watch_loads"]


def watch_loads(models: list[nn.Module], optimizers: list[Any]) -> None:
    """Refresh masters whenever one of the models, or a part of one, loads a state dict."""
    _amp_state.master_optimizers += [weakref.ref(optimizer) for optimizer in optimizers]
    for model in models:
        for module in model.modules():
            if refresh_masters not in module._load_state_dict_post_hooks.values():
                module.register_load_state_dict_post_hook(refresh_masters)


def refresh_masters(module: nn.Module, incompatible_keys: Any) -> None:
    """Copy a module's own half parameters into their masters; a load-state-dict post hook."""
    types = (torch.float16, torch.bfloat16)
    half = [param for param in module._parameters.values() if param is not None and param.dtype in types]
    if not half:
        return
    for reference in _amp_state.master_optimizers:
        optimizer = reference()
        if optimizer is None or not optimizer._amp_stash.lazy_init_called:
            continue
        stash = optimizer._amp_stash
        for param in half:
            index = stash.index_of_half.get(id(param))
            if index is not None:
                with torch.no_grad():
                    stash.all_fp32_from_fp16_params[index].copy_(param)
