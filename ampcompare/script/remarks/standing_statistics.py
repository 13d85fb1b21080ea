"""Running statistics of batch norms in 16 bits that stand still, so that evaluation is not that of the training.

A layer takes a share of the difference to each batch, its momentum; where that is below half a unit in the last place
of what it keeps, rounding loses it. With a momentum of 0.002 bf16 loses all differences below 98 %.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampcompare.base.formatting import format_few_names
from ampcompare.base.live_objects import live_objects_of
from ampcompare.base.optimizer_steps import OptimizerStepEvents
from ampcompare.base.tensors.products import HALF_DTYPES, dtype_name
from ampcompare.script.recording.recorder import RecordedSteps
from ampcompare.script.remarks.lost_decay import relative_change_lost_to_rounding
from ampcompare.training.precision.base import owned_params

BATCHES = 16  # behind which statistics that have moved nowhere stand still
MOST = 0.9  # of their elements
# relative difference to a batch: where rounding loses less, statistics are near those of the batches
LOST = 0.25


class StuckVarianceWatch:
    """Notes the layers whose running variances stand still, once."""

    def __init__(self, rows: RecordedSteps) -> None:
        self._rows = rows
        # with what they were behind the first step
        self._layers: list[tuple[nn.Module, Tensor, int]] | None = None

    def follow(self, steps: OptimizerStepEvents) -> None:
        """Begin behind the first step of an optimizer with 16-bit weights."""
        steps.call_after_each(self._after_step)

    def _after_step(self, optimizer: Any) -> None:
        if self._layers is None:
            if any(param.dtype in HALF_DTYPES for param in owned_params(optimizer)):
                self._layers = [
                    (layer, _running_variance_of(layer).clone(), _batches_seen_by_layer(layer))
                    for layer in _layers_losing_variance_updates()
                ]
            return
        seen = [one for one in self._layers if _batches_seen_by_layer(one[0]) >= one[2] + BATCHES]
        if not seen:
            return
        self._layers = [one for one in self._layers if one not in seen]
        still = [
            layer for layer, before, _ in seen if _is_mostly_unchanged(_running_variance_of(layer), before)
        ]
        if still:
            kinds = format_few_names(
                list(dict.fromkeys(f"{type(one).__name__}, momentum {one.momentum:g}" for one in still))
            )
            dtype = dtype_name(_running_variance_of(still[0]).dtype)
            self._rows.add_rounding_remark(
                f"running statistics in {dtype} stand still in {len(still)} layers ({kinds}): rounding loses each step "
                "towards a batch that differs by less than "
                f"{100 * _least_kept_relative_difference(still[0]):.0f} %, and evaluation takes what the layers began "
                "with; keep them in fp32"
            )


def _layers_losing_variance_updates() -> list[Any]:
    """Return the layers of the process whose rounding loses differences that matter."""
    layers = live_objects_of(_BatchNorm)
    return [
        one
        for one in layers
        if one.momentum and _has_variance_in_16_bits(one) and _least_kept_relative_difference(one) >= LOST
    ]


def _has_variance_in_16_bits(layer: Any) -> bool:
    variance = layer._buffers.get("running_var")
    return (
        variance is not None
        and variance.dtype in HALF_DTYPES
        and layer._buffers.get("num_batches_tracked") is not None
    )


def _least_kept_relative_difference(layer: Any) -> float:
    """Return the relative difference to a batch below which a layer's step is less than half a unit."""
    return float(relative_change_lost_to_rounding(_running_variance_of(layer).dtype) / layer.momentum)


def _running_variance_of(layer: Any) -> Tensor:
    variances: Tensor = layer._buffers["running_var"]
    return variances


def _batches_seen_by_layer(layer: Any) -> int:
    return int(layer._buffers["num_batches_tracked"])


def _is_mostly_unchanged(now: Tensor, before: Tensor) -> bool:
    return now.dtype is before.dtype and float((now == before).float().mean()) >= MOST
