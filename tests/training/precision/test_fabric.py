"""Lightning Fabric as it is installed: what it says it runs, and that it runs what our own arm runs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.backends.fabric import LIBRARY
from ampcompare.training.precision.base import make_precision

pytestmark = pytest.mark.skipif(bool(LIBRARY.missing()), reason=LIBRARY.missing())


@pytest.mark.parametrize(
    ("arm", "ours"),
    [
        ("fabric:32-true", "fp32"),
        ("fabric:bf16-mixed", "native:bf16"),
        ("fabric:16-true", "half"),
        ("fabric:bf16-true", "half:dtype=bf16"),
    ],
)
def test_it_trains_as_our_own_arm_does(arm: str, ours: str, trained: Callable[[str], list[Tensor]]) -> None:
    """Three clipped steps end in the same weights to the last bit."""
    assert all(torch.equal(here, there) for here, there in zip(trained(arm), trained(ours), strict=True))


def test_a_model_keeps_the_names_of_its_weights() -> None:
    """A checkpoint of a model that Fabric has set up fits the bare model."""
    bare = nn.Linear(4, 2)
    (model,), _ = make_precision("fabric:bf16-mixed").prepare([bare], [SGD(bare.parameters(), lr=0.1)])
    assert list(model.state_dict()) == ["weight", "bias"]
    nn.Linear(4, 2).load_state_dict(model.state_dict())
