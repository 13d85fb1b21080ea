"""A whole update as one CUDA graph: captured once, then launched by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import EnvironmentUnfit, UnsupportedCombination
from ampcompare.parallel.replication import Parallel
from ampcompare.precision.base import Precision, StepOutcome
from ampcompare.tasks.batches import map_tensors, tensors_of
from ampcompare.tasks.task import LossOf

__all__ = ["CudaRecorder", "Recorder", "StepGraph", "rates_on_device", "refuse_unrecordable"]

WARM_UP = 3  # updates: the first ones create lazy state and choose kernels

Result = tuple[list[Tensor], Tensor | None, StepOutcome]
Update = Callable[..., Result]
T = TypeVar("T")


class Recorder(Protocol):
    """Records the kernels of a piece of code, and launches them again on the same memory."""

    def warm_up(self, code: Callable[[], T]) -> T:
        """Run `code` as it will be recorded."""

    def record(self, code: Callable[[], T]) -> T:
        """Record the kernels of `code`, which need not run; return what it returned."""

    def replay(self) -> None:
        """Launch what was recorded."""


class CudaRecorder:
    """`torch.cuda.CUDAGraph` with a separate stream, which capturing requires."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, code: Callable[[], T]) -> T:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = code()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, code: Callable[[], T]) -> T:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            return code()

    def replay(self) -> None:
        self._graph.replay()


class StepGraph:
    """Replaces `update`: runs a few updates eagerly, records one, and replays it from then on.

    A batch of another shape, such as the last one of an epoch, is trained on without the graph. Losses, norms and
    outcomes are copied out of the memory of the graph, because the next launch overwrites it.

    Args:
        update: what is recorded.
        recorder: records it.
    """

    def __init__(self, update: Update, recorder: Recorder) -> None:
        self._update = update
        self._recorder = recorder
        self._warm_ups = 0
        self._shapes: list[Any] = []
        self._inputs: Any = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None

    def __call__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        parallel: Parallel,
        loss_of: LossOf,
        microbatches: Sequence[Any],
        clip_norm: float | None = None,
    ) -> Result:
        """Make one update; see `ampcompare.training.loop.update`."""
        shapes = [(part.shape, part.stride(), part.dtype) for part in tensors_of(list(microbatches))]
        arguments = (models, optimizers, precision, parallel, loss_of)
        if self._inputs is None:
            self._shapes = self._shapes or shapes
            if self._warm_ups < WARM_UP or shapes != self._shapes:
                self._warm_ups += shapes == self._shapes
                return self._recorder.warm_up(lambda: self._update(*arguments, microbatches, clip_norm))
            self._record(models, optimizers, precision, parallel, loss_of, microbatches, clip_norm)
        elif shapes != self._shapes:
            return self._update(*arguments, microbatches, clip_norm)
        assert self._inputs is not None
        for target, part in zip(tensors_of(self._inputs), tensors_of(list(microbatches)), strict=True):
            target.copy_(part, non_blocking=True)
        self._recorder.replay()
        norm = None if self._norm is None else self._norm.clone()
        return [loss.clone() for loss in self._losses], norm, precision.repeated()

    def _record(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        parallel: Parallel,
        loss_of: LossOf,
        microbatches: Sequence[Any],
        clip_norm: float | None,
    ) -> None:
        self._inputs = map_tensors(Tensor.clone, list(microbatches))
        # A gradient that exists now would be read by every replay, from memory that is freed.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        inputs = self._inputs

        def code() -> tuple[list[Tensor], Tensor | None]:
            with precision.recording():
                losses, norm, _ = self._update(models, optimizers, precision, parallel, loss_of, inputs, clip_norm)
            return losses, norm

        try:
            self._losses, self._norm = self._recorder.record(code)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise UnsupportedCombination(
                f"cuda_graph: this step cannot be captured, because something in it waits for the device: {first}; "
                "leave out --cuda-graph"
            ) from error


def refuse_unrecordable(device: torch.device, precision: Precision, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a step cannot be recorded as a CUDA graph.

    Raises:
        EnvironmentUnfit: the device is not a CUDA device.
        UnsupportedCombination: an optimizer keeps numbers on the host, or the arm reads its overflow flag there.
    """
    if device.type != "cuda":
        raise EnvironmentUnfit(
            f"--cuda-graph captures kernels of a CUDA device, but this run is on {device}; leave it out"
        )
    for optimizer in optimizers:
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise UnsupportedCombination(
                f"cuda_graph: {type(optimizer).__name__} keeps the learning rate and step counts on the host, "
                "where a graph cannot read them; use --optimizer-implementation fused"
            )
    reason = precision.unrecordable(optimizers)
    if reason is not None:
        raise UnsupportedCombination(f"cuda_graph: {reason}; leave out --cuda-graph")


def rates_on_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Put the learning rate of each group into an fp32 tensor, which a schedule fills and a graph reads."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = torch.full((), float(group["lr"]), dtype=torch.float32, device=device)
