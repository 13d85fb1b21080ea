"""The data sets that need no files."""

import sys

import pytest
import torch
from sklearn.datasets import load_digits

from ampcompare.base.errors import BackendUnavailable, ConfigError
from ampcompare.tasks import load_data
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.image_data import load_digits_data
from ampcompare.tasks.in_memory import resize_images, shift_images
from ampcompare.tasks.overflow_digits import BRIGHTNESS, overflow_digits


def test_digits_are_split_once_and_evenly() -> None:
    """1,437 and 360 digits, the same for every seed, each class with a fifth of its own in validation."""
    first, second = load_data("digits", seed=0), load_data("digits", seed=7)
    assert (first.num_train, first.num_val, first.num_classes, first.sample_shape) == (
        1437,
        360,
        10,
        (1, 8, 8),
    )
    assert torch.equal(first.val[0], second.val[0])
    assert torch.equal(first.train[1], second.train[1])
    everything = torch.bincount(torch.from_numpy(load_digits().target))
    held_out = torch.bincount(first.val[1], minlength=10)
    assert (held_out - everything / 5).abs().max() < 1
    assert torch.equal(torch.bincount(first.train[1], minlength=10) + held_out, everything)


def test_digits_part_no_image_twice() -> None:
    """Training and validation together are exactly scikit-learn's images, normalized."""
    data = load_data("digits", seed=0)
    both = torch.cat([data.train[0], data.val[0]]).flatten(1)
    pixels = (both - both.min()) / (both.max() - both.min()) * 16
    expected = torch.from_numpy(load_digits().data).float()
    assert sorted(map(tuple, pixels.round().tolist())) == sorted(map(tuple, expected.tolist()))
    assert abs(float(data.train[0].mean())) < 0.01
    assert abs(float(data.train[0].std()) - 1) < 0.01


def test_augmentation_moves_some_digits_by_a_pixel() -> None:
    data = load_data("digits", seed=0)
    plain = load_data("digits", seed=0, augment=False)
    moved = 0
    for (samples, labels), (originals, same_labels) in zip(
        data.train_batches(0, 50, device="cpu"), plain.train_batches(0, 50, device="cpu"), strict=True
    ):
        assert torch.equal(labels, same_labels)
        moved += int((samples != originals).flatten(1).any(1).sum())
    assert 80 < moved < 180
    together = torch.cat([samples for samples, _ in plain.train_batches(0, 1437, device="cpu")])
    assert sorted(together.flatten(1).sum(1).tolist()) == sorted(plain.train[0].flatten(1).sum(1).tolist())


def test_shifts_move_rows_down_and_columns_right() -> None:
    images = torch.arange(24.0).reshape(2, 1, 3, 4)
    moved = shift_images(images, torch.tensor([[1, -1], [0, 0]]), fill=-5.0)
    expected = torch.full((3, 4), -5.0)
    expected[1:, :-1] = images[0, 0, :-1, 1:]
    assert torch.equal(moved[0, 0], expected)
    assert torch.equal(moved[1], images[1])


def test_subsets_keep_the_classes_even() -> None:
    """A subset has each class about equally often, and is the same for every seed."""
    data = load_data("digits", seed=0, train_size=100, val_size=20)
    assert (data.num_train, data.num_val) == (100, 20)
    assert torch.bincount(data.train[1]).tolist() == pytest.approx([10] * 10, abs=1)
    assert torch.equal(data.train[0], load_data("digits", seed=3, train_size=100).train[0])


@pytest.mark.parametrize(
    "options", [{"train_size": 1438}, {"val_size": 361}, {"train_size": 0}, {"image_size": -1}]
)
def test_sizes_that_cannot_be_had_are_refused(options: dict[str, int]) -> None:
    """Too many samples, and sizes below one, are errors that tell the value."""
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        load_data("digits", seed=0, **options)


def test_digits_can_be_resized_and_colored() -> None:
    """Image size and channels change the shape; the channels are equal, and resizing to the same size is free."""
    data = load_data("digits", seed=0, image_size=16, channels=3)
    assert data.sample_shape == (3, 16, 16)
    assert torch.equal(data.val[0][:, 0], data.val[0][:, 2])
    assert data.val[0].mean().item() == pytest.approx(
        load_data("digits", seed=0).val[0].mean().item(), abs=0.02
    )
    images = torch.rand(2, 1, 8, 8)
    assert resize_images(images, 8) is images


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(BackendUnavailable, match="pip install scikit-learn"):
        load_data("digits", seed=0)


def test_synthetic_images_follow_the_options() -> None:
    """Size, channels and counts are as asked for, the images the same for every seed, all classes equally often."""
    data = load_data("synthetic", seed=0, image_size=12, channels=1, train_size=200, val_size=50)
    assert (data.sample_shape, data.num_train, data.num_val, data.num_classes) == ((1, 12, 12), 200, 50, 10)
    again = load_data("synthetic", seed=5, image_size=12, channels=1, train_size=200, val_size=50)
    assert torch.equal(data.train[0], again.train[0])
    assert torch.bincount(data.train[1]).tolist() == [20] * 10
    assert not torch.equal(data.train[0][:50], data.val[0])
    assert load_data("synthetic", seed=0, train_size=20).sample_shape == (3, 32, 32)


def test_a_few_training_images_have_one_bright_pixel() -> None:
    """One image in 500 differs from the digits, in one pixel that fp16 can hold, whatever the seed."""
    plain, bright, other = (
        load_digits_data(SampleOptions(0, augment=False)),
        overflow_digits(seed=0),
        overflow_digits(seed=1),
    )
    changed = (plain.train[0] != bright.train[0]).flatten(1).sum(1)
    assert int((changed > 0).sum()) == round(len(changed) / 500) == 3
    assert int(changed.max()) == 1
    assert bright.train[0].max() == BRIGHTNESS < torch.finfo(torch.float16).max
    assert torch.equal(bright.train[0], other.train[0])
    assert torch.equal(plain.train[1], bright.train[1])
    assert torch.equal(plain.val[0], bright.val[0])
