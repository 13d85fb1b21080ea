"""A `forward` that is set on one module, and follows the module through copies, pickles and replicas."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class ReplacedForward:
    """Stands as `forward` of one module, at a fraction of the cost of two hooks.

    It refers to one module: copies of the module run their own weights. Replicas of `nn.DataParallel` share what is set
    on the instance, so each of them gets its own replacement.
    """

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self.module = module
        self.original = original

    def install(self) -> None:
        """Replace `forward` on this instance."""
        self.module.forward = self
        self.module._replicate_for_data_parallel = self.replicate_module  # type: ignore[method-assign]

    def replicate_module(self) -> nn.Module:
        """Return what `nn.Module._replicate_for_data_parallel` returns, with its own forward."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        self.copy_for_replica(replica).install()
        return replica

    def copy_for_replica(self, replica: nn.Module) -> ReplacedForward:
        """Return the same for a replica."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.module = replica
        original = self.original
        if isinstance(original, ReplacedForward):
            twin.original = original.copy_for_replica(replica)
        elif isinstance(original, MethodType) and original.__self__ is self.module:
            twin.original = MethodType(original.__func__, replica)
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.original(*args, **kwargs)
