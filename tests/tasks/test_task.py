"""The loss, data sets that can be learned, and test-time augmentation: its views, and their averaged logits."""

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.tasks import classification_loss, load_data
from ampcompare.tasks.classification import Classification, make_shifted_and_mirrored_views
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.in_memory import make_memory_data
from ampcompare.training.evaluate import evaluate_models
from ampcompare.training.precision.base import make_precision


def test_loss_is_cross_entropy() -> None:
    """The loss is the mean negative log probability, mixed with that of all classes under label smoothing."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    negative = -logits.log_softmax(1)
    expected = negative[torch.arange(6), labels].mean()
    torch.testing.assert_close(classification_loss(logits, labels), expected)
    smoothed = 0.9 * expected + 0.1 * negative.mean()
    torch.testing.assert_close(classification_loss(logits, labels, label_smoothing=0.1), smoothed)


def test_a_replaced_cross_entropy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is looked up when the loss is computed, as an arm that patches torch needs it."""
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda *arguments, **options: torch.tensor(42.0)
    )
    assert classification_loss(torch.zeros(1, 2), torch.tensor([0])) == 42


def test_a_model_with_several_outputs_is_refused() -> None:
    """A model that returns a tuple is told what it should return."""

    class Two(nn.Module):
        def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return samples, samples

    data = load_data("digits", seed=0, train_size=20)
    with pytest.raises(ConfigError, match="returned a tuple"):
        Classification(data).loss([Two()], next(iter(data.train_batches(0, 8, device="cpu"))))


IMAGE = torch.arange(6.0).reshape(1, 1, 2, 3)


def test_views_of_an_image() -> None:
    """A flip exchanges left and right; a shift repeats the edge that it uncovers."""
    assert make_shifted_and_mirrored_views("none", (1, 2, 3)) == ()
    (flip,) = make_shifted_and_mirrored_views("flips", (1, 2, 3))
    assert flip(IMAGE).tolist() == [[[[2, 1, 0], [5, 4, 3]]]]
    down, up, right, left = (
        view(IMAGE)[0, 0].tolist() for view in make_shifted_and_mirrored_views("shifts", (1, 2, 3))
    )
    assert down == [[0, 1, 2], [0, 1, 2]]
    assert up == [[3, 4, 5], [3, 4, 5]]
    assert right == [[0, 0, 1], [3, 3, 4]]
    assert left == [[1, 2, 2], [4, 5, 5]]


def test_samples_that_are_no_images_are_refused() -> None:
    """Rows of features cannot be flipped, and the message says what to choose."""
    with pytest.raises(UnsupportedCombination, match=r"shape \(8, 4\); use --tta none"):
        make_shifted_and_mirrored_views("flips", (8, 4))


class Columns(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.sum((1, 2))


@pytest.mark.parametrize("arm", ["fp32", "apex:O1", "apex:O2", "native:bf16", "half"])
def test_logits_of_all_views_are_averaged(arm: str) -> None:
    """Right answers and loss are those of the mean of the logits, in any arm."""
    torch.manual_seed(0)
    images, labels = torch.randn(16, 1, 4, 3), torch.arange(16) % 3
    model = Columns()
    layer = nn.Linear(1, 1)
    precision = make_precision(arm)
    (model,), _ = precision.prepare([model], [torch.optim.SGD(layer.parameters(), lr=0.1)])  # type: ignore[assignment]
    cpu = torch.device("cpu")
    batches = [(images[:10], labels[:10]), (images[10:], labels[10:])]
    part = (images, labels)
    data = make_memory_data(
        "three", part, part, SampleOptions(0), num_classes=3, moved_share=0.0, background=0.0
    )
    found = evaluate_models(Classification(data, tta="flips"), [model], precision, batches, cpu)
    logits = (Columns()(images) + Columns()(images).flip(-1)) / 2
    assert found.samples == 16
    assert found.counts["top-1"] == int((logits.argmax(1) == labels).sum())
    assert found.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=0.02)
    alone = evaluate_models(Classification(data), [model], precision, batches, cpu)
    assert alone.loss != pytest.approx(found.loss, rel=0.02)
