"""Accelerate as it is installed: what it says it runs, and that it runs what our own arm runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompare.base.errors import BackendUnavailable
from ampcompare.training.precision.base import make_precision

pytest.importorskip("accelerate", reason="not installed: pip install accelerate")


@pytest.mark.parametrize(("arm", "ours"), [("accelerate:bf16", "native:bf16"), ("accelerate:no", "fp32")])
def test_it_trains_as_our_own_arm_does(arm: str, ours: str, trained: Callable[[str], list[Tensor]]) -> None:
    """Three clipped steps end in the same weights to the last bit."""
    assert all(torch.equal(here, there) for here, there in zip(trained(arm), trained(ours), strict=True))


def test_a_second_precision_in_one_process_is_refused() -> None:
    make_precision("accelerate:no")
    with pytest.raises(BackendUnavailable, match=r"accelerate .* refuses mixed_precision=bf16") as caught:
        make_precision("accelerate:bf16")
    assert "\n" not in str(caught.value)
