"""The contract of a task: data, models, the loss of a batch, what an evaluation measures; and a task by its name."""

import abc
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import ConfigError
from ampcompare.results.records.metric import Metric
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.catalog import check_task_of_recipe, task_path_and_is_bundled
from ampcompare.tasks.data import Data, split_batch, to_channels_last
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory

LossOf = Callable[[Sequence[nn.Module], Any], Tensor]
Sums = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Phase:
    """One part of an update: a loss, and the optimizers that step on its gradients before the next phase begins.

    Attributes:
        name: of the loss, such as discriminator.
        loss: of the models on a batch, a tensor of one element; called inside the arm's autocast.
        optimizers: places in the list that `Task.make_optimizers` returned.
    """

    name: str
    loss: LossOf
    optimizers: tuple[int, ...]


class Task(abc.ABC):
    """What an arm is trained on, and what it is judged by.

    A subclass sets `metrics` and `data` and overrides `make_models`, `loss` and `measure`; the rest has defaults.
    A batch is whatever the data yield: a tensor, or tuples and dicts of tensors, the batch being their first dimension.

    Attributes:
        metrics: what is measured; verdicts are about the first.
        unit: what throughput is counted in.
        units_per_sample: how many of them a sample has, such as the tokens of a sequence.
        data: training and validation batches.
    """

    metrics: ClassVar[Sequence[Metric]]
    unit: ClassVar[str] = "samples"
    units_per_sample: int = 1
    data: Data

    @abc.abstractmethod
    def make_models(self) -> Sequence[nn.Module]:
        """Build the models in fp32 on the CPU; weights come from torch's global generator, which is seeded."""

    def make_optimizers(
        self, models: Sequence[nn.Module], make: Callable[[nn.Module], Optimizer]
    ) -> list[Optimizer]:
        """Build the optimizers over models that are on their device; by default one for each model.

        Args:
            models: as `make_models` returns them.
            make: returns the optimizer of the recipe over the parameters of a module.
        """
        return [make(model) for model in models]

    def phases(self, num_optimizers: int) -> Sequence[Phase]:
        """Return the parts of an update in their order; by default one loss for all optimizers."""
        return (Phase("loss", self.loss, tuple(range(num_optimizers))),)

    @abc.abstractmethod
    def loss(self, models: Sequence[nn.Module], batch: Any) -> Tensor:
        """Return the mean loss of a training batch, one element; called inside the arm's autocast.

        Args:
            models: as `make_models` returns them, prepared by the arm.
            batch: of the data, on the device.
        """

    def predict(self, models: Sequence[nn.Module], batch: Any) -> Any:
        """Return what `measure` needs of a validation batch; called in evaluation mode inside the arm's autocast.

        The default is the first model on the first part of the batch.

        Args:
            models: as `make_models` returns them, prepared by the arm.
            batch: of the data, on the device.
        """
        return models[0](batch[0])

    @abc.abstractmethod
    def measure(self, outputs: Any, batch: Any) -> Mapping[str, Tensor]:
        """Return measurements of each sample, which are summed over the validation set in float64, over all ranks.

        Args:
            outputs: what `predict` returned, with 16-bit tensors cast to float32.
            batch: a validation batch.

        Returns:
            By name, (samples,) or (samples, ...). Those named like a metric are its values by sample; `loss` is the
            validation loss of each sample, if it has one. Every batch has the same names and further dimensions.
        """

    def answers(self, outputs: Any, batch: Any) -> Tensor | None:
        """Return what the models decide, by which evaluations in two precisions are compared; None for no decisions.

        Args:
            outputs: as for `measure`.
            batch: a validation batch.

        Returns:
            (samples, ...) of whole numbers, such as the class of each sample; below 0 where nothing is asked.
        """
        return None

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        """Return the value of each metric, by name; by default the mean over samples of what has its name.

        Args:
            sums: over the validation set of what `measure` returned: float64 on the host, without the first dimension.
            samples: that were measured.
        """
        return {metric.name: float(sums[metric.name]) / samples for metric in self.metrics}

    def chance(self, sums: Sums, samples: int) -> float | None:
        """Return the value of the first metric that a constant guess reaches; None where it is not known.

        Args:
            sums: of `measure` over the validation set.
            samples: in that set.
        """
        return None

    def labels(self, batch: Any) -> Tensor | None:
        """Return a whole number for each sample of a validation batch, by which two runs see that they had the same.

        Returns:
            (samples,) int64, or None.
        """
        return None

    def split(self, batch: Any, count: int) -> Sequence[Any]:
        """Return a batch as micro-batches of equal size; by default each tensor in it is cut along its first dimension.

        Args:
            batch: of the data.
            count: of micro-batches; it divides the batch size.
        """
        return split_batch(batch, count)

    def channels_last(self, batch: Any) -> Any:
        """Return a batch with its images in channels-last format; by default these are its tensors of rank four."""
        return to_channels_last(batch)

    def checkpointed_modules(self, models: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Return the modules whose activations are computed again in the backward pass when that is asked for."""
        return ()


def make_task(recipe: Recipe) -> Task:
    """Build the task of a recipe, with its data.

    Raises:
        ConfigError: there is no such task, its data or model does not fit it, or a factory fails or returns no task.
    """
    path, ships = task_path_and_is_bundled(recipe.task)
    if ships:
        check_task_of_recipe(recipe)
        module, _, name = path.partition(":")
        made: Task = getattr(importlib.import_module(module), name)(recipe)
        return made
    factory = resolve_factory(path)
    with factory_errors_reported(path, "calling it"):
        task: Any = factory(recipe)
    if not isinstance(task, Task):
        raise ConfigError(
            f"factory {path} returned a {type(task).__name__}; it must return an ampcompare.tasks.Task"
        )
    _check_user_task(path, task)
    return task


def _check_user_task(path: str, task: Task) -> None:
    """Check that a user's task has what the contract asks for."""
    metrics = getattr(task, "metrics", ())
    if not metrics:
        raise ConfigError(
            f"task {path} has no metrics; set the class attribute metrics to one or more Metric"
        )
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise ConfigError(f"task {path} has two metrics of one name: {', '.join(names)}")
    if not isinstance(getattr(task, "data", None), Data):
        raise ConfigError(f"task {path} has no data; set self.data to a Data, such as TensorData.of(...)")
