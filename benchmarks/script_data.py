"""Made-up data in the folders that public training scripts read: classes of images, images with masks, characters.

`python benchmarks/script_data.py DATA` writes:

* `DATA/classes/{train,val}/CLASS/N.jpg`, for `torchvision.datasets.ImageFolder`;
* `DATA/pairs/imgs/N.jpg` and `DATA/pairs/masks/N.png`, of two classes;
* `DATA/voc/VOCdevkit/VOC2012`, for `torchvision.datasets.VOCSegmentation`;
* `DATA/chars/{train,val}.bin` and `meta.pkl`, 16-bit characters with their table.

The same options write the same bytes. A class is a hue and the slope of its stripes; a mask is a disk.
"""

import pickle
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
VOCABULARY = " abcdefghijklmnopqrstuvwxyz.\n"
WORDS = ("the", "loss", "of", "a", "step", "is", "scaled", "weights", "move", "after", "it", "was", "checked")


@click.command
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--size", default=64, show_default=True, help="Pixels of a side.")
@click.option("--classes", default=8, show_default=True, help="Of the images in classes/.")
@click.option(
    "--each", default=16, show_default=True, help="Training images of a class; a quarter of it to validate."
)
def main(folder: Path, size: int, classes: int, each: int) -> None:
    """Write all data below FOLDER."""
    draws = np.random.default_rng(0)
    write_classes(folder / "classes", classes, each, size, draws)
    write_pairs(folder / "pairs", each * 2, size, draws)
    write_voc(folder / "voc" / "VOCdevkit" / "VOC2012", each, size, draws)
    write_chars(folder / "chars", draws)


def write_classes(folder: Path, classes: int, each: int, size: int, draws: np.random.Generator) -> None:
    """Write JPEG images into a folder per class, for training and validation."""
    for split, count in (("train", each), ("val", max(1, each // 4))):
        for label in range(classes):
            target = folder / split / f"class{label:03d}"
            target.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                Image.fromarray(stripes(label / classes, size, draws)).save(
                    target / f"{number}.jpg", quality=95
                )


def write_pairs(folder: Path, count: int, size: int, draws: np.random.Generator) -> None:
    """Write images and masks of one name into two folders."""
    for name in ("imgs", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels, mask = disk(size, draws)
        Image.fromarray(pixels).save(folder / "imgs" / f"{number}.jpg", quality=95)
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")


def write_voc(folder: Path, count: int, size: int, draws: np.random.Generator) -> None:
    """Write the folders of Pascal VOC 2012 segmentation; class 15 is a person."""
    lists = folder / "ImageSets" / "Segmentation"
    for target in (folder / "JPEGImages", folder / "SegmentationClass", lists):
        target.mkdir(parents=True, exist_ok=True)
    names = [f"made_{number:06d}" for number in range(count + max(2, count // 4))]
    for name in names:
        pixels, mask = disk(size, draws)
        Image.fromarray(pixels).save(folder / "JPEGImages" / f"{name}.jpg", quality=95)
        Image.fromarray(mask * np.uint8(15)).save(folder / "SegmentationClass" / f"{name}.png")
    (lists / "train.txt").write_text("\n".join(names[:count]) + "\n")
    (lists / "val.txt").write_text("\n".join(names[count:]) + "\n")


def write_chars(folder: Path, draws: np.random.Generator) -> None:
    """Write text of random words as 16-bit numbers, nine tenths of it to train on."""
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join(WORDS[index] for index in draws.integers(len(WORDS), size=8000))
    numbers = np.array([VOCABULARY.index(character) for character in text], dtype=np.uint16)
    cut = len(numbers) * 9 // 10
    numbers[:cut].tofile(folder / "train.bin")
    numbers[cut:].tofile(folder / "val.bin")
    table = {
        "vocab_size": len(VOCABULARY),
        "itos": dict(enumerate(VOCABULARY)),
        "stoi": {character: number for number, character in enumerate(VOCABULARY)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(table, protocol=4))


def stripes(share: float, size: int, draws: np.random.Generator) -> Pixels:
    """Return an image [size, size, 3] of the class at `share` of the circle of hues and slopes."""
    y, x = np.mgrid[0:size, 0:size] / size
    angle = np.pi * share
    wave = np.sin(2 * np.pi * (4 * (x * np.cos(angle) + y * np.sin(angle)) + draws.random()))
    hue = 0.5 + 0.5 * np.cos(2 * np.pi * (share + np.arange(3) / 3))
    return _noisy(0.5 + 0.25 * wave[..., None] + 0.4 * (hue - 0.5), draws)


def disk(size: int, draws: np.random.Generator) -> tuple[Pixels, Pixels]:
    """Return an image [size, size, 3] of a bright disk, and its mask [size, size] of zeros and ones."""
    y, x = np.mgrid[0:size, 0:size] / size
    center, radius = 0.3 + 0.4 * draws.random(2), 0.15 + 0.2 * draws.random()
    inside = (x - center[0]) ** 2 + (y - center[1]) ** 2 < radius**2
    color = np.where(inside[..., None], [0.8, 0.5, 0.3], [0.2, 0.3, 0.4])
    return _noisy(color, draws), inside.astype(np.uint8)


def _noisy(image: NDArray[np.float64], draws: np.random.Generator) -> Pixels:
    noisy = image + 0.1 * draws.standard_normal(image.shape)
    return np.asarray(np.clip(noisy * 255, 0, 255), dtype=np.uint8)


if __name__ == "__main__":
    main()
