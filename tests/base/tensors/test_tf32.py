"""TF32 as a switch of the process, whatever a script has set before."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ampcompare.base.tensors.tf32 import Tf32Switches, set_tf32
from ampcompare.training.precision.base import make_precision

BACKENDS: Any = torch.backends
NEW = pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9")


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """Put torch's own switches back."""
    before = Tf32Switches.read()
    yield
    BACKENDS.fp32_precision = "none"
    before.set_switches()


SETTINGS: dict[str, Callable[[], None]] = {
    "the default": lambda: None,
    "the old switch": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "the new switch of all": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "the new switch of products": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "the new switch of convolutions": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
    "both kinds": lambda: (
        torch.set_float32_matmul_precision("high"),
        setattr(BACKENDS, "fp32_precision", "ieee"),
    )[1],
}


@NEW
@pytest.mark.parametrize("name", SETTINGS)
def test_switches_of_either_kind_are_read_set_and_put_back(name: str) -> None:
    """Whatever a script has set, an arm of fp32 is made, sets what it declares, and puts back what it found."""
    SETTINGS[name]()
    before = Tf32Switches.read()

    make_precision("fp32", device="cpu")
    with Tf32Switches("tf32", "ieee", "ieee").switches_set_in_block():
        assert Tf32Switches.read() == Tf32Switches("tf32", "ieee", "ieee")

    assert Tf32Switches.read() == before


@NEW
def test_both_kinds_can_be_read_after_a_change() -> None:
    """A script that uses the old switches alone, or the new ones alone, sees what was set."""
    for on in (True, False):
        set_tf32(on)
        assert (BACKENDS.cuda.matmul.allow_tf32, BACKENDS.cudnn.allow_tf32) == (on, on)
        assert (
            BACKENDS.cuda.matmul.fp32_precision
            == BACKENDS.cudnn.conv.fp32_precision
            == ("tf32" if on else "ieee")
        )
