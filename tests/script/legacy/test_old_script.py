"""Errors of old scripts are recognized."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ampcompare.script.legacy.old_script import is_of_old_script


def _full_of_integers() -> object:
    return torch.nn.functional.binary_cross_entropy(torch.full((2,), 0.5), torch.full((2,), 1))


@pytest.mark.parametrize(
    "old",
    [
        _full_of_integers,
        lambda: np.float,  # type: ignore[attr-defined]
        lambda: np.Inf,  # type: ignore[attr-defined]
        lambda: iter(torch.utils.data.DataLoader([1])).next(),  # type: ignore[attr-defined]
        lambda: 1 - torch.ones(1, dtype=torch.bool),
        lambda: torch.ones(2, 3).t().view(-1),
        lambda: __import__("torch._six"),
        lambda: exec("from collections import Mapping"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_the_libraries_say_now(old: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        old()
    assert is_of_old_script(f"{type(caught.value).__name__}: {caught.value}"), caught.value


def test_other_errors_are_left_alone() -> None:
    assert not is_of_old_script("RuntimeError: size mismatch")
    assert not is_of_old_script(None)


def test_the_option_is_named(write, legacy) -> None:  # type: ignore[no-untyped-def]
    """In the last line, unless it was given."""
    write("train.py", "import torch, time; time.clock()")
    assert legacy("train.py").stderr.splitlines()[-1].endswith("try --compat-torch")
