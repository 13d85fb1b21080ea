"""Regression: units, the constant guess, users' tables, and that it is learned."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.regression import Regression, load_diabetes_table, regression
from ampcompare.training.evaluate import EvaluationResult, evaluate_models
from ampcompare.training.precision.base import make_precision

CPU = torch.device("cpu")


def measured(task: Regression, model: nn.Module) -> EvaluationResult:
    return evaluate_models(
        task, [model], make_precision("fp32"), task.data.val_batches(50, device="cpu"), CPU
    )


class Guess(nn.Module):
    def forward(self, samples: Tensor) -> Tensor:
        return torch.zeros(len(samples), 1)


def test_the_mean_as_a_guess_is_chance() -> None:
    """A standardized guess of 0 is the mean of the training targets, and its RMSE is in their unit."""
    (_, train), (_, val) = load_diabetes_table()
    assert (len(train), len(val)) == (331, 111)
    found = measured(regression(Recipe(task="regression")), Guess())
    expected = float((val - train.mean()).square().mean().sqrt())
    assert found.values["RMSE"] == pytest.approx(expected, rel=1e-5)
    assert found.chance == pytest.approx(expected, rel=1e-5)
    assert 70 < expected < 85


def test_every_sample_counts_once() -> None:
    """The RMSE over batches is that over all samples at once, not the mean of the batches'."""
    torch.manual_seed(0)
    part = torch.randn(13, 3), torch.randn(13) * 10 + 5
    task = Regression(part, part)
    model = task.make_models()[0]
    with torch.no_grad():
        outputs = model(task.data.val[0]).flatten() * part[1].std(correction=0) + part[1].mean()
    expected = float((outputs - part[1]).square().mean().sqrt())
    for size in (4, 13):
        batches = task.data.val_batches(size, device="cpu")
        found = evaluate_models(task, [model], make_precision("fp32"), batches, CPU)
        assert found.values["RMSE"] == pytest.approx(expected, rel=1e-5)


def test_a_users_table(user_module: Callable[[str, str], None]) -> None:
    """A factory gives both parts, also as arrays; a column without variation and unequal counts are met."""
    user_module(
        "table",
        "import numpy as np\n\n\n"
        "def good():\n    x = np.ones((6, 2))\n    x[:, 0] = range(6)\n    return (x, x[:, 0]), (x[:3], x[:3, 0])\n\n\n"
        "def bad():\n    return (np.ones((6, 2)), np.ones(5)), (np.ones((6, 2)), np.ones(6))\n",
    )
    task = regression(
        Recipe.model_validate({"task": "regression", "data": {"name": "table:good", "val_size": 2}})
    )
    assert (task.data.num_train, task.data.num_val) == (6, 2)
    assert all(torch.isfinite(part).all() for part in task.data.train)
    with pytest.raises(ConfigError, match="6 samples and 5 targets"):
        regression(Recipe.model_validate({"task": "regression", "data": {"name": "table:bad"}}))
