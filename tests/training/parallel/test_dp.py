"""Arms under `DataParallel`, whose replicas are made here as it makes them, since it does nothing on a CPU."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.experiment.matrix import DEFAULT_ARMS
from ampcompare.training.precision.base import make_precision

SEED = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        self.seen.append(result.dtype)
        return result


def replicate(model: nn.Module, number: int) -> nn.Module:
    """Copy a model as `nn.parallel.replicate` does, with weights `number` times as large, to tell replicas apart."""
    modules = list(model.modules())
    copies = [module._replicate_for_data_parallel() for module in modules]
    places = dict(zip(modules, copies, strict=True))
    for module, copy in places.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(copy, name, places[child])
        for name, param in module._parameters.items():
            if param is not None:
                setattr(copy, name, param * number)
    return copies[0]


@pytest.mark.parametrize("arm", DEFAULT_ARMS)
def test_each_replica_runs_its_own_weights(arm: str) -> None:
    """Replicas of an arm, called in threads of their own, compute with their own weights in the arm's dtype."""
    torch.manual_seed(SEED)
    net = Net()
    precision = make_precision(f"{arm},engine=compat" if arm.startswith("apex") else arm, device="cpu")
    (model,), _ = precision.prepare([net], [SGD(net.parameters(), lr=0.1)])
    with torch.no_grad():
        net.layer.bias.zero_()
    inputs = torch.ones(3, 4)
    replicas = [replicate(model, number) for number in (1, 2, 3)]
    results: dict[int, Tensor] = {}

    def call(number: int, replica: nn.Module) -> None:
        with torch.enable_grad(), precision.autocast():
            results[number] = replica(inputs)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(replicas, start=1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in (2, 3):
        torch.testing.assert_close(results[number].float(), number * results[1].float(), rtol=2e-2, atol=1e-3)
    assert set(net.seen) == {precision.half_dtype or torch.float32}
    sum(result.float().sum() for result in results.values()).backward()  # type: ignore[union-attr]
    grad = net.layer.weight.grad
    assert grad is not None
    torch.testing.assert_close(grad.float(), torch.full((2, 4), 3.0 * (1 + 2 + 3)), rtol=1e-2, atol=0)
