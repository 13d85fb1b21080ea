"""Images in folders."""

import shutil
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import ConfigError
from ampcompare.tasks import load_data


def test_images_are_read_by_class(image_root: Path) -> None:
    """Classes are the folders in alphabetical order; images come in color, in the size asked for."""
    data = load_data(f"imagefolder:{image_root}", seed=0, image_size=16, channels=3)
    assert (data.num_train, data.num_val, data.num_classes, data.sample_shape) == (15, 9, 3, (3, 16, 16))
    samples, labels = next(iter(data.val_batches(9, device="cpu")))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    brightest = samples.mean((2, 3)).argmax(1)
    assert brightest.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]  # blue, green and red lie in channels 2, 1 and 0


def test_the_folder_can_be_that_of_the_data(image_root: Path) -> None:
    """Without a path in its name the images lie in the data folder; a path in the name comes first."""
    data = load_data("imagefolder", seed=0, data_dir=str(image_root), image_size=8)
    assert (data.num_train, data.num_val) == (15, 9)
    assert load_data(f"imagefolder:{image_root}", seed=0, data_dir="elsewhere", image_size=8).num_train == 15


def test_the_default_size_is_that_of_imagenet(image_root: Path) -> None:
    """Without an image size, training and validation images are 224x224."""
    data = load_data(f"imagefolder:{image_root}", seed=0, val_size=2)
    assert data.sample_shape == (3, 224, 224)
    assert next(iter(data.val_batches(2, device="cpu")))[0].shape == (2, 3, 224, 224)
    assert next(iter(data.train_batches(0, 2, device="cpu")))[0].shape == (2, 3, 224, 224)


def test_a_subset_has_all_classes(image_root: Path) -> None:
    """Three of fifteen images are one of each class, although files are sorted by class."""
    data = load_data(f"imagefolder:{image_root}", seed=0, image_size=8, train_size=3)
    _, labels = next(iter(data.train_batches(0, 3, device="cpu")))
    assert sorted(labels.tolist()) == [0, 1, 2]


def test_augmentation_can_be_left_out(image_root: Path) -> None:
    for augment in (False, True):
        data = load_data(f"imagefolder:{image_root}", seed=0, image_size=8, augment=augment)
        epochs = [next(iter(data.train_batches(epoch, 15, device="cpu"))) for epoch in (0, 1)]
        sums = [torch.stack(sorted(samples.sum((1, 2, 3)))) for samples, _ in epochs]
        assert torch.allclose(*sums) is not augment


def refused(name: str, **options: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load_data(name, seed=0, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_other_layouts_are_told(image_root: Path, tmp_path: Path) -> None:
    """No folder, no part, no class, no image and unequal classes each name the folder, and how images are to lie."""
    assert f"no images in {tmp_path / 'none' / 'train'}" in refused(f"imagefolder:{tmp_path / 'none'}")
    assert "write imagefolder:PATH" in refused("imagefolder")
    shutil.move(image_root / "val" / "red", image_root / "val" / "pink")
    assert "has pink, red in one of train and val only" in refused(f"imagefolder:{image_root}")
    for path in (image_root / "train" / "red").iterdir():
        path.unlink()
    assert "no images in" in (message := refused(f"imagefolder:{image_root}"))
    assert "red" in message
    shutil.rmtree(image_root / "train")
    (image_root / "train").mkdir()
    assert f"no images in {image_root / 'train'}" in refused(f"imagefolder:{image_root}")
    assert "1 channels were requested" in refused(f"imagefolder:{image_root}", channels=1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.integration
def test_a_damaged_image_is_named(image_root: Path, workers: int) -> None:
    """Reading on into a file that is no image names that file in one line, from a worker process too."""
    (image_root / "val" / "blue" / "0.png").write_bytes(b"no image")
    data = load_data(f"imagefolder:{image_root}", seed=0, image_size=8)
    with pytest.raises(ConfigError, match=r"blue.0\.png cannot be read as an image") as caught:
        next(iter(data.val_batches(9, device="cpu", workers=workers)))
    assert str(caught.value).startswith(str(image_root))
    assert "\n" not in str(caught.value)
