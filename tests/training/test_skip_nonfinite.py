"""Updates with a non-finite loss are dropped by every arm, as if the batch had not been there."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from ampcompare.results.records.run import StepRecord
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.parallel.replication import Single
from ampcompare.training.policies import SkippingPrecision
from ampcompare.training.precision.base import make_precision

ARMS = [
    "fp32",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O2,loss_scale=128,engine=compat",
    "apex:O3,engine=compat",
    "native:fp16",
    "half:bn_fp32",
    "half:loss_scale=128",
    "half:master_weights,dynamic",
]
GOOD = torch.linspace(-1, 1, 24).reshape(6, 4)
BAD = torch.cat([GOOD[:5], torch.full((1, 4), float("inf"))])


def loss_of(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return models[0](batch[0]).float().square().mean()  # type: ignore[no-any-return]


def train(arm: str, batches: list[Tensor], **options: Any) -> tuple[list[StepRecord], list[Tensor], Any]:
    """Train with dropping; return records, all tensors of the model in fp32, and the backend inside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    precision = make_precision(arm)
    (model,), optimizers = precision.prepare([model], [Adam(model.parameters(), lr=0.01, eps=1e-3)])  # type: ignore[assignment]
    skipping = SkippingPrecision(precision, [model])
    loop = Loop([model], optimizers, skipping, Single(), loss_of, HostClock(), **options)
    records = list(itertools.chain.from_iterable(loop.run([(batch,) for batch in batches], epoch=0)))
    return records, [tensor.detach().float() for tensor in (*model.parameters(), *model.buffers())], precision


@pytest.mark.parametrize(
    ("arm", "options"),
    [
        *((arm, {}) for arm in ARMS),
        *((arm, options) for arm in ARMS[:3] for options in ({"accumulation": 2}, {"clip_norm": 0.5})),
    ],
)
def test_a_bad_batch_leaves_no_trace(arm: str, options: dict[str, Any]) -> None:
    """Weights, optimizer state and running statistics go on as they do without the batch; the record says skipped."""
    records, tensors, precision = train(arm, [GOOD, BAD, GOOD.flip(0), GOOD], **options)
    plain, expected, _ = train(arm, [GOOD, GOOD.flip(0), GOOD], **options)
    assert [record.applied for record in records] == [(True,), (False,), (True,), (True,)]
    assert all(tensor.isfinite().all() for tensor in tensors)
    for tensor, other in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-3)
    if precision.loss_scales() == plain[-1].loss_scales:  # nothing moved by the overflow: then to the last bit
        assert all(torch.equal(tensor, other) for tensor, other in zip(tensors, expected, strict=True))


def test_another_ranks_bad_loss_drops_the_update_here() -> None:
    """An update is dropped where any process of the run saw a non-finite loss."""
    model = nn.Linear(4, 2)
    precision = make_precision("fp32")
    (model,), (optimizer,) = precision.prepare([model], [Adam(model.parameters())])  # type: ignore[assignment]
    asked: list[bool] = []

    def any_rank(flag: bool) -> bool:
        asked.append(flag)
        return True

    skipping = SkippingPrecision(precision, [model], any_rank)
    before = model.weight.detach().clone()
    with skipping.scale_loss(model(GOOD).square().mean(), [optimizer]) as loss:
        loss.backward()
    assert skipping.step(optimizer).applied == (False,)
    assert asked == [False]
    assert torch.equal(model.weight, before)
