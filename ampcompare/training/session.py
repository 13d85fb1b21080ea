"""A whole run: epochs of the loop, each with an evaluation, until the end, divergence or a stop request."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ampcompare.base.environment.fingerprint import environment_fingerprint, host_name
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.run import Resumption
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.data import derive_seed
from ampcompare.training.assemble import TrainingAssembly
from ampcompare.training.build_loop import build_training_loop
from ampcompare.training.checkpoint.capture import (
    gather_rank_specific_states,
    gather_training_state,
    restore_state_of_rank,
)
from ampcompare.training.checkpoint.saver import CheckpointSaver, RunPosition
from ampcompare.training.evaluate import EvaluationResult, Extra, evaluate_models
from ampcompare.training.ledger import TrainingLedgerRecorder
from ampcompare.training.parallel.ranks import digest_of_weights, require_equal_on_ranks
from ampcompare.training.policies import DivergenceDetector, Rollback, SkippingPrecision, make_policies
from ampcompare.training.precision.base import Precision
from ampcompare.training.process.device import synchronize_device
from ampcompare.training.stop_request import StopRequest

TrainingPhase = Literal["training", "evaluating", "saving"]


class TrainingSession:
    """Trains an assembly as a configuration says: iterate over `train_and_yield_events`.

    A consumer of the events may add its own parts with state to `stateful`, by the name under which each is saved.
    `on_phase` is called with "training", "evaluating" or "saving" when that begins; never between two steps of a block.

    Args:
        config: of the run.
        assembly: what is trained.
        saver: writes checkpoints; None for none.
        stop: tells when the run is to end early; None for never.
    """

    def __init__(
        self,
        config: RunConfig,
        assembly: TrainingAssembly,
        *,
        saver: CheckpointSaver | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.config = config
        self.assembly = assembly
        self.position = RunPosition()
        self.best: dict[str, Any] = {"value": None, "step": None}
        self.resumed: list[Resumption] = []
        self.interrupted = False
        self.on_phase: Callable[[TrainingPhase], None] | None = None
        self._saver = saver
        self._stop = stop
        ranks = assembly.ranks
        self.divergence = DivergenceDetector(
            config.nan_patience, assembly.replicas, ranks.any, stops=config.on_nan != "continue"
        )
        self.policies = make_policies(config, assembly, self.divergence)
        self.stateful: dict[str, _HasStateDict] = {
            policy.name: policy for policy in self.policies if policy.name is not None
        }
        if assembly.average is not None:
            self.stateful["average"] = assembly.average
        precision = assembly.precision
        if config.on_nan == "skip":
            precision = SkippingPrecision(precision, assembly.replicas, ranks.any)
        self.loop = build_training_loop(config.recipe, assembly, precision, drain_every=config.drain_every)
        self.ledger = TrainingLedgerRecorder(
            assembly.replicas, config.drain_every, sees_operations=config.recipe.compile == "none"
        )
        self.loop.update = self.ledger.make_recorded_update(self.loop.update)

    @property
    def precision(self) -> Precision:
        """The backend that trains."""
        return self.assembly.precision

    @property
    def why_ended_early(self) -> str | None:
        """Why training ended before its last epoch, in a good state; None if it did not."""
        return next((policy.end_reason for policy in self.policies if policy.end_reason is not None), None)

    @property
    def steps_at_rollbacks(self) -> list[int]:
        """The number of updates made at each rollback."""
        return [step for policy in self.policies if isinstance(policy, Rollback) for step in policy.steps]

    def train_and_yield_events(self) -> Iterator[list[StepRecord] | EpochResult]:
        """Train from the current position; yield each drained block of steps, and the result of each epoch.

        A checkpoint is written when the consumer asks for the next event: by then it has processed all that the
        checkpoint contains.
        """
        position = self.position
        share = self._data_loading_facts()
        for policy in self.policies:
            policy.begin(position.step)
        for epoch in range(position.epoch, self.config.recipe.epochs):
            left = self.assembly.total_steps - position.step
            # An epoch whose steps are all made still lacks its evaluation if the run was stopped in between.
            if (left <= 0 and position.batch == 0) or self.why_ended_early:
                break
            self._report_phase("training")
            begin = self._wall_time_after_synchronization() - position.train_seconds
            batches = self._batches_left_of_epoch(epoch, share)
            for records in self.loop.run(batches, epoch=epoch, steps=left):
                position.skipped += sum(not all(record.applied) for record in records)
                position.step, position.batch = self.loop.step, position.batch + len(records)
                yield records
                if self._apply_policies(records) or self._save_and_is_asked_to_stop(len(records), begin):
                    return
            result, event = self._evaluate_epoch(epoch, begin)
            position.epoch, position.batch, position.train_seconds = epoch + 1, 0, 0.0
            yield event
            for policy in self.policies:
                policy.apply_to_epoch(event)
            if self._saver is not None:
                self._save_after_epoch(self._saver, result)
        if self._saver is not None and self._saver.is_on:
            self._report_phase("saving")
            self._saver.save_run_unless_saved(position, self.state_dict, is_last=True)

    def _batches_left_of_epoch(self, epoch: int, share: Mapping[str, Any]) -> Iterator[Any]:
        """Return the batches of an epoch on the device, from the position on.

        Args:
            share: of this rank in the samples, as arguments of `train_batches`.
        """
        device = self.assembly.device
        batches: Iterator[Any] = self.assembly.task.data.train_batches(
            epoch, self.config.recipe.batch_size, device=device, start=self.position.batch, **share
        )
        if self.config.prefetch and device.type == "cuda":
            return prefetch_batches(batches, self.config.prefetch, CudaCopyStream(device))
        return batches

    def _evaluate_epoch(self, epoch: int, begin: float) -> tuple[EvaluationResult, EpochResult]:
        """Evaluate the trained weights and their average behind an epoch.

        Args:
            epoch: from 0.
            begin: the wall time at which its training would have begun, had it never been stopped.
        """
        trained = self._wall_time_after_synchronization()
        if self.assembly.ranks.size > 1:
            self._equalize_buffers_and_require_equality(epoch)
        self._report_phase("evaluating")
        result = self._evaluate_trained_weights()
        averaged = self._evaluate_average_if_any()
        return result, EpochResult(
            epoch=epoch,
            samples=result.samples,
            values=result.values,
            counts=result.counts,
            chance=result.chance,
            loss=result.loss,
            ema_values=None if averaged is None else averaged.values,
            ema_counts={} if averaged is None else averaged.counts,
            ema_loss=None if averaged is None else averaged.loss,
            per_sample=result.per_sample,
            train_seconds=trained - begin,
            eval_seconds=self._wall_time_after_synchronization() - trained,
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the run at a drain point, in the layout of `checkpoints.store.layout`.

        Every rank calls it; None on all but the first. Tensors are those that training continues with, not copies.
        """
        assembly, config = self.assembly, self.config
        training = gather_training_state(
            assembly.replicas, assembly.optimizers, assembly.precision, assembly.names
        )
        of_ranks = gather_rank_specific_states(assembly.replicas, self.gpus(), assembly.ranks)
        if of_ranks is None:
            return None
        engine = assembly.precision.engine
        return {
            **training,
            **of_ranks,
            "progress": {
                **self.position.state_dict(),
                "world_size": assembly.ranks.size,
                "total_batch_size": config.recipe.batch_size * assembly.ranks.size,
            },
            "best": dict(self.best),
            "metrics": [metric.model_dump() for metric in assembly.task.metrics],
            "parts": {name: part.state_dict() for name, part in self.stateful.items()},
            "resumed": [resumption.model_dump() for resumption in self.resumed],
            "arm": config.arm,
            "recipe": config.recipe.model_dump(mode="json"),
            "engine": None if engine is None else {"name": engine.name, "version": engine.version},
            "versions": {**environment_fingerprint(), "host": host_name()},
        }

    def load_state_dict(self, state: Mapping[str, Any], resumption: Resumption) -> None:
        """Restore what `state_dict` returned, except weights, optimizers and precision, which `assemble_run` restored.

        Nothing may draw random numbers between this call and training. With another number of processes each rank
        seeds its generators from the seed of the recipe, the step and its rank.

        Args:
            state: as `state_dict` returned it.
            resumption: from which file, for the record.
        """
        assembly = self.assembly
        self.position.load_state_dict(state["progress"])
        self.loop.step = self.position.step
        self.best = dict(state["best"])
        self.resumed = [*(Resumption.model_validate(earlier) for earlier in state["resumed"]), resumption]
        for name, part in self.stateful.items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])
        seed = derive_seed("resume", self.config.recipe.seed, self.position.step, assembly.ranks.rank)
        # Last: building or loading anything else may draw from the generators.
        restore_state_of_rank(state, assembly.replicas, self.gpus(), assembly.ranks, seed)

    def _apply_policies(self, records: Sequence[StepRecord]) -> bool:
        """Apply the policies to a block of steps; return whether the run ends here as diverged, on all ranks alike."""
        changed = [
            policy.apply_and_has_changed_weights(self.position.step, records) for policy in self.policies
        ]
        if any(changed):
            self.loop.reload_loss_scales()
        return self.divergence.ends_run

    def _save_and_is_asked_to_stop(self, count: int, begin: float) -> bool:
        """Save after a block of `count` steps if it is due; return whether the run ends here because it was asked to.

        Ranks stop together, whichever of them was asked.
        """
        ranks = self.assembly.ranks
        position = self.position
        stop = self._stop
        before = position.step - count
        if stop is not None:
            asked = stop.is_due(before, position.step)
            self.interrupted = ranks.any(asked) if ranks.size > 1 else asked
        if self._saver is not None and (self.interrupted or self._saver.is_due(before, position.step)):
            position.train_seconds = self._wall_time_after_synchronization() - begin
            self._report_phase("saving")
            self._saver.save_run_unless_saved(position, self.state_dict, is_last=self.interrupted)
            self._report_phase("training")
        return self.interrupted

    def _save_after_epoch(self, saver: CheckpointSaver, result: EvaluationResult) -> None:
        """Save after an evaluation if it is due, or if it is the best so far."""
        metric = self.assembly.task.metrics[0]
        value = result.values[metric.name]
        improved = metric.is_better(value, self.best["value"])
        if improved:
            self.best = {"value": value, "step": self.position.step}
        if saver.is_due_after_epochs(self.position.epoch) or (saver.is_on and improved):
            self._report_phase("saving")
            saver.save_run_unless_saved(self.position, self.state_dict, is_best=improved)

    def _report_phase(self, phase: TrainingPhase) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def evaluate_with(
        self, models: Sequence[nn.Module], precision: Precision, extra: Extra | None = None
    ) -> EvaluationResult:
        """Measure models on the validation data of the run; every rank calls it.

        Args:
            models: prepared by `precision`.
            precision: in whose autocast they run.
            extra: measures each batch further; None for nothing.
        """
        assembly, ranks = self.assembly, self.assembly.ranks
        data, batch_size = assembly.task.data, self.config.recipe.batch_size
        return evaluate_models(
            assembly.task,
            models,
            precision,
            data.val_batches(batch_size, device=assembly.device, **self._data_loading_facts()),
            assembly.device,
            ranks.sum if ranks.size > 1 else None,
            range(ranks.rank, data.num_val, ranks.size),
            lambda: next(iter(data.val_batches(1, device=assembly.device))),
            extra,
            ranks.any if assembly.parallel.waits_in_forward and ranks.size > 1 else None,
        )

    @contextmanager
    def moving_average_as_weights(self) -> Iterator[None]:
        """Put the moving average of the weights in their place, and on exit the weights back to the last bit."""
        average, ranks = self.assembly.average, self.assembly.ranks
        assert average is not None
        if ranks.size > 1:
            average.copy_buffers_from_rank0(ranks)
        with average.average_in_place(self.precision):
            yield

    def _data_loading_facts(self) -> dict[str, Any]:
        """Return which part of the data this process reads, and how."""
        ranks = self.assembly.ranks
        return {
            "rank": ranks.rank,
            "world_size": ranks.size,
            "workers": self.assembly.workers,
            "pin_memory": self.config.pin_memory,
        }

    def _evaluate_trained_weights(self) -> EvaluationResult:
        result = self.evaluate_with(self.assembly.replicas, self.precision)
        # Casts that an evaluation caches carry no gradient; training must make its own.
        self.precision.weights_replaced()
        return result

    def _evaluate_average_if_any(self) -> EvaluationResult | None:
        if self.assembly.average is None:
            return None
        with self.moving_average_as_weights():
            return self._evaluate_trained_weights()

    def _equalize_buffers_and_require_equality(self, epoch: int) -> None:
        """Compare weights, loss scales and skipped steps of all ranks; buffers are set to those of rank 0."""
        # Each rank has seen other batches; the statistics that are evaluated are those of rank 0, as with torch's DDP.
        self.assembly.ranks.copy_buffers_from_rank0(self.assembly.replicas)
        # NaNs are equal in meaning and may differ in their bits
        if self.divergence.diverged_step is not None:
            return
        state = {
            "loss scales": self.precision.loss_scales(),
            "number of skipped steps": self.position.skipped,
            "hash of weights": digest_of_weights(self.assembly.replicas),
        }
        remedy = f"seen at the end of epoch {epoch}; every rank must apply the same gradients"
        require_equal_on_ranks(self.assembly.ranks, "state of training", state, remedy)

    def gpus(self) -> list[torch.device]:
        """Return the GPUs that this process trains on."""
        device = self.assembly.device
        if device.type == "cpu":
            return []
        wrapped = (model for model in self.assembly.models if isinstance(model, nn.DataParallel))
        indices = next((model.device_ids for model in wrapped), [])
        return [torch.device(device.type, index) for index in indices] or [device]

    def _wall_time_after_synchronization(self) -> float:
        """Return the wall time after the device has finished its work; called between epochs, never in a timed step."""
        synchronize_device(self.assembly.device)
        return time.perf_counter()


