"""A generative adversarial network in the plane: two models, two losses and two optimizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import DISTANCE, GAN
from ampcompare.tasks.data import seeded_generator
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory, select_arguments
from ampcompare.tasks.in_memory import TensorData
from ampcompare.tasks.task import Phase, Sums, Task

TRAIN, VAL = 2048, 4096
MODES = 8  # on the unit circle
SPREAD = 0.12  # standard deviation of a mode
LATENT = 4
SLOPE = 0.2  # of a leaky ReLU below 0
CELLS = 10  # on a side of the histogram
BORDER = 1.5  # of the histogram; what lies outside counts in its outer cells


def gan(recipe: Recipe) -> Gan:
    train = _draw_points("training", recipe.data.train_size or TRAIN)
    val = _draw_points("validation", recipe.data.val_size or VAL)
    latents = torch.randn(len(val), LATENT, generator=seeded_generator("latents of validation"))
    data = _PointsWithLatents.of("gaussians", (train,), (val, latents), seed=recipe.seed)
    return Gan(data, recipe.model)


def _draw_points(part: str, count: int) -> Tensor:
    """Return points (count, 2) of eight normal distributions around the unit circle, the same ones for every seed."""
    draws = seeded_generator(f"eight modes, {part}")
    angles = torch.randint(MODES, (count,), generator=draws) * (2 * math.pi / MODES)
    return torch.stack([angles.cos(), angles.sin()], 1) + SPREAD * torch.randn(count, 2, generator=draws)


@dataclass(frozen=True, eq=False)
class _PointsWithLatents(TensorData):
    """Points, and latent vectors that each epoch draws again: one for each of the two losses."""

    def _training_samples_of_epoch(self, epoch: int, device: torch.device) -> Any:
        (points,) = super()._training_samples_of_epoch(epoch, device)
        draws = seeded_generator("latents", self.seed, epoch)
        return points, *(torch.randn(self.num_train, LATENT, generator=draws).to(device) for _ in range(2))


class Gan(Task):
    """A generator and a discriminator that are updated in turn, with the non-saturating loss.

    The metric compares histograms of validation points and of as many generated ones, on a grid of 10 by 10 cells: the
    total variation distance, 0 where they are equal and 1 where they share no cell. Training batches are float32 points
    (batch, 2) and two sets of latents (batch, 4).

    Sources: Goodfellow et al., NeurIPS 2014; eight modes on a circle: Metz et al., ICLR 2017.
    """

    metrics = GAN

    def __init__(self, data: TensorData, model: ModelConfig | None = None) -> None:
        self.data = data
        self._model = model or ModelConfig(arch="mlp")

    def make_models(self) -> Sequence[nn.Module]:
        arch, arguments = self._model.arch, dict(self._model.args)
        if ":" not in arch:
            width = arguments.pop("width", 64)
            if arguments:
                raise ConfigError(f"{arch} has no argument {next(iter(arguments))!r}; it has width")
            return _make_mlp(LATENT, 2, width), _make_mlp(2, 1, width)
        factory = resolve_factory(arch)
        with factory_errors_reported(arch, "calling it"):
            models = factory(**{**select_arguments(factory, {"latent": LATENT}), **arguments})
        if not isinstance(models, tuple | list) or [isinstance(model, nn.Module) for model in models] != [
            True,
            True,
        ]:
            raise ConfigError(
                f"factory {arch} must return two torch.nn.Module, a generator and a discriminator"
            )
        return models

    def phases(self, num_optimizers: int) -> Sequence[Phase]:
        return Phase("discriminator", self.loss, (1,)), Phase("generator", self.generator_loss, (0,))

    def loss(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the loss of the discriminator: real points against generated ones that carry no gradient back."""
        generate, discriminate = models
        points, latents, _ = batch
        with torch.no_grad():
            generated = generate(latents)
        # One call for both halves: DDP takes one forward pass for each backward pass.
        logits = discriminate(torch.cat([points, generated.to(points.dtype)]))[:, 0]
        target = torch.zeros_like(logits)
        target[: len(points)] = 1
        return F.binary_cross_entropy_with_logits(logits, target)

    def generator_loss(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Return the loss of the generator: how far the discriminator is from taking its points for real."""
        generate, discriminate = models
        logits = discriminate(generate(batch[2]))[:, 0]
        return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))

    def predict(self, models: Sequence[nn.Module], batch: tuple[Tensor, Tensor]) -> Tensor:
        points: Tensor = models[0](batch[1])
        return points

    def measure(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"real": _grid_cells_of_points(batch[0]), "generated": _grid_cells_of_points(outputs)}

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        return {DISTANCE.name: float(abs(sums["generated"] - sums["real"]).sum()) / (2 * samples)}

    def chance(self, sums: Sums, samples: int) -> float:
        """Return the distance of a generator that always gives a point of the fullest cell."""
        return 1 - float(sums["real"].max()) / samples


def _grid_cells_of_points(points: Tensor) -> Tensor:
    """Return which cell of the grid each point is in: (points, cells) bool. A point that is not finite is in none."""
    finite = points.isfinite().all(1, keepdim=True)
    places = (points.nan_to_num().clamp(-BORDER, BORDER) + BORDER) * (CELLS / (2 * BORDER))
    rows, columns = places.long().clamp(max=CELLS - 1).unbind(1)
    return F.one_hot(rows * CELLS + columns, CELLS * CELLS).bool() & finite


def _make_mlp(inputs: int, outputs: int, width: int) -> nn.Sequential:
    sizes = [inputs, width, width]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.LeakyReLU(SLOPE)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))
