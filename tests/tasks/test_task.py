"""The loss, and that the data sets can be learned."""

import pytest
import torch
from torch import nn

from ampcompare.base.errors import ConfigError
from ampcompare.tasks import Classification, Data, build_model, classification_loss, load_data


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


def train(data: Data, model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> float:
    """Return the validation accuracy after `epochs` under a cosine schedule."""
    task = Classification(data)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * data.num_batches(64))
    for epoch in range(epochs):
        for batch in data.train_batches(epoch, 64, device="cpu"):
            optimizer.zero_grad()
            task.loss([model], batch).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        hits = [(model(samples).argmax(1) == labels).sum() for samples, labels in data.val_batches(128, device="cpu")]
    return int(torch.stack(hits).sum()) / data.num_val


@pytest.mark.integration
def test_models_learn_digits() -> None:
    """An epoch of the convnet, and a few of the others, tell most validation digits apart: chance is 10 %."""
    data = load_data("digits", seed=0)

    def accuracy(arch: str, epochs: int, **options: float) -> float:
        torch.manual_seed(0)
        model = build_model(arch, num_classes=10, sample_shape=data.sample_shape)
        make = torch.optim.SGD if "momentum" in options else torch.optim.AdamW
        return train(data, model, make(model.parameters(), **options), epochs)

    assert accuracy("convnet", 1, lr=0.05, momentum=0.9, weight_decay=1e-4) > 0.7
    assert accuracy("mlp", 2, lr=0.05, momentum=0.9) > 0.8
    assert accuracy("transformer", 2, lr=3e-3) > 0.7
