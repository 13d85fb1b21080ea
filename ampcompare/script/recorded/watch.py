"""What the record of a script's cell holds besides its losses and steps, and the end of a cell after some steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import distributed

from ampcompare.base.metric_log import listen
from ampcompare.script.legacy.record.recorder import Recorder
from ampcompare.script.recorded.pairing import FirstBatches, HashedWeights, weights_of
from ampcompare.script.recorded.scalars import catch_scalars
from ampcompare.script.recorded.written_files import WrittenFiles
from ampcompare.training.metrics.memory import MemoryMeter, make_memory_meter

__all__ = ["EnoughSteps", "Watch"]


class EnoughSteps(SystemExit):
    """Ends a script after as many steps as were asked for; its exit code is 0."""


class Watch:
    """Adds to a record: first weights and batches, scalars, files written, peak memory.

    Args:
        max_steps: steps of its first optimizer after which the script ends.
        half: how 16-bit types are computed.
    """

    def __init__(self, recorder: Recorder, max_steps: int | None = None, half: str | None = None) -> None:
        self._half = half
        self._recorder = recorder
        self._max_steps = max_steps
        self._steps: dict[int, int] = {}
        self._files = WrittenFiles()
        self._memory: MemoryMeter | None = None
        self._batches = FirstBatches(lambda hashes: recorder.add_row({"kind": "batches", "sha256": hashes}))
        self._ends: list[Callable[[], None]] = [listen(self._metric), catch_scalars(), _before_exit(recorder)]
        recorder.after_row(self._row)
        recorder.before_close(self.end)

    def weights(self, models: list[Any], optimizers: list[Any]) -> None:
        """Record the weights as the script has made them, before an arm casts them."""
        self._files.begin()
        held = [model for model in models if hasattr(model, "parameters")] or [
            one if isinstance(one, HashedWeights) else HashedWeights(one) for one in optimizers
        ]
        self._recorder.add_row({"kind": "weights", "sha256": weights_of(held)})
        if self._memory is None:
            device = next((param.device for model in held for param in model.parameters()), torch.device("cpu"))
            self._recorder.add_row({"kind": "setup", "half": self._half, "device": _device_facts(device)})
            self._memory = make_memory_meter(device)

    def end(self) -> None:
        """Record what is known at the end, once."""
        if not self._ends:
            return
        self._max_steps = None
        for end in self._ends:
            end()
        self._ends.clear()
        self._batches.end()
        if self._memory is not None:
            peak = self._memory.peak()
            self._recorder.add_row({"kind": "memory", "peak_bytes": peak.used, "peak_reserved_bytes": peak.reserved})
        if written := self._files.end():
            self._recorder.add_row({"kind": "files", "written": written})

    def _metric(self, name: str, value: float, source: str) -> None:
        self._recorder.add_row({"kind": "metric", "name": name, "value": value, "source": source})

    def _row(self, row: dict[str, Any]) -> None:
        if row["kind"] != "step":
            return
        if not self._steps and distributed.is_available() and distributed.is_initialized():
            self._recorder.add_row(
                {"kind": "rank", "rank": distributed.get_rank(), "world_size": distributed.get_world_size()}
            )
        self._batches.stepped()
        if self._max_steps is None:
            return
        self._steps[row["optimizer"]] = self._steps.get(row["optimizer"], 0) + 1
        if self._steps[min(self._steps)] >= self._max_steps:
            raise EnoughSteps(0)


def _before_exit(recorder: Recorder) -> Callable[[], None]:
    """Close the record also where a script ends by `os._exit`; return a function that ends this."""
    leave = os._exit

    def close_and_leave(status: int) -> NoReturn:
        recorder.close(status, None)  # in a forked child it has nothing to close
        leave(status)

    os._exit = close_and_leave

    def end() -> None:
        os._exit = leave

    return end


def _device_facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": str(device), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        names = {"device_name": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
        facts |= {**names, "cuda": torch.version.cuda}
    return facts
