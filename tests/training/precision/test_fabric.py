"""Lightning Fabric as it is installed: what it says it runs, and that it runs what our own arm runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ampcompare.backends.fabric import LIBRARY

pytestmark = pytest.mark.skipif(bool(LIBRARY.why_missing()), reason=LIBRARY.why_missing())


@pytest.mark.parametrize(
    ("arm", "ours"),
    [
        ("fabric:32-true", "fp32"),
        ("fabric:bf16-mixed", "native:bf16"),
        ("fabric:16-true", "half"),
        ("fabric:bf16-true", "half:bf16"),
    ],
)
def test_it_trains_as_our_own_arm_does(arm: str, ours: str, trained: Callable[[str], list[Tensor]]) -> None:
    """Three clipped steps end in the same weights to the last bit."""
    assert all(torch.equal(here, there) for here, there in zip(trained(arm), trained(ours), strict=True))
