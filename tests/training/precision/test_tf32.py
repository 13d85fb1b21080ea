"""TF32 as an arm."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ampcompare.base.errors import BackendUnavailable
from ampcompare.base.tensors.tf32 import Tf32Switches, set_tf32
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.fp32 import require_tf32


@pytest.fixture
def switches() -> Iterator[None]:
    """Put torch's own switches back."""
    before = Tf32Switches.read()
    yield
    torch.backends.fp32_precision = "none"
    before.set_switches()


def test_a_cpu_has_no_tf32() -> None:
    """The arm is refused where it could not differ from fp32, with the device and what to do."""
    with pytest.raises(
        BackendUnavailable, match=r"fp32:tf32 asks for TF32.* 8\.0, but the device is cpu; leave it"
    ):
        make_precision("fp32:tf32", device="cpu")


def test_an_old_gpu_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute capability decides, and the message has the GPU's name and its own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(BackendUnavailable, match=r"Tesla V100 has 7\.0"):
        require_tf32(torch.device("cuda"), "--tf32 on")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    require_tf32(torch.device("cuda"), "--tf32 on")


@pytest.mark.usefixtures("switches")
def test_the_arm_switches_it_on_when_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the backend changes nothing; preparing switches products and convolutions, for this arm alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    set_tf32(False)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_precision("fp32", device="cuda").prepare([model], [optimizer])
    precision = make_precision("fp32:tf32", device="cuda")
    assert not torch.backends.cuda.matmul.allow_tf32
    precision.prepare([model], [optimizer])
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32
