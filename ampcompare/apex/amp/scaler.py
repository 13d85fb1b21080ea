"""Scale losses, and unscale and check gradients with one batched kernel per device and dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from ampcompare.base.tensors.lists import group_tensors_by_type
from ampcompare.base.tensors.loss_scale import (
    FLOAT32_MAX,
    DeviceLossScale,
    is_loss_scale_exact_on_device,
    next_scale_and_good_steps,
)

from ._amp_state import _amp_state, maybe_print


class LossScaler:
    """Hold one loss scale: static, or dynamic (halved on overflow, doubled after 2000 clean backward passes).

    Scripts set `_loss_scale`, `_unskipped` and `_scale_seq_len` at any time.

    Args:
        loss_scale: a number for a static scale, "dynamic" for one that moves.
        init_scale: the first dynamic scale.
        scale_factor: ignored, as in Apex; the factor is 2.
        scale_window: clean backward passes in a row until a dynamic scale doubles.
        min_loss_scale: the floor, which holds when halving only; None or 0 for none.
        max_loss_scale: the ceiling, for the first dynamic scale and when doubling; None for none.

    Source: Apex 25.05, `apex/amp/scaler.py`.
    """

    warned_no_fused_kernel: ClassVar[bool] = False
    warned_unscaling_non_fp32_grad: ClassVar[bool] = False
    has_fused_kernel: ClassVar[bool] = True

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._max_loss_scale = max_loss_scale
        self._min_loss_scale = min_loss_scale
        self._scale_seq_len = scale_window
        self._host_unskipped = 0
        self._host_overflow = False
        self._host_scale: float = min(max_loss_scale, init_scale) if self.dynamic else loss_scale  # type: ignore[type-var, assignment]
        self._initial_scale = self._host_scale
        # The scale on the device: whether it has the host's values, whether it is newer, and the flags of passes.
        self._on_device: DeviceLossScale | None = None
        self._loaded = False
        self._ahead = False
        self._repeated = False
        self._pass_flag: Tensor | None = None
        self._last_flag: Tensor | None = None
        self._scalars = _ScalarsByDevice()
        self._overflow_buffer: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached tensors: scripts of Apex pickle scalers, and its files hold plain values."""
        return {**self.__dict__, "_scalars": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _scalars=_ScalarsByDevice())

    def loss_scale(self) -> float:
        """Return the current scale; waits for the device where the scale lives there."""
        return self._loss_scale

    @property
    def _loss_scale(self) -> float:
        if self._ahead:
            self._read_scale_from_device()
        return self._host_scale

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        if self._ahead:
            self._read_scale_from_device()
        self._host_scale = value
        self._loaded = False

    @property
    def _unskipped(self) -> int:
        if self._ahead:
            self._read_scale_from_device()
        return self._host_unskipped

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        if self._ahead:
            self._read_scale_from_device()
        self._host_unskipped = value
        self._loaded = False

    @property
    def _has_overflow(self) -> bool:
        if self._last_flag is not None:
            self._host_overflow = bool(self._last_flag.item())
            self._last_flag = None
        return self._host_overflow

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._host_overflow = value
        self._last_flag = None

    def _read_scale_from_device(self) -> None:
        assert self._on_device is not None
        if _amp_state.deferred is not None:
            _amp_state.deferred.flush()
        self._host_scale, self._host_unskipped = self._on_device.read_scale_and_good_steps()
        self._ahead = False

    def prepare_scale_on_device(self, device: torch.device) -> bool:
        """Return whether backward passes on `device` need no host read, and prepare the device scale if so."""
        if not self.dynamic or self._overflow_buffer is not None or _amp_state.strict:
            return False
        if type(self).update_scale is not _UPDATE_SCALE:  # a replacement that may use the return value
            return False
        on_device = self._on_device
        if (self._loaded or self._ahead) and on_device is not None and on_device.device == device:
            return True
        scale = self._loss_scale
        if not is_loss_scale_exact_on_device(scale, self._min_loss_scale, self._max_loss_scale):
            return False
        if on_device is None or on_device.device != device:
            on_device = self._on_device = DeviceLossScale(device)
            on_device.repeated = self._repeated
        on_device.set_scale_and_good_steps(scale, self._host_unskipped)
        self._loaded = True
        return True

    def scale_for_product(self) -> float | Tensor:
        """Return the current scale, where it lives on the device as an fp32 scalar that will not change."""
        return self._on_device.copy() if self._ahead and self._on_device is not None else self._host_scale

    def device_initial_grad(self) -> Tensor:
        """Return the scale of a scaler on the device, fp32 of shape (), for one backward pass to start from."""
        assert self._on_device is not None
        return self._on_device.initial_grad()

    def begin_device_pass(self) -> Tensor:
        """Make `unscale_` use the device's scale from now on.

        Returns:
            The overflow flag that it sets: fp32 of shape () on the device, above 0 after an overflow.
        """
        assert self._on_device is not None
        self._pass_flag = flag = self._on_device.new_overflow_flag()
        return flag

    def end_device_pass(self, *, update: bool) -> None:
        """Finish `begin_device_pass`, and move the scale as `update_scale` does."""
        flag, self._pass_flag = self._pass_flag, None
        self._host_overflow = False
        self._last_flag = flag if update else None
        if flag is not None and self._on_device is not None and update:
            max_scale: float = self._max_loss_scale  # type: ignore[assignment]
            self._on_device.update(flag, self._scale_seq_len, self._min_loss_scale, max_scale)
            self._ahead = True

    def prepare_graph_capture(self) -> None:
        """Prepare for a CUDA graph: each update applies all bounds, including those that cannot be reached yet."""
        self._repeated = True
        if self._on_device is not None:
            self._on_device.repeated = True

    def note_repeated_pass(self) -> None:
        """Record that the device has repeated a recorded pass, and moved the scale."""
        self._ahead = self._on_device is not None

    def has_scale_history(self) -> bool:
        """Return whether the scale or its counter has changed since construction."""
        return self._unskipped > 0 or self._loss_scale != self._initial_scale

    @property
    def _overflow_buf(self) -> Tensor:
        """Int32 flag of one element for kernels called by the user; `update_scale` honors it."""
        if self._overflow_buffer is None:
            device = self._scalars.first_flag_device() or torch.device(
                "cuda" if torch.cuda.is_available() else "cpu"
            )
            self._overflow_buffer = torch.zeros(1, dtype=torch.int32, device=device)
        return self._overflow_buffer

    @_overflow_buf.setter
    def _overflow_buf(self, value: Tensor) -> None:
        self._overflow_buffer = value

    def initial_grad_from_host(self, device: torch.device) -> Tensor | None:
        """Return the host's scale as an fp32 scalar to multiply with or to start from; None if it does not fit."""
        return self._scalars.initial_grad(device, self._loss_scale)

    def unscale_(self, grads: Sequence[Tensor], *, uniform: bool = False) -> None:
        """Divide gradients by the scale in place, and record any non-finite element if the scaler is dynamic.

        With a static scale of exactly 1 nothing is done.

        Args:
            grads: of any dtype, device and layout.
            uniform: promises that they have one dtype and one device.
        """
        if not grads or (not self.dynamic and self._loss_scale == 1.0):
            return
        if _amp_state.strict:
            grads = grads[: self._num_grads_before_overflow(grads)]
        if grads:
            self._unscale_each_type(grads, uniform)

    def _unscale_each_type(self, grads: Sequence[Tensor], uniform: bool = False) -> None:
        first = grads[0]
        device, dtype = first.device, first.dtype
        if not uniform and any(grad.dtype is not dtype or grad.device != device for grad in grads):
            self._unscale_mixed_types(grads)
            return
        if dtype is not torch.float32:
            self._warn_about_gradient_dtype(dtype)
        try:
            self._unscale_and_flag(grads, device)
        except NotImplementedError:
            # sparse gradients: the dispatcher refuses the list before it touches a tensor
            self._unscale_mixed_types(grads)

    def _unscale_and_flag(self, grads: Sequence[Tensor], device: torch.device) -> None:
        if self._pass_flag is not None and self._on_device is not None:
            flag, inverse = self._pass_flag, self._on_device.inverse
        else:
            flag = self._scalars.overflow_flag(device)
            inverse = self._scalars.inverse_scale(device, self._loss_scale, strict=_amp_state.strict)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)  # type: ignore[arg-type]

    def _unscale_mixed_types(self, grads: Sequence[Tensor]) -> None:
        # Entries of an uncoalesced sparse gradient are addends: dividing each divides the sum.
        for alike in group_tensors_by_type(grad._values() if grad.is_sparse else grad for grad in grads):
            if alike[0].dtype is not torch.float32:
                self._warn_about_gradient_dtype(alike[0].dtype)
            self._unscale_and_flag(alike, alike[0].device)

    def _num_grads_before_overflow(self, grads: Sequence[Tensor]) -> int:
        """Return how many gradients to unscale: in strict mode those before the first whose sum is not finite.

        An Apex without kernels stops there, and leaves all later gradients of the pass as they are.
        """
        if self.dynamic and _amp_state.strict:
            if self._has_overflow:
                return 0
            for index, grad in enumerate(grads):
                if not math.isfinite(float(grad.float().sum())):
                    self._has_overflow = True
                    return index
        return len(grads)

    def _warn_about_gradient_dtype(self, dtype: torch.dtype) -> None:
        if not LossScaler.warned_unscaling_non_fp32_grad:
            LossScaler.warned_unscaling_non_fp32_grad = True
            maybe_print(
                f"Unscaling gradients of type {dtype}: they lose bits.  Expected for O3; otherwise leave the casting "
                "of the model to amp.initialize.",
                rank0=True,
            )

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads / scale` into `master_grads`, which may be the same tensors.

        At a static scale of 1 there is nothing to do if `models_are_masters`.

        Args:
            model_grads: scaled ones.
            master_grads: pairwise of equal shapes with these, and written.
            unused_scale: has no part, as in Apex.
            models_are_masters: whether the model has fp32 weights that are stepped themselves.
            scale_override: in the place of the scaler's own scale; None for that.
        """
        if self._has_overflow and _amp_state.strict:
            return
        with torch.no_grad(), self._scale_replaced(scale_override):
            if models_are_masters and not self.dynamic and self._loss_scale == 1.0:
                return
            count = self._num_grads_before_overflow(model_grads)
            if not count:
                return
            model_grads, master_grads = model_grads[:count], master_grads[:count]
            if master_grads and master_grads[0] is not model_grads[0]:
                torch._foreach_copy_(master_grads, model_grads)  # type: ignore[arg-type]
            if self.dynamic or self._loss_scale != 1.0:
                self._unscale_each_type(master_grads)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Write `model_grads / scale + stashed_master_grads` into `master_grads`; only the new gradients are checked.

        Args:
            model_grads: scaled ones, of this backward pass.
            stashed_master_grads: those of the passes before, pairwise of equal shapes with these.
            scale_override: scale of the new gradients, of the stash, and of the result.
        """
        grad_scale, stash_scale, out_scale = scale_override or (self._loss_scale, 1.0, 1.0)
        if self._has_overflow and _amp_state.strict:
            return
        count = self._num_grads_before_overflow(model_grads)
        if not count:
            return
        model_grads, master_grads = model_grads[:count], master_grads[:count]
        with torch.no_grad(), self._scale_replaced(grad_scale / out_scale):
            fresh = [
                torch.empty_like(master).copy_(grad)
                for master, grad in zip(master_grads, model_grads, strict=True)
            ]
            if self.dynamic or self._loss_scale != 1.0:
                self._unscale_each_type(fresh)
            factor = out_scale / stash_scale
            stashed = list(stashed_master_grads[:count])
            torch._foreach_add_(fresh, stashed if factor == 1.0 else torch._foreach_mul(stashed, factor))
            torch._foreach_copy_(master_grads, fresh)  # type: ignore[arg-type]

    @contextmanager
    def _scale_replaced(self, scale: float | None) -> Iterator[None]:
        """Replace the scale within a block."""
        before = self._loss_scale
        if scale is not None:
            self._loss_scale = scale
        yield
        self._loss_scale = before

    def clear_overflow_state(self) -> None:
        """Clear an overflow recorded since the last `update_scale`."""
        self._host_overflow = False
        self._last_flag = None
        self._scalars.clear_flags()
        if self._overflow_buffer is not None:
            self._overflow_buffer.zero_()

    def _read_overflow_flags(self) -> bool:
        overflow = self._scalars.is_any_flag_set()
        return overflow or (self._overflow_buffer is not None and bool(self._overflow_buffer.item()))

    def update_scale(self) -> bool:
        """Move the scale after a backward pass.

        Returns:
            True if gradients overflowed, so that the step must be skipped; always False for a static scale.
        """
        if self._ahead:
            self._read_scale_from_device()
        self._loaded = False
        if not self.dynamic:
            self._host_unskipped += 1
            return False
        if self._last_flag is not None:
            self._host_overflow = self._has_overflow
        if not self._host_overflow:
            self._host_overflow = self._read_overflow_flags()
        self._host_scale, self._host_unskipped = next_scale_and_good_steps(
            self._host_scale,
            self._host_unskipped,
            overflow=self._host_overflow,
            growth_interval=self._scale_seq_len,
            min_scale=self._min_loss_scale,
            max_scale=self._max_loss_scale,  # type: ignore[arg-type]
        )
        return self._host_overflow


_UPDATE_SCALE = LossScaler.update_scale


class _ScalarsByDevice:
    """fp32 scalars, one set for each device that gradients live on, made on first use and reused."""

    __slots__ = ("_flags", "_flags_written", "_initial_grads", "_inverses")

    def __init__(self) -> None:
        self._flags: dict[torch.device, Tensor] = {}
        self._flags_written = False
        self._inverses: dict[torch.device, tuple[float, Tensor]] = {}
        self._initial_grads: dict[torch.device, tuple[float, Tensor]] = {}

    def inverse_scale(self, device: torch.device, scale: float, *, strict: bool) -> Tensor:
        """Return `1 / scale`, at most the largest float; in strict mode a scale of 0 is a ZeroDivisionError."""
        cached = self._inverses.get(device)
        if cached is not None and cached[0] == scale:
            return cached[1]
        # After about 150 overflows in a row 1/scale leaves fp32's range; an endless overflow is a result, not a crash.
        value = FLOAT32_MAX if scale == 0.0 and not strict else min(1.0 / scale, FLOAT32_MAX)
        if cached is None:
            inverse = torch.full((), value, dtype=torch.float32, device=device)
        else:
            inverse = cached[1].fill_(value)
        self._inverses[device] = (scale, inverse)
        return inverse

    def initial_grad(self, device: torch.device, scale: float) -> Tensor | None:
        """Return `scale` to multiply a loss with or to start a backward pass from; None if fp32 cannot hold it."""
        cached = self._initial_grads.get(device)
        # A hook that changes the gradient it receives in place changes the cached scalar.
        if cached is None or cached[0] != scale or cached[1]._version:
            if not isinstance(scale, (int, float)) or not abs(scale) <= FLOAT32_MAX:
                return None
            cached = self._initial_grads[device] = (
                scale,
                torch.full((), scale, dtype=torch.float32, device=device),
            )
        return cached[1]

    def overflow_flag(self, device: torch.device) -> Tensor:
        """Return the overflow flag for a kernel to set."""
        self._flags_written = True
        flag = self._flags.get(device)
        if flag is None:
            flag = self._flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        return flag

    def first_flag_device(self) -> torch.device | None:
        """Return the device of the first flag, if any."""
        return next(iter(self._flags), None)

    def clear_flags(self) -> None:
        """Reset the flags that a kernel may have set."""
        if self._flags_written:
            self._flags_written = False
            for flag in self._flags.values():
                flag.zero_()

    def is_any_flag_set(self) -> bool:
        """Return whether any flag is set; waits for the devices."""
        if self._flags_written:
            # A flag that was read as 0 needs no reset before the next pass.
            self._flags_written = any(flag.item() for flag in self._flags.values())
        return self._flags_written
