"""Language modelling: what it measures, filling that has no part in it, and that it is learned."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import ConfigError
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import BITS_PER_BYTE, PERPLEXITY
from ampcompare.tasks.lm import Gpt, LanguageModeling, lm
from ampcompare.tasks.task import make_task
from ampcompare.training.evaluate import EvaluationResult, evaluate_models
from ampcompare.training.precision.base import make_precision

CPU = torch.device("cpu")
SMALL = {"width": 16, "heads": 2, "depth": 1}


def task(data: str = "sentences", **options: Any) -> LanguageModeling:
    """A tiny model on a few samples of at most 40 bytes."""
    sizes = {"sequence_length": 40, "train_size": 24, "val_size": 10}
    recipe = {"task": "lm", "data": {"name": data, **sizes}, "model": {"args": SMALL}, **options}
    return lm(Recipe.model_validate(recipe))


def model() -> nn.Module:
    """A model in float64 whose predictions differ from uniform."""
    torch.manual_seed(0)
    made = Gpt(256, width=16, heads=2, depth=1).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def batch(made: LanguageModeling, size: int = 12) -> dict[str, Tensor]:
    found: dict[str, Tensor] = next(iter(made.data.train_batches(0, size, device="cpu")))
    return found


def measured(made: LanguageModeling, net: nn.Module, batch_size: int = 10) -> EvaluationResult:
    batches = made.data.val_batches(batch_size, device="cpu")
    return evaluate_models(made, [net], make_precision("fp32"), batches, CPU)


def single_losses(net: nn.Module, samples: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the sum of losses over sequences one by one, without filling, and their number of bytes."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, mask in zip(samples["tokens"].long(), samples["mask"], strict=True):
        length = int(mask.sum())
        logits = net(tokens[None, :length])[0]
        total = total + F.cross_entropy(logits, tokens[1 : length + 1], reduction="sum")
        count += length
    return total, count


def test_the_loss_of_lines_is_that_of_single_sequences() -> None:
    """Loss and gradients are those of a loop over the sequences alone, divided by the average length."""
    made, net = task(), model()
    samples = batch(made)
    assert not samples["mask"].all()
    average = int(made.data.train["mask"].sum()) / 24
    expected = single_losses(net, samples)[0] / (12 * average)
    gradients = torch.autograd.grad(expected, list(net.parameters()))
    loss = made.loss([net], samples)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    for found, wanted in zip(torch.autograd.grad(loss, list(net.parameters())), gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)
    assert made.units_per_sample == round(average)


@pytest.mark.parametrize("data", ["sentences", "grammar"])
def test_the_mean_over_micro_batches_is_that_of_the_batch(data: str) -> None:
    """Micro-batches of unequal numbers of bytes, or ranks, have together the gradient of the whole batch."""
    made, net = task(data), model()
    samples = batch(made)
    parts = made.split(samples, 3)
    if data == "sentences":
        assert len({int(part["mask"].sum()) for part in parts}) > 1
    mean = sum(made.loss([net], part) for part in parts) / 3
    whole = made.loss([net], samples)
    torch.testing.assert_close(mean, whole, rtol=1e-9, atol=0)
    found, wanted = (torch.autograd.grad(loss, list(net.parameters())) for loss in (mean, whole))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("batch_size", [3, 10])
def test_bits_per_byte_are_over_all_bytes(batch_size: int) -> None:
    """The metric is the sum of bits over that of bytes, however the validation lines fall into batches."""
    made, net = task(), model()
    found = measured(made, net, batch_size)
    total, count = single_losses(net, made.data.val)
    bits = float(total.detach()) / count / math.log(2)
    assert found.values[BITS_PER_BYTE.name] == pytest.approx(bits, rel=1e-6)
    assert found.values[PERPLEXITY.name] == pytest.approx(2**bits, rel=1e-5)
    assert found.loss == pytest.approx(bits * math.log(2), rel=1e-6)


class Constant(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits.expand(*tokens.shape, -1)


def test_chance_is_the_best_constant_guess() -> None:
    """A model that knows how frequent each byte is, and no more, reaches `chance`; a uniform one needs 8 bits."""
    made = task()
    seen = made.data.val["tokens"][:, 1:][made.data.val["mask"]].long()
    for logits, is_best in ((seen.bincount(minlength=256).double().log(), True), (torch.zeros(256), False)):
        found = measured(made, Constant(logits))
        assert found.values[BITS_PER_BYTE.name] == pytest.approx(found.chance if is_best else 8.0, rel=1e-5)
    assert found.chance is not None
    assert 3.5 < found.chance < 5


def test_a_diverged_model_has_no_value() -> None:
    """Infinite losses give no error: the metric is infinite or NaN."""
    made = task()
    for logits, expected in (
        (torch.full((256,), math.nan), math.isnan),
        (torch.arange(256) * 1e30, math.isinf),
    ):
        found = measured(made, Constant(logits))
        assert expected(found.values[PERPLEXITY.name])


def test_another_text_has_other_labels() -> None:
    """The hash of a sample changes with any of its bytes and their order."""
    made = task("grammar")
    tokens = torch.arange(24, dtype=torch.uint8).reshape(2, 12).repeat(2, 1)
    tokens[2, 5] += 1
    tokens[3, [1, 2]] = tokens[3, [2, 1]]
    hashes = made.labels({"tokens": tokens})
    assert hashes.dtype is torch.int64
    assert len(set(hashes.tolist())) == 4
    assert 0 <= int(hashes.min()) <= int(hashes.max()) < 2**31


def test_other_models_and_options_are_refused() -> None:
    """A model that gives no logits for each byte is told what it should give, and images are not resized here."""
    made = task("grammar")
    with pytest.raises(ConfigError, match=r"returned a Tensor of shape \(12, 256\); lm needs one tensor"):
        made.loss([nn.Sequential(nn.Embedding(256, 256), Last())], batch(made))
    for ignored in ({"data": {"image_size": 8}}, {"tta": "flips"}):
        with pytest.raises(ConfigError, match="the task lm does not use the setting"):
            make_task(Recipe.model_validate({"task": "lm", **ignored}))
    with pytest.raises(ConfigError, match="did you mean 'gpt'"):
        LanguageModeling(made.data, ModelConfig(arch="gtp")).make_models()


class Last(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, -1]
