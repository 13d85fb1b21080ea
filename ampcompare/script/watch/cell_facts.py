"""What the record of a script's cell holds besides its losses and steps, and the end of a cell after some steps."""

import functools
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from ampcompare.base.environment.ranks import rank_in_process_group
from ampcompare.base.metric_log import listen_to_metrics
from ampcompare.base.patches import Layer, PatchPoints, Subscriptions
from ampcompare.base.tensors.transforms import outside_of_transforms, tensor_inside_wrappers
from ampcompare.script.recording.metrics import start_logging_scalars
from ampcompare.script.recording.recorder import Recorder
from ampcompare.script.watch.planned_steps import find_num_planned_steps
from ampcompare.training.hashes import generators_sha256, inputs_sha256, parameters_sha256
from ampcompare.training.meters import MemoryMeter, make_memory_meter
from ampcompare.training.precision.base import owned_params

MAX_BATCHES = 3


class FirstBatchesHashWatch:
    """Hashes what the script passes to the first module that it calls, at the start and after each backward pass.

    Attributes:
        hashes: of the batches.
        draws: of the generators before those of these calls that draw random numbers.

    Steps would not do: a step that an arm skips or records late begins no batch of its own.
    """

    def __init__(self, found: Callable[[list[str], list[str]], None]) -> None:
        self.hashes: list[str] = []
        self.draws: list[str] = []
        self._found = found
        self._awaited = True
        self._events = Subscriptions(Layer.RECORD)  # around an arm, which may cast what a module gets
        self._events.wrap(*PatchPoints.FORWARD, self._hash_first_call)
        self._events.wrap(*PatchPoints.BACKWARD, self._await_next_batch)

    def end(self) -> None:
        """Report what was found, if that was not done yet."""
        if self._events.active:
            self._events.end()
            self._found(self.hashes, self.draws)

    def _await_next_batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._awaited = True
        return result

    def _hash_first_call(self, original: Any, module: Any, *inputs: Any, **named: Any) -> Any:
        # Inside of vmap or torch.func.grad tensors have no data that could be read.
        if self._awaited and torch.is_grad_enabled() and torch._C._functorch.peek_interpreter_stack() is None:
            digest = inputs_sha256(inputs or named)
            if digest is not None:
                return self._call_and_note_random_draws(digest, original, module, *inputs, **named)
        return original(module, *inputs, **named)

    def _call_and_note_random_draws(self, digest: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a module with a batch of this hash, and note whether it draws random numbers, as dropout does."""
        self._awaited = False
        self.hashes.append(digest)
        before = generators_sha256()
        result = original(*args, **kwargs)
        if generators_sha256() != before:
            self.draws.append(before)
        if len(self.hashes) == MAX_BATCHES:
            self.end()
        return result


class StepsReached(SystemExit):
    """Ends a script after as many steps as were asked for; its exit code is 0."""


class CellFactsRecorder:
    """Adds to a record: first weights and batches, scalars, peak memory; `half` says how 16-bit types are computed."""

    def __init__(self, recorder: Recorder, max_steps: int | None = None, half: str | None = None) -> None:
        self._half = half
        self._recorder = recorder
        self._max_steps = max_steps
        self._has_begun = self._has_raised = False
        self._steps: dict[int, int] = {}
        self._memory: MemoryMeter | None = None
        self._batches = FirstBatchesHashWatch(
            lambda hashes, draws: recorder.add_row({"kind": "batches", "sha256": hashes, "draws": draws})
        )
        self._ends: list[Callable[[], None]] = [
            listen_to_metrics(self._record_metric),
            start_logging_scalars(),
            _close_at_os_exit(recorder),
        ]
        recorder.call_after_each_row(self._end_script_at_last_step_row)
        recorder.call_before_close(self.end)

    def record_first_weights(self, models: list[Any], optimizers: list[Any]) -> None:
        """Record the weights as the script has made them, before an arm casts them."""
        held = [model for model in models if hasattr(model, "parameters")] or [
            SimpleNamespace(parameters=functools.partial(owned_params, optimizer)) for optimizer in optimizers
        ]
        names = [type(one).__name__ for one in optimizers]
        weights = [tensor_inside_wrappers(param) for model in held for param in model.parameters()]
        with outside_of_transforms():
            digest = parameters_sha256([SimpleNamespace(parameters=lambda: weights)])  # type: ignore[list-item]
        self._recorder.add_row({"kind": "weights", "sha256": digest, "optimizers": names})
        if self._memory is None:
            device = next(
                (param.device for model in held for param in model.parameters()), torch.device("cpu")
            )
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
            peak = self._memory.peak_memory()
            self._recorder.add_row(
                {"kind": "memory", "peak_bytes": peak.used, "peak_reserved_bytes": peak.reserved}
            )

    def _record_metric(self, name: str, value: float, source: str) -> None:
        self._recorder.add_row({"kind": "metric", "name": name, "value": value, "source": source})

    def _end_script_at_last_step_row(self, row: dict[str, Any]) -> None:
        """Count the step of a row, record the start at the first, and end the script after the last asked for."""
        if row["kind"] != "step":
            return
        if not self._has_begun:
            self._record_start_once()
        if self._max_steps is None:
            return
        self._steps[row["optimizer"]] = self._steps.get(row["optimizer"], 0) + 1
        if self._has_raised:  # the script catches everything, and goes on
            sys.stdout.flush()
            os._exit(0)
        if self._steps[min(self._steps)] >= self._max_steps:
            self._has_raised = True
            raise StepsReached(0)

    def _record_start_once(self) -> None:
        """Record at the first step what is known by then."""
        self._has_begun = True
        if (place := rank_in_process_group()) is not None:
            self._recorder.add_row({"kind": "rank", "rank": place.rank, "world_size": place.size})
        if self._max_steps is not None:
            self._recorder.add_row({"kind": "planned", "steps": find_num_planned_steps()})
            self._recorder.write_held_rows()


def _close_at_os_exit(recorder: Recorder) -> Callable[[], None]:
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
