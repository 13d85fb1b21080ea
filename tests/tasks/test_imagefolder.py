"""Images in folders."""

import shutil
from pathlib import Path

import pytest

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
