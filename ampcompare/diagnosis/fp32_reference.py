"""A run in a wide type alongside the arm's: each operation is repeated on tensors that were never rounded to 16 bits.

A wide tensor belongs to a storage, so that views and operations in place need no care: that of a view is the same view
of it. It is dropped with the storage.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampcompare.base.tensors.products import HALF_DTYPES

CLEAN_EVERY = 64


def tensors_written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    written: list[Any] = []
    for place, name in _places_of_written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        written += value if isinstance(value, list | tuple) else [value]
    return [value for value in written if isinstance(value, Tensor)]


@lru_cache(maxsize=4096)
def _places_of_written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


class Fp32Reference:
    """The wide storages of all 16-bit tensors of a step, and of what was computed from them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.failures: set[str] = set()
        self._wide: dict[int, tuple[StorageWeakRef, Tensor]] = {}
        self._added = 0

    def wide_tensor_of(self, tensor: Tensor) -> Tensor | None:
        """Return the wide tensor of a tensor, of its shape and strides; None if it has none."""
        known = self._wide.get(tensor.untyped_storage()._cdata)
        if (
            known is None
            or known[0].expired()
            or known[1].numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
        ):
            return None
        return known[1].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def forget_wide_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Drop the wide tensors of some, which begin again from what these hold."""
        for tensor in tensors:
            self._wide.pop(tensor.untyped_storage()._cdata, None)

    def concerns_tensors(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether an operation on these tensors can differ from the arm's."""
        return any(
            tensor.dtype in HALF_DTYPES or tensor.untyped_storage()._cdata in self._wide for tensor in tensors
        )

    def repeat_operation_wide(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written_tensors: list[Tensor]
    ) -> Any:
        """Run an operation on wide tensors; what it writes to has one then. None if the wide type has no kernel."""
        for tensor in written_tensors:
            if tensor.is_floating_point() and self.wide_tensor_of(tensor) is None:
                self.keep_wide_tensor(tensor, tensor.detach().to(self.dtype, copy=True))
        return self._run_with_wide_arguments(func, args, kwargs, self._wide_tensor_or_widened_own)

    def run_on_arm_values(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written_tensors: list[Tensor]
    ) -> Any:
        """Run an operation on the arm's own values in the wide type; the values themselves are not written to."""
        targets = {id(tensor) for tensor in written_tensors}
        return self._run_with_wide_arguments(
            func, args, kwargs, lambda tensor: tensor.detach().to(self.dtype, copy=id(tensor) in targets)
        )

    def keep_wide_tensor(self, tensor: Tensor, wide: Tensor) -> None:
        """Make `wide`, of the same shape, the wide tensor of the part of a storage that `tensor` shows."""
        storage = tensor.untyped_storage()
        size = storage.nbytes() // tensor.element_size()
        if (
            tensor.is_contiguous()
            and tensor.numel() == size
            and wide.is_contiguous()
            and wide.dtype is self.dtype
        ):
            flat = wide.reshape(-1)
        else:
            known = self._wide.get(storage._cdata)
            if known is not None and not known[0].expired() and known[1].numel() == size:
                flat = known[1]  # of other parts, as of the results of one split, which share a storage
            else:
                narrow = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
                # a tensor of the wide type too: the arm's values stay
                flat = narrow.to(self.dtype, copy=True)
            flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(wide)
        self._wide[storage._cdata] = (StorageWeakRef(storage), flat)
        self._added += 1
        if self._added % CLEAN_EVERY == 0:
            self._wide = {key: held for key, held in self._wide.items() if not held[0].expired()}

    def _wide_tensor_or_widened_own(self, tensor: Tensor) -> Tensor:
        wide = self.wide_tensor_of(tensor)
        return tensor.detach().to(self.dtype) if wide is None else wide

    def _run_with_wide_arguments(
        self, func: Callable[..., Any], args: Any, kwargs: Any, wide: Callable[[Tensor], Tensor]
    ) -> Any:
        def widen(value: Any) -> Any:
            if isinstance(value, Tensor):
                return wide(value) if value.is_floating_point() else value
            # A cast to 16 bits does not happen here; one to fp32 must not narrow.
            return self.dtype if isinstance(value, torch.dtype) and value.is_floating_point else value

        try:
            return func(*_map_argument_leaves(widen, args), **_map_argument_leaves(widen, kwargs))
        except (RuntimeError, TypeError, NotImplementedError):
            self.failures.add(getattr(func, "__name__", str(func)))
            return None


def _map_argument_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments of an operation with each leaf changed; these hold no other containers."""
    if isinstance(value, tuple | list):
        return type(value)([_map_argument_leaves(change, item) for item in value])
    if isinstance(value, dict):
        return {name: _map_argument_leaves(change, item) for name, item in value.items()}
    return change(value)
