"""The object through which legacy code calls an operation of `amp_C`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor


class MultiTensorApply:
    """Call `amp_C` operations with a fixed chunk size.

    The operations here are built on torch's own list kernels and are always available. The class attributes exist
    because scripts read them, and set them to test their own fallbacks.
    """

    available: ClassVar[bool] = True
    warned: ClassVar[bool] = False
    import_err: ClassVar[ImportError | None] = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Raise RuntimeError if `MultiTensorApply.available` was set to False."""
        if not MultiTensorApply.available:
            raise RuntimeError(
                "MultiTensorApply.available is False, so no multi-tensor operation may run"
                f" (import_err: {MultiTensorApply.import_err}). Set it back to True: the operations need no extension."
            )

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Run `op(chunk_size, noop_flag_buffer, tensor_lists, *args)` and return what it returns."""
        self.check_avail()
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
