"""The `DistributedDataParallel` of a script: made again once weights are cast, and the type that it averages in."""

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ampcompare.base.environment.ranks import has_other_ranks
from ampcompare.base.errors import PreparationError, UnsupportedCombination
from ampcompare.base.location import message_with_script_line
from ampcompare.base.patches import Subscriptions
from ampcompare.training.parallel.replication import reduce_bucket_in_dtype

KEPT = ("training", "require_backward_grad_sync")  # what a script may have set since


def make_wrappers_reduce_in_dtype(dtype: torch.dtype, name: str, events: Subscriptions) -> None:
    """Let each wrapper that the script makes from now on average gradients in `dtype`."""

    def make(original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, *args, **kwargs)
        wrapper.register_comm_hook(dtype, _reduce_bucket_in_dtype)

    def register(original: Any, wrapper: Any, state: Any, hook: Any) -> None:
        if hook is not _reduce_bucket_in_dtype:
            raise UnsupportedCombination(
                message_with_script_line(
                    f"the script gives DistributedDataParallel a communication hook, and {name} needs its own"
                )
            )
        original(wrapper, state, hook)

    events.wrap(nn.parallel.DistributedDataParallel, "__init__", make)
    events.wrap(nn.parallel.DistributedDataParallel, "register_comm_hook", register)


def _reduce_bucket_in_dtype(dtype, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types, and these are text
    return reduce_bucket_in_dtype(dtype, bucket)


class ParallelWrappers:
    """The wrappers that a script has made, in their order, which is that of all ranks."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Any], tuple[Any, ...], dict[str, Any]]] = []

    def install(self, events: Subscriptions) -> None:
        """Follow them from now on."""
        events.wrap(nn.parallel.DistributedDataParallel, "__init__", self._note_wrapper_made)

    def _note_wrapper_made(self, original: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(wrapper, module, *args, **kwargs)
        if all(reference() is not wrapper for reference, _, _ in self._made):
            self._made.append((weakref.ref(wrapper), args, kwargs))

    def wrapped_models_with(self, ids: Collection[int]) -> list[nn.Module]:
        """Return the models in wrappers that have one of these parameters, given by their ids."""
        wrappers = [wrapper for reference, _, _ in self._made if (wrapper := reference()) is not None]
        return [one.module for one in wrappers if any(id(param) in ids for param in one.parameters())]

    def is_only_rank(self) -> bool:
        """Return whether there is no other rank."""
        return not has_other_ranks()

    def _wrappers_with_arguments(
        self, models: Sequence[nn.Module]
    ) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
        for reference, args, kwargs in list(self._made):
            wrapper = reference()
            if wrapper is not None and any(wrapper.module is model for model in models):
                yield wrapper, args, kwargs

    def refuse_communication_hooks(self, models: Sequence[nn.Module], name: str) -> None:
        """Refuse to make wrappers of models again that have a communication hook, which would be lost."""
        for wrapper, _, _ in self._wrappers_with_arguments(models):
            if any(hook is not _reduce_bucket_in_dtype for hook, _ in getattr(wrapper, "_comm_hooks", ())):
                raise PreparationError(
                    message_with_script_line(
                        f"DistributedDataParallel has a communication hook, which {name} would lose by casting the "
                        "weights; leave the hook out, or use an arm that keeps the weights"
                    )
                )

    def make_wrappers_again(self, models: Sequence[nn.Module]) -> None:
        """Make the wrappers of models, whose weights were cast, again; a collective call of all ranks."""
        for wrapper, args, kwargs in self._wrappers_with_arguments(models):
            kept = {name: getattr(wrapper, name) for name in KEPT}
            module = wrapper.module
            modes = {id(part): part.training for part in module.modules()}
            nn.parallel.DistributedDataParallel.__init__(wrapper, module, *args, **kwargs)
            for part in module.modules():
                part.training = modes[id(part)]
            for name, value in kept.items():
                setattr(wrapper, name, value)
