"""Users' factories of data."""

from collections.abc import Callable

import pytest
import torch

from ampcompare.base.errors import ConfigError
from ampcompare.tasks import load_data

Write = Callable[[str, str], None]

START = """
import torch
from torch.utils.data import TensorDataset, random_split

def pair(count, classes=3, channels=1):
    return TensorDataset(torch.rand(count, channels, 4, 4), torch.arange(count) % classes)
"""


def refused(name: str, **options: int) -> pytest.ExceptionInfo[ConfigError]:
    with pytest.raises(ConfigError) as caught:
        load_data(name, seed=0, **options)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    return caught


@pytest.mark.parametrize("returned", ["pair(20), pair(8)", "pair(20), pair(8), 3", "[pair(20), pair(8)]"])
def test_a_pair_of_data_sets_is_enough(user_module: Write, returned: str) -> None:
    """Two map-style data sets make a data set; the classes are counted where their number is not given."""
    user_module("own_pair", START + f"def make():\n    return {returned}\n")
    data = load_data("own_pair:make", seed=0)
    assert (data.num_train, data.num_val, data.num_classes, data.sample_shape) == (20, 8, 3, (1, 4, 4))
    samples, labels = next(iter(data.train_batches(0, 5, device="cpu")))
    assert (samples.shape, labels.dtype) == ((5, 1, 4, 4), torch.int64)


def test_a_random_split_is_the_same_for_every_seed(user_module: Write) -> None:
    """Random numbers that the factory draws depend neither on the seed nor on what was drawn before."""
    user_module("own_split", START + "def make():\n    return (*random_split(pair(30), [20, 10]), 3)\n")
    seen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        seen.append(next(iter(load_data("own_split:make", seed=seed).val_batches(10, device="cpu")))[0])
    assert torch.equal(*seen)


def test_options_are_passed_to_whom_names_them(user_module: Write) -> None:
    user_module(
        "own_options",
        START + "def make(seed, image_size=None, *, train_size):\n"
        "    assert (seed, image_size, train_size) == (4, 6, 12)\n"
        "    return pair(40), pair(8)\n",
    )
    data = load_data("own_options:make", seed=4, image_size=6, train_size=12, val_size=5)
    assert (data.num_train, data.num_val) == (40, 5)


def test_gray_samples_are_repeated_for_a_color_model(user_module: Write) -> None:
    user_module(
        "own_colors",
        START
        + "def gray():\n    return pair(6), pair(6)\ndef two():\n    return pair(6, 3, 2), pair(6, 3, 2)\n",
    )
    data = load_data("own_colors:gray", seed=0, channels=3)
    assert data.sample_shape == (3, 4, 4)
    assert next(iter(data.val_batches(6, device="cpu")))[0].shape == (6, 3, 4, 4)
    assert "(2, 4, 4)" in str(refused("own_colors:two", channels=3).value)


def test_a_finished_data_set_is_taken_as_it_is(user_module: Write) -> None:
    """A factory may return a Data, and must take the sizes itself then."""
    user_module(
        "own_data",
        "from ampcompare.tasks import load_data\ndef make(seed):\n    return load_data('digits', seed=seed)\n",
    )
    assert load_data("own_data:make", seed=2).name == "digits"
    assert "no parameter train_size" in str(refused("own_data:make", train_size=5).value)


@pytest.mark.parametrize(
    "body, told",
    [
        ("return None", "NoneType"),
        ("return pair(4), pair(4), 'three'", "str of 5"),
        ("return pair(0), pair(4)", "TensorDataset of 0"),
        ("return [(1.0, 2)], pair(4)", "(float, int)"),
        ("return [(torch.tensor(1.0), 0)], pair(4)", "(Tensor of (), int)"),
        ("class Bad(list):\n        __getitem__ = None\n    return Bad([1]), pair(4)", "TypeError"),
    ],
)
def test_other_returns_are_told(user_module: Write, body: str, told: str) -> None:
    """Whatever else a factory returns is described in the error."""
    user_module("own_wrong", START + f"def make():\n    {body}\n")
    assert told in str(refused("own_wrong:make").value)


@pytest.mark.parametrize(
    "name, told",
    [
        ("no_such_module:make", "no module 'no_such_module'"),
        ("own_names:mak", "did you mean 'make'?"),
        ("own_names:NUMBER", "of type int, which cannot be called"),
        ("own_broken:make", "importing its module raised ZeroDivisionError"),
        ("own_needs:make", "No module named 'no_such_dependency'"),
    ],
)
def test_names_that_lead_nowhere_are_told(user_module: Write, name: str, told: str) -> None:
    """Wrong modules, wrong functions and modules that cannot be imported each have their own line."""
    user_module("own_names", "NUMBER = 3\ndef make():\n    return None\n")
    user_module("own_broken", "1 / 0\n")
    user_module("own_needs", "import no_such_dependency\n")
    assert told in str(refused(name).value)


def test_labels_beyond_the_classes_are_told(user_module: Write) -> None:
    """A label that no class has stops the reading with its value, before a device sees it."""
    user_module("own_labels", START + "def make():\n    return pair(9, 3), pair(9, 3), 2\n")
    data = load_data("own_labels:make", seed=0)
    with pytest.raises(ConfigError, match="own_labels:make: sample 2 of val has the label 2"):
        next(iter(data.val_batches(9, device="cpu")))
