"""Every arm keeps the contract in a compiled model, and channels last stay."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD

from ampcompare.results.records.step import StepRecord
from ampcompare.tasks.classification import classification_loss
from ampcompare.training.assemble import compile_model, let_compile_record_torch_functions
from ampcompare.training.loop import Loop
from ampcompare.training.meters import HostClock
from ampcompare.training.parallel.replication import SingleProcess
from ampcompare.training.precision.base import make_precision

ARMS = [
    "fp32",
    "apex:O0,engine=compat",
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O2,loss_scale=128,engine=compat",
    "apex:O3,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16",
    "native:bf16",
    "half",
    "half:bn_fp32",
    "half:bf16",
    "half:dynamic",
    "half:masters=fp32,dynamic",
]
DYNAMIC = [
    "apex:O1,engine=compat",
    "apex:O2,engine=compat",
    "apex:O3,loss_scale=dynamic,engine=compat",
    "native:fp16",
    "half:dynamic",
    "half:masters=fp32,dynamic",
]
COMPILED = [pytest.param(arm, marks=pytest.mark.slow) for arm in ARMS]
pytestmark = pytest.mark.integration  # every method is trained with every arm

CPU = torch.device("cpu")
LR = 0.5


class Net(nn.Module):
    """A convolution with batch norm before a linear layer, small enough for fp16 on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.convolution(images)))
        return self.head(hidden.mean((2, 3)))  # type: ignore[no-any-return]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 1, *, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 3, 5, 5, generator=draws), torch.arange(size) % 3) for _ in range(count)]


def loss_of(models: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return classification_loss(models[0](batch[0]), batch[1], label_smoothing=0.1)


class Run:
    """An arm under one method, trained by the loop."""

    def __init__(self, arm: str, method: str = "plain", **options: Any) -> None:
        model: nn.Module = net()
        if method == "channels_last":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = SGD(model.parameters(), lr=LR)
        let_compile_record_torch_functions("eager" if method == "compiled" else "none")
        self.precision = make_precision(arm)
        (self.model,), (self.optimizer,) = self.precision.prepare([model], [optimizer])
        self.loop = Loop(
            [compile_model(self.model, "aot_eager" if method == "compiled" else "none")],
            [self.optimizer],
            self.precision,
            SingleProcess(),
            loss_of,
            HostClock(),
            channels_last=method == "channels_last",
            **options,
        )

    def train(self, data: list[tuple[Tensor, Tensor]]) -> list[StepRecord]:
        return list(itertools.chain.from_iterable(self.loop.run(data, epoch=0)))

    def weights(self) -> list[Tensor]:
        return [param.detach().float().clone() for param in self.model.parameters()]


def clipped(arm: str) -> None:
    """The norm is that of unscaled gradients, and the weights move by the clipped one."""
    free = Run("fp32", clip_norm=1e9).train(batches())[0]
    assert free.grad_norm is not None
    run = Run(arm, "compiled", clip_norm=free.grad_norm / 4)
    before = run.weights()
    (record,) = run.train(batches())
    assert record.grad_norm == pytest.approx(free.grad_norm, rel=0.03)
    moved = torch.stack([(a - b).norm() for a, b in zip(run.weights(), before, strict=True)]).norm().item()
    assert moved == pytest.approx(LR * free.grad_norm / 4, rel=0.1)


def trains(arm: str) -> None:
    """Ten steps on one batch lower the loss, and leave finite weights and statistics; nothing has stayed eager."""
    torch._dynamo.reset()  # forget graphs of other tests, which would serve this one
    run = Run(arm, "compiled")
    counters.clear()
    records = run.train(batches() * 10)
    assert records[-1].loss < 0.95 * records[0].loss
    assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values())
    stats = counters["stats"]
    assert stats["unique_graphs"] == 1
    assert stats["calls_captured"] >= 5
    assert not counters["graph_break"]


def overflow(arm: str) -> None:
    """An overflow skips its step alone, halves the scale, and the next is applied."""
    run = Run(arm, "compiled")
    run.train(batches())
    (scale,), before = run.precision.loss_scales(), run.weights()
    images, labels = batches()[0]
    (skipped,) = run.train([(images * float("inf"), labels)])
    run.model.norm.reset_running_stats()  # type: ignore[operator, union-attr]
    assert (skipped.applied, skipped.loss_scales) == ((False,), (scale / 2,))
    assert all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))
    (applied,) = run.train(batches())
    assert (applied.applied, applied.loss_scales) == ((True,), (scale / 2,))
    assert not all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))


@pytest.fixture
def functions_of_torch() -> None:
    """Let torch.compile look torch's functions up again: after a process group it does so at its next use, which may
    have been in a test of O1."""
    torch._dynamo.trace_rules.clear_lru_cache()


@pytest.mark.usefixtures("functions_of_torch")
@pytest.mark.parametrize("arm", COMPILED)
def test_a_compiled_model_keeps_the_contract(arm: str) -> None:
    """torch.compile traces the casts of every arm, those of O1's patched functions too."""
    clipped(arm)
    trains(arm)
    if arm in DYNAMIC:
        overflow(arm)


@pytest.mark.parametrize("arm", ARMS)
def test_channels_last_stays(arm: str) -> None:
    """Weights and images of every arm lie with channels last, after `prepare` and after a step."""
    run = Run(arm, "channels_last")
    layouts: list[bool] = []

    def look(module: nn.Module, args: Any) -> None:
        layouts.append(args[0].is_contiguous(memory_format=torch.channels_last))
        layouts.append(module.weight.is_contiguous(memory_format=torch.channels_last))  # type: ignore[union-attr, operator]

    run.model.convolution.register_forward_pre_hook(look)  # type: ignore[operator, union-attr]
    run.train(batches(2))
    assert layouts == [True] * 4


class Scalars(nn.Module):
    """Functions that O1 patches, with numbers given by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden = (
            nn.functional.softmax(hidden, -1)
            + nn.functional.softmax(hidden, dim=0)
            + torch.sum(hidden, 1, True)
        )
        return torch.matmul(torch.pow(hidden, 2), torch.cat([hidden, hidden], 1)[:, :4])


@pytest.mark.usefixtures("functions_of_torch")
@pytest.mark.slow
def test_numbers_among_the_arguments_do_not_stop_the_compiler() -> None:
    """A model whose patched functions get numbers compiles under O1, and gives what it gives without."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    let_compile_record_torch_functions("eager")
    model = Scalars()
    precision = make_precision("apex:O1")
    (model,), _ = precision.prepare([model], [SGD(model.parameters(), lr=LR)])  # type: ignore[assignment]
    x = torch.randn(4, 4)
    expected = model(x)
    precision.weights_replaced()
    assert torch.equal(compile_model(model, "eager")(x), expected)
    assert expected.dtype is torch.float16


@pytest.mark.usefixtures("functions_of_torch")
@pytest.mark.slow
def test_a_weight_that_is_cast_twice_does_not_stop_the_compiler() -> None:
    """In one graph where two layers share it, and in a second graph while the first one's loss awaits its backward."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    let_compile_record_torch_functions("eager")
    linear = nn.Linear(4, 4)
    precision = make_precision("apex:O1")
    (model,), _ = precision.prepare(
        [nn.Sequential(linear, nn.ReLU(), linear)], [SGD(linear.parameters(), lr=LR)]
    )
    first, second = torch.randn(4, 4), torch.randn(3, 4)
    expected = [model(first), model(second)]
    precision.weights_replaced()
    graph = torch.compile(model, backend="eager", fullgraph=True)
    assert [torch.equal(graph(x), y) for x, y in zip((first, second), expected, strict=True)] == [True, True]
