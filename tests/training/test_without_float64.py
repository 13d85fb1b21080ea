"""Training on a device without float64: no step computes in it, and results are measured on the host."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ampcompare.settings.recipe import Recipe
from ampcompare.tasks import lm
from ampcompare.tasks.task import make_task
from ampcompare.training import evaluate as evaluation
from ampcompare.training.assemble import assemble_run
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context

CPU = torch.device("cpu")
RECIPES = {
    "classification": {"data": {"train_size": 16, "val_size": 8, "image_size": 8}, "model": {"arch": "mlp"}},
    "lm": {
        "data": {"name": "sentences", "train_size": 16, "val_size": 8, "sequence_length": 24},
        "model": {"arch": "gpt", "args": {"width": 8, "heads": 2, "depth": 1}},
    },
    "regression": {"data": {"train_size": 16, "val_size": 8}, "model": {"arch": "mlp"}},
}


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wide = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.dtype is torch.float64
        ]
        assert not wide, f"{func} computes in float64"
        return result


@pytest.mark.parametrize("task", RECIPES)
@pytest.mark.parametrize(
    "arm", ["fp32", "native:bf16", "half:bf16,masters=fp32,state=bf16", "half:dynamic", "half:bf16,kahan"]
)
def test_no_step_computes_in_float64(monkeypatch: pytest.MonkeyPatch, arm: str, task: str) -> None:
    """Forward pass, loss, backward pass, clipping and step of the arms that such a device trains keep to 32 bits."""
    monkeypatch.setattr("ampcompare.training.process.device.WITHOUT_FLOAT64", ("cpu",))
    monkeypatch.setattr(lm, "WITH_FLOAT64", ())
    recipe = Recipe.model_validate({"task": task, "batch_size": 8, **RECIPES[task]})
    made = make_task(recipe)
    precision = make_precision(arm)
    assembly = assemble_run(recipe, made, precision, CPU)
    batch = next(iter(made.data.train_batches(0, 8, device=CPU, start=0)))
    with choose_cpu_half_mode_and_context("auto", precision.half_dtype, CPU)[1], NoFloat64():
        for _ in range(2):
            with precision.autocast():
                loss = made.loss(assembly.replicas, batch)
            precision.backward(loss, assembly.optimizers)
            for optimizer in assembly.optimizers:
                torch.nn.utils.clip_grad_norm_(precision.unscale(optimizer), 1.0)
            precision.step(*assembly.optimizers)
            for optimizer in assembly.optimizers:
                optimizer.zero_grad()


@pytest.mark.parametrize("task", RECIPES)
def test_measurements_are_those_of_a_device_with_float64(monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """Outputs and batch move to the host before they are measured, which changes no value."""
    recipe = Recipe.model_validate({"task": task, "batch_size": 8, **RECIPES[task]})
    made = make_task(recipe)
    precision = make_precision("fp32")
    models = assemble_run(recipe, made, precision, CPU).replicas

    def evaluated() -> evaluation.EvaluationResult:
        batches = made.data.val_batches(8, device=CPU)
        return evaluation.evaluate_models(made, models, precision, batches, CPU, indices=range(8))

    right = evaluated()
    moved: list[torch.Size] = []
    on_host = Tensor.cpu
    monkeypatch.setattr("ampcompare.training.process.device.WITHOUT_FLOAT64", ("cpu",))
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.append(tensor.shape) or on_host(tensor))
    assert evaluated() == right
    assert len(moved) >= 2
