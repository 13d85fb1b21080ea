"""Digits with a few very bright pixels."""

import torch

from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.load import digits
from ampcompare.tasks.overflow_digits import BRIGHTNESS, overflow_digits


def test_a_few_training_images_have_one_bright_pixel() -> None:
    """One image in 500 differs from the digits, in one pixel that fp16 can hold, whatever the seed."""
    plain, bright, other = digits(SampleOptions(0, augment=False)), overflow_digits(seed=0), overflow_digits(seed=1)
    changed = (plain.train[0] != bright.train[0]).flatten(1).sum(1)
    assert int((changed > 0).sum()) == round(len(changed) / 500) == 3
    assert int(changed.max()) == 1
    assert bright.train[0].max() == BRIGHTNESS < torch.finfo(torch.float16).max
    assert torch.equal(bright.train[0], other.train[0])
    assert torch.equal(plain.train[1], bright.train[1])
    assert torch.equal(plain.val[0], bright.val[0])