class CudaCopyStream:
    """A separate CUDA stream on one GPU, which fetches batches while the main stream computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(
            torch.cuda.current_stream(device)
        )  # the data that batches are cut from may still be written

    def fetch_batch_and_mark_of_its_end(self, batches: Iterator[Any]) -> tuple[Any, Any] | None:
        """Start the copy of the next batch; return it with a mark of its end, or None if none is left."""
        with torch.cuda.stream(self._stream):
            batch = next(batches, None)
            return None if batch is None else (batch, self._stream.record_event())

    def wait_for_batch(self, batch: Any, mark: Any) -> None:
        """Make the main stream wait, on the device, until the batch is copied."""
        main = torch.cuda.current_stream(self._device)
        main.wait_event(mark)
        for part in tensors_in_value(batch):
            part.record_stream(main)  # its memory is not reused while the main stream reads it


def prefetch_batches(batches: Iterable[Any], depth: int, stream: CudaCopyStream) -> Iterator[Any]:
    """Yield the same batches in the same order, and start up to `depth` of them in advance."""
    source = iter(batches)
    waiting: deque[tuple[Any, Any]] = deque()
    more = True
    while True:
        while more and len(waiting) < depth + 1:
            fetched = stream.fetch_batch_and_mark_of_its_end(source)
            more = fetched is not None
            if fetched is not None:
                waiting.append(fetched)
        if not waiting:
            return
        batch, mark = waiting.popleft()
        stream.wait_for_batch(batch, mark)
        yield batch


class _HasStateDict(Protocol):
    """A part of a run that changes while it trains."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
