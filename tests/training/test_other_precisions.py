"""Trained weights in other precisions: what is measured, and that the trained run stays as it was to the last bit."""

import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampcompare.results.records.evaluation import PrecisionResult
from ampcompare.settings.config import EVAL_PRECISIONS, RunConfig
from ampcompare.training.hashes import weights_sha256
from ampcompare.training.other_precisions import EvaluationPrecision, evaluate_in_other_precisions
from ampcompare.training.precision.base import Precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.session import TrainingSession
from tests.training.sessions import CPU, make_session

RECIPES: dict[str, dict[str, Any]] = {
    "classification": {
        "data": {"train_size": 32, "val_size": 30},
        "model": {"arch": "mlp", "args": {"width": 8}},
    },
    "segmentation": {
        "data": {"train_size": 16, "val_size": 6, "image_size": 8},
        "model": {"args": {"width": 4}},
    },
    "gan": {"data": {"train_size": 16, "val_size": 20}, "model": {"args": {"width": 8}}},
    "lm": {
        "data": {"train_size": 16, "val_size": 6, "sequence_length": 8},
        "model": {"args": {"width": 8, "heads": 2, "depth": 1}},
    },
    "regression": {"data": {"train_size": 32, "val_size": 20}, "model": {"args": {"width": 8}}},
}


def _session(
    task: str, arm: str, precisions: Any = EVAL_PRECISIONS, **recipe: Any
) -> tuple[TrainingSession, Any, list[Any]]:
    """Train one epoch; return the session, the context of its steps, and its epochs."""
    values = {"task": task, "epochs": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.05}}
    config = RunConfig.model_validate(
        {"arm": arm, "recipe": {**RECIPES[task], **values, **recipe}, "eval_precision": precisions}
    )
    session = make_session(config)
    _, compute = choose_cpu_half_mode_and_context("auto", session.precision.half_dtype, CPU)
    with compute:
        events = [event for event in session.train_and_yield_events() if not isinstance(event, list)]
    return session, compute, events


def _by_name(results: list[PrecisionResult]) -> dict[str, PrecisionResult]:
    return {f"{result.precision}{' ema' if result.averaged else ''}": result for result in results}


@pytest.mark.parametrize("task", RECIPES)
def test_the_arms_own_precision_gives_its_own_values(task: str) -> None:
    """fp32 weights evaluated in fp32 give the epoch's values to the last bit, and no answer differs, for every task."""
    session, compute, (epoch,) = _session(task, "fp32")
    results = _by_name(evaluate_in_other_precisions(session, compute))

    assert list(results) == list(EVAL_PRECISIONS)
    assert not [result.error for result in results.values() if result.error]
    assert (results["fp32"].values, results["fp32"].loss) == (epoch.values, epoch.loss)
    assert not results["fp32"].differing
    assert results["fp16"].half == "fp16 emulated"
    per_sample = {"classification": 30, "segmentation": 6 * 64, "lm": 6 * 8}.get(task)
    assert results["bf16"].answers == per_sample
    if task in ("lm", "regression"):
        assert results["bf16"].values != epoch.values, "a cast to eight bits that changes nothing is none"
    if task == "lm":
        assert results["fp32"].sample_difference == 0
        assert (results["bf16"].sample_difference or 0) > (results["fp16"].sample_difference or 0) > 0


@pytest.mark.parametrize(
    ("arm", "same"),
    [("half:bf16", "bf16"), ("native:fp16", "autocast:fp16"), ("apex:O3,engine=compat", "fp16"),
     ("half:bf16,keep_fp32=head", ""), ("apex:O2,engine=compat", "")],
)  # fmt: skip
def test_an_evaluation_leaves_the_run_as_it_is(arm: str, same: str) -> None:
    """Weights, modes and generators are those of before, with an average too; its own precision gives its values."""
    session, compute, (epoch,) = _session("lm", arm, ema_decay=0.5)
    models = session.assembly.replicas
    before = weights_sha256(models), [model.training for model in models]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    results = _by_name(evaluate_in_other_precisions(session, compute))

    assert (weights_sha256(models), [model.training for model in models]) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index]
    assert not [result.error for result in results.values() if result.error]
    assert len(results) == 2 * len(EVAL_PRECISIONS)
    if same:
        assert results[same].values == epoch.values
        assert results[f"{same} ema"].values == epoch.ema_values
        assert results[same].differing == results[f"{same} ema"].differing == 0
    assert results["fp32 ema"].values != results["fp32"].values


def test_the_patches_of_o1_are_out_of_force() -> None:
    """Weights that O1 has trained give in fp32 what the same weights give without Apex, not what its casts do."""
    session, compute, (epoch,) = _session("lm", "apex:O1,engine=compat", "fp32")
    (result,) = evaluate_in_other_precisions(session, compute)
    plain, _, _ = _session("lm", "fp32", "fp32")
    for model, source in zip(plain.assembly.replicas, session.assembly.replicas, strict=True):
        model.load_state_dict(source.state_dict())
    with session.precision.without_patches():
        expected = plain.evaluate_with(plain.assembly.replicas, Precision())

    # O1 patches the sums of the metric too, in the last bits.
    assert result.values == pytest.approx(expected.values, rel=1e-7)
    assert result.values != epoch.values
    assert (result.sample_difference or 0) > 1e-6


def test_an_overflow_is_a_result_and_a_missing_kernel_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs beyond fp16's range give a loss that is NaN; a precision in which the model raises has the reason."""
    session, _, _ = _session("classification", "fp32", "fp16,bf16")
    broken = session.assembly.task.make_models

    def raising() -> Any:
        (model,) = broken()

        def forward(x: Tensor) -> Tensor:
            if x.dtype is torch.bfloat16:
                raise NotImplementedError("no kernel for bf16")
            return type(model).forward(model, x) * 1e6

        model.forward = forward
        return [model]

    monkeypatch.setattr(session.assembly.task, "make_models", raising)
    fp16, bf16 = evaluate_in_other_precisions(session, nullcontext())
    assert fp16.error is None
    assert fp16.loss != fp16.loss
    assert (bf16.error, bf16.values) == ("NotImplementedError: no kernel for bf16", {})


def test_a_cast_reaches_weights_inputs_and_outputs() -> None:
    """A model in float64 computes in it, buffers too, and hands on fp32."""
    other = EvaluationPrecision("float64", CPU, outside=Precision())
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    (cast,), _ = other.prepare([model], [])
    assert cast(torch.ones(3, 2)).dtype is torch.float32
    assert seen == [torch.float64]
    assert (other.mode, other.half_dtype) == (None, None)
