"""The trained weights of a run, evaluated in other precisions than the arm's own.

Each precision gets its own models: built again in fp32, given the trained weights, then cast. The models that were
trained stay as they are, and so do all random generators.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.tensors.sharded import gather_tensors_in_tree
from ampcompare.base.tensors.tree import widen_halves
from ampcompare.results.records.evaluation import PrecisionResult
from ampcompare.tasks.task import Task
from ampcompare.training.checkpoint.capture import random_states_restored
from ampcompare.training.evaluate import EvaluationResult, Extra
from ampcompare.training.precision.base import Precision, Prepared
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.precision.half_casts import cast_model_with_inputs_outputs
from ampcompare.training.session import TrainingSession

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
ANSWERS = "answers"
DIFFERING = "differing"
MOVED = "moved"


def evaluate_in_other_precisions(
    session: TrainingSession, compute: AbstractContextManager[Any]
) -> list[PrecisionResult]:
    """Evaluate the weights, and their moving average if there is one, in each precision that the configuration names.

    Every rank calls it after the last step.

    Args:
        session: that has trained.
        compute: the context of the arm's own steps.

    Returns:
        A result for each precision; that of one in which the model cannot run is the error.
    """
    names = session.config.eval_precision
    if not names:
        return []
    with random_states_restored(session.gpus()):
        results = [_result_or_error_in_precision(session, name, compute, averaged=False) for name in names]
        if session.assembly.average is not None:
            with session.moving_average_as_weights():
                results += [
                    _result_or_error_in_precision(session, name, compute, averaged=True) for name in names
                ]
    return results


def _result_or_error_in_precision(
    session: TrainingSession, name: str, compute: AbstractContextManager[Any], *, averaged: bool
) -> PrecisionResult:
    try:
        return _evaluate_in_precision(session, name, compute, averaged=averaged)
    except Exception as error:  # a precision that this model or device lacks is a row of the table
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return PrecisionResult(precision=name, averaged=averaged, error=reason)


def _evaluate_in_precision(
    session: TrainingSession, name: str, compute: AbstractContextManager[Any], *, averaged: bool
) -> PrecisionResult:
    assembly, own = session.assembly, session.precision
    config = session.config
    other = EvaluationPrecision(
        name, assembly.device, choice=config.cpu_half, lists=config.autocast_lists, outside=own
    )
    models = _models_with_weights_of(
        assembly.task, assembly.replicas, assembly.device, config.recipe.channels_last
    )
    models, _ = other.prepare(models, [])
    with _models_in_evaluation(assembly.replicas):
        evaluation = session.evaluate_with(
            models,
            other,
            _make_measure_of_differences_by_sample(assembly.task, assembly.replicas, own, compute),
        )
    own.weights_replaced()  # casts that were cached carry no gradient
    return _precision_result_from(evaluation, name, other.mode, averaged=averaged)


def _models_with_weights_of(
    task: Task, trained_models: Sequence[nn.Module], device: torch.device, channels_last: bool
) -> list[nn.Module]:
    """Return models of the task in fp32 with the weights of others, which keep theirs."""
    models = [model.to(device) for model in task.make_models()]
    for model, source in zip(models, trained_models, strict=True):
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.load_state_dict(gather_tensors_in_tree(source.state_dict()))
    return models


@contextmanager
def _models_in_evaluation(models: Sequence[nn.Module]) -> Iterator[None]:
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, modes, strict=True):
            model.train(training)


def _make_measure_of_differences_by_sample(
    task: Task, models: Sequence[nn.Module], own_precision: Precision, compute: AbstractContextManager[Any]
) -> Extra:
    """Return what counts, sample by sample, how far an evaluation is from that of `models` in their own precision."""
    first = task.metrics[0]

    def compare_by_sample(outputs: Any, measured: Mapping[str, Tensor], batch: Any) -> Mapping[str, Tensor]:
        with compute, own_precision.autocast():
            theirs = widen_halves(task.predict(models, batch))
        here, there = task.answers(outputs, batch), task.answers(theirs, batch)
        reference = task.measure(theirs, batch)
        if here is None and first.over_samples == "share":
            here, there = measured[first.name].long(), reference[first.name].long()
        counts: dict[str, Tensor] = {}
        if here is not None and there is not None:
            asked = there >= 0
            counts[ANSWERS] = asked.flatten(1).sum(1) if asked.dim() > 1 else asked
            differs = asked & (here != there)
            counts[DIFFERING] = differs.flatten(1).sum(1) if differs.dim() > 1 else differs
        if first.over_samples == "mean":
            counts[MOVED] = (measured[first.name].double() - reference[first.name].double()).abs()
        return counts

    return compare_by_sample


def _precision_result_from(
    evaluation: EvaluationResult, name: str, mode: str | None, *, averaged: bool
) -> PrecisionResult:
    extras = evaluation.extras
    return PrecisionResult(
        precision=name,
        averaged=averaged,
        half=mode,
        samples=evaluation.samples,
        values=evaluation.values,
        loss=evaluation.loss,
        answers=round(extras[ANSWERS]) if ANSWERS in extras else None,
        differing=round(extras[DIFFERING]) if DIFFERING in extras else None,
        sample_difference=extras[MOVED] / evaluation.samples if MOVED in extras else None,
    )


class EvaluationPrecision(Precision):
    """Models that were built in fp32, cast to one type as a whole or run under autocast; nothing is trained.

    Outputs are cast to fp32, in which metrics are computed. Patches of torch by the arm `outside` are suspended. `mode`
    says how 16-bit arithmetic is computed, such as "fp16 emulated"; None without it.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        choice: str = "auto",
        lists: str = "cuda",
        outside: Precision,
    ) -> None:
        under_autocast, _, type_name = name.rpartition(":")
        dtype = DTYPES[type_name]
        self._device, self._outside = device, outside
        self._cast = None if under_autocast else dtype
        self.half_dtype = None if dtype is torch.float64 else dtype
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if under_autocast:
            self._autocast = torch.autocast(device.type, dtype=dtype)
        self.mode, self._compute = choose_cpu_half_mode_and_context(choice, self.half_dtype, device, lists)

    def _prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> Prepared:
        if self._cast is not None:
            for model in models:
                cast_model_with_inputs_outputs(model, self._cast, bn_fp32=False)
        return list(models), list(optimizers)

    def autocast(self) -> AbstractContextManager[None]:
        return self._evaluation_block()

    @contextmanager
    def _evaluation_block(self) -> Iterator[None]:
        with self._outside.without_patches(), self._compute, self._autocast:
            yield
