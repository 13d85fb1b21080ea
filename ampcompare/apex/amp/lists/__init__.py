"""Which functions O1 casts, and how: live lists, read when O1 starts, that scripts may edit before."""

from . import functional_overrides, tensor_overrides, torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
