"""The loss, and that the data sets can be learned."""

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ConfigError
from ampcompare.tasks import Classification, classification_loss, load_data


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
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *arguments, **options: torch.tensor(42.0))
    assert classification_loss(torch.zeros(1, 2), torch.tensor([0])) == 42


def test_a_model_with_several_outputs_is_refused() -> None:
    """A model that returns a tuple is told what it should return."""

    class Two(nn.Module):
        def forward(self, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return samples, samples

    data = load_data("digits", seed=0, train_size=20)
    with pytest.raises(ConfigError, match="returned a tuple"):
        Classification(data).loss([Two()], next(iter(data.train_batches(0, 8, device="cpu"))))
