"""Digits, a few of them with one very bright pixel, as from a broken sensor, which cause rare overflows in fp16.

Use it as `--data ampcompare.tasks.overflow_digits:overflow_digits`, with a network without batch norm and with clipped
gradients: in fp32 such an image then does no harm.
"""

from dataclasses import replace

import torch

from ampcompare.tasks.data import SampleOptions, seeded_generator
from ampcompare.tasks.image_data import load_digits_data
from ampcompare.tasks.in_memory import InMemoryImages

BRIGHTNESS = 3e4  # in standard deviations; fp16 ends at 65504, so the input itself is representable
SHARE = 0.002


def overflow_digits(
    *, seed: int, train_size: int | None = None, val_size: int | None = None
) -> InMemoryImages:
    """Return digits, one in 500 of those for training with one pixel at 30,000, the same ones for every `seed`."""
    data = load_digits_data(SampleOptions(seed, train_size=train_size, val_size=val_size, augment=False))
    images, labels = data.train
    draws = seeded_generator("bright pixels")
    chosen = torch.randperm(len(images), generator=draws)[: max(1, round(SHARE * len(images)))]
    pixels = torch.randint(images[0].numel(), (len(chosen),), generator=draws)
    images = images.clone()
    images.view(len(images), -1)[chosen, pixels] = BRIGHTNESS
    return replace(data, name="bright digits", train=(images, labels))
