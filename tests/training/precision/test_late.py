"""Outcomes that stay on the device: read together, and settled in order."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex.amp._engine import device_skip
from ampcompare.training.precision.base import LateOutcomes, make_precision

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a value of the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the lists that were read from the device."""
    lengths: list[int] = []
    tolist = Tensor.tolist

    def counted(self: Tensor) -> Any:
        lengths.append(self.numel())
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    return lengths


def test_a_block_is_one_transfer(transfers: list[int]) -> None:
    """The first look at any of twenty outcomes reads the scalars of all, and settles them in the order of the steps."""
    outcomes, order = LateOutcomes(), []

    def step(place: int) -> Any:
        def settle(values: list[float]) -> Any:
            order.append(place)
            return (values[0] == 0,), (values[1],)

        return outcomes.add([torch.tensor(float(place == 3)), torch.tensor(2.0**place)], settle)

    steps = [step(place) for place in range(20)]
    assert steps[7].loss_scales == (128.0,)
    assert [outcome.applied for outcome in steps].count((False,)) == 1
    assert (steps[3].applied, steps[19].loss_scales) == ((False,), (2.0**19,))
    assert (transfers, order) == ([40], list(range(20)))


def train(arm: str, steps: int, *, parts: int = 1, fused: bool | None = None) -> Any:
    """Return the outcomes of some steps and how often the host waited in them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    precision = make_precision(arm)
    shares = [list(model.parameters())[place::parts] for place in range(parts)]
    optimizers = [SGD(share, lr=0.1, momentum=0.9, fused=fused) for share in shares]
    (model,), prepared = precision.prepare([model], optimizers)
    outcomes = []
    with Reads() as mode:
        for step in range(steps):
            with precision.autocast():
                loss = model(X).float().square().mean() * (float("inf") if step == 1 else 1.0)
            precision.backward(loss, prepared)
            outcomes.append(precision.step(*prepared))
            for optimizer in prepared:
                optimizer.zero_grad()
            if step == 1:
                model[1].reset_running_stats()  # type: ignore[index,operator]
    return outcomes, mode.count


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_without_a_wait_are_read_together(
    transfers: list[int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags and scales that the engine leaves on the device come over in one transfer for a whole block."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))  # as on a GPU
    outcomes, waits = train(f"apex:{level},engine=compat", 6, fused=True)
    assert waits == 0
    transfers.clear()
    assert [outcome.loss_scales[0] for outcome in outcomes] == [2.0**16] + [2.0**15] * 5
    assert [all(outcome.applied) for outcome in outcomes] == [True, False, True, True, True, True]
    assert len(transfers) == 1


@pytest.mark.parametrize("arm", ["half:dynamic", "half:bn_fp32,dynamic", "half:bf16,bn_fp32,dynamic"])
def test_a_dynamic_scale_without_amp_reads_once_a_step(transfers: list[int], arm: str) -> None:
    """One transfer tells of all dtypes and all optimizers of an update."""
    outcomes, waits = train(arm, 4, parts=2)
    assert (waits, len(transfers)) == (0, 4)
    assert [outcome.applied[0] for outcome in outcomes] == [True, False, True, True]
