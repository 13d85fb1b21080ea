"""Which code of a script gets gradients within a backward pass: hooks, and functions with a backward of their own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.location import find_code_of_callable, is_users_or_installed_file
from ampcompare.base.patches import GRADIENT_READS, Subscriptions, calling_frame
from ampcompare.source.torch_methods import LIMITING

# Modules of torch that call a hook of a module, or the backward of a function, and nothing else of a script.
CALLERS = frozenset(("torch.utils.hooks", "torch.autograd.function"))


class GradientHooks:
    """Knows hooks of tensors from their registration on, and other code by the module of torch that calls it."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()

    def follow_registrations(self, events: Subscriptions) -> None:
        """Note what the script registers from now on, until the end of `events`."""
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            events.wrap(Tensor, name, self._note_registered_hook)
        for name in ("backward", "full_backward", "full_backward_pre"):
            events.wrap(nn.Module, f"register_{name}_hook", self._note_registered_hook)

    def _note_registered_hook(self, original: Any, owner: Any, hook: Any, *args: Any, **kwargs: Any) -> Any:
        if (code := find_code_of_callable(hook)) is not None and is_users_or_installed_file(code.co_filename):
            self._codes.add(code)
        return original(owner, hook, *args, **kwargs)

    def is_gradient(self, tensor: Tensor) -> bool:
        """Return whether code of the script that a backward pass calls has got this very tensor."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code, caller = frame.f_code, frame.f_back
            if code in self._codes or (
                _is_called_with_gradients(caller) and is_users_or_installed_file(code.co_filename)
            ):
                given = inspect.getargvalues(frame)
                values = [given.locals.get(name) for name in (*given.args, given.varargs or "")]
                return any(_is_or_holds_tensor(value, tensor) for value in values)
            frame = caller
        return False


def _is_called_with_gradients(caller: FrameType | None) -> bool:
    return caller is not None and caller.f_globals.get("__name__") in CALLERS


def _is_or_holds_tensor(value: Any, tensor: Tensor) -> bool:
    if isinstance(value, tuple | list):
        return any(element is tensor for element in value)
    if isinstance(value, Tensor) and value.is_leaf and value.requires_grad and not tensor.is_sparse:
        with GRADIENT_READS.pause_notices_of_reads():
            gradient = value.grad  # of a parameter, which a hook behind its gradient gets
        if gradient is not None and not gradient.is_sparse:
            return bool(gradient.untyped_storage()._cdata == tensor.untyped_storage()._cdata)
    return value is tensor


def follow_tensor_limits(
    events: Subscriptions, is_asked: Callable[[], bool], see: Callable[[Any, Any], None]
) -> None:
    """Follow lines of the script that limit a tensor to a size of their own choice.

    A limit of zero is the same at each loss scale, and a tensor as the limit may have been made of gradients.

    Args:
        events: the subscriptions of the follower, which end it.
        is_asked: whether a limit at present is of interest.
        see: gets the tensor and the result.
    """

    def limit(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if is_asked() and any(isinstance(one, int | float) and one != 0 for one in (*args, *kwargs.values())):
            if is_users_or_installed_file(calling_frame().f_code.co_filename):
                see(tensor, result)
        return result

    for name in LIMITING:
        for place in (Tensor, torch):
            events.wrap(place, name, limit)
            events.wrap(place, f"{name}_", limit)
