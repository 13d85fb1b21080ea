"""`FP16_Optimizer` of a script under an arm: it scales nothing and keeps no masters, and the arm does in its place.

The weights that it gets are fp32 by then, lifted from fp16. Its calls become those of a script without mixed precision:

| the script calls | what happens |
|---|---|
| `optimizer.backward(loss)` | `loss.backward()` |
| `optimizer.clip_master_grads(max_norm)` | `clip_grad_norm_` on the parameters of the inner optimizer |
| `optimizer.step()`, `zero_grad()` | those of the inner optimizer |
| a model of `network_to_half` | its `tofp16` leaves the input to the arm |
"""

import importlib
from typing import Any

from torch import nn

from ampcompare.base.patches import Subscriptions
from ampcompare.script.imports.fp16_classes import MODULES, fp16_optimizer_classes
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.training.precision.base import owned_params

METHODS = {"backward", "update_master_grads", "clip_master_grads", "step", "zero_grad"}


def disable_fp16_optimizers(rows: RecordedSteps | None, events: Subscriptions) -> None:
    """Let both classes of Apex do nothing by themselves from now on."""
    events.wrap(importlib.import_module(MODULES[0]).tofp16, "forward", lambda original, module, value: value)
    for kind in fp16_optimizer_classes():
        events.wrap(kind, "__init__", _PassThroughFP16Optimizer(rows).init)
        for method in METHODS & vars(kind).keys():
            events.wrap(kind, method, getattr(_PassThroughFP16Optimizer, method))


class _PassThroughFP16Optimizer:
    def __init__(self, rows: RecordedSteps | None) -> None:
        self._rows = rows

    def init(self, original: Any, wrapper: Any, init_optimizer: Any, *_args: Any, **_settings: Any) -> None:
        params = [list(group["params"]) for group in init_optimizer.param_groups]
        original(wrapper, init_optimizer, verbose=False)
        for group, own in zip(init_optimizer.param_groups, params, strict=True):
            group["params"] = own  # which the class of 2018 has replaced by copies
        if hasattr(wrapper, "fp32_groups"):
            wrapper.fp32_groups = wrapper.fp16_groups
        if self._rows is not None:
            self._rows.ignored.add(wrapper)

    @staticmethod
    def backward(
        original: Any, wrapper: Any, loss: Any, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        loss.backward(retain_graph=retain_graph)

    @staticmethod
    def update_master_grads(original: Any, wrapper: Any) -> None:
        pass

    @staticmethod
    def clip_master_grads(original: Any, wrapper: Any, max_norm: float, norm_type: float = 2) -> Any:
        return nn.utils.clip_grad_norm_(owned_params(wrapper.optimizer), max_norm, norm_type)

    @staticmethod
    def step(original: Any, wrapper: Any, closure: Any = None) -> Any:
        return wrapper.optimizer.step() if closure is None else wrapper.optimizer.step(closure)

    @staticmethod
    def zero_grad(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        wrapper.optimizer.zero_grad()
