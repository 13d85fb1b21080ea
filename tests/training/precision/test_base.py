"""What a backend inherits: fp32, with `prepare` checked once; and what passes calls on to another backend."""

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ampcompare.backends.catalog import BUILT_IN
from ampcompare.base.errors import PreparationError
from ampcompare.training.loop import update
from ampcompare.training.parallel.replication import Single
from ampcompare.training.precision.base import (
    FixedOutcome,
    Precision,
    PrecisionWrapper,
    StepOutcome,
    make_precision,
    owned_params,
    refuse_wrapped,
)

X = torch.arange(32.0).view(8, 4).sin()
GRAPHS = {"why_no_cuda_graph", "capturing", "replayed_outcome"}


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def loss_of(models: Sequence[nn.Module], batch: tuple[Tensor, ...]) -> Tensor:
    return models[0](batch[0]).float().square().mean()  # type: ignore[no-any-return]


def trained(precision: Precision) -> tuple[Tensor, StepOutcome]:
    """Weights and outcome after one update of two micro-batches with clipping, as the loop makes it."""
    model = layer()
    models, optimizers = precision.prepare([model], [SGD(model.parameters(), lr=0.5)])
    halves = [(part,) for part in X.split(4)]
    _, _, outcome = update(models, optimizers, precision, Single(), loss_of, halves, clip_norm=0.1)
    return model.weight.detach().clone(), outcome


class PrepareOnly(Precision):
    """A backend that only prepares, as the documentation shows it."""

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        for model in models:
            model.register_buffer("prepared", torch.ones(()))
        return list(models), list(optimizers)


class WholeContract(Precision):
    """A backend that overrides every method, `prepare` with its own check among them, and swallows options."""

    key = "precision"
    half_dtype = None
    calls = 0

    def prepare(self, models: Any, optimizers: Any) -> Any:  # type: ignore[misc]
        refuse_wrapped(models)
        self.calls += 1
        return list(models), list(optimizers)

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)

    def scale_loss(self, loss: Tensor, optimizers: Any, *, loss_id: int = 0, delay_unscale: bool = False) -> Any:
        raise AssertionError("its backward needs none")

    def backward(self, loss: Tensor, optimizers: Any, **options: Any) -> None:
        assert set(options) <= {"loss_id", "delay_unscale"}
        loss.backward()

    def unscale(self, optimizer: Optimizer) -> list[Tensor]:
        return owned_params(optimizer)

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        for optimizer in optimizers:
            optimizer.step()
        return FixedOutcome((True,) * len(optimizers), ())

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


def test_the_defaults_are_fp32() -> None:
    """A backend that overrides nothing trains to the bits of plain torch."""
    model = layer()
    for part in X.split(4):
        (loss_of([model], (part,)) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    SGD(model.parameters(), lr=0.5).step()
    weight, outcome = trained(Precision())
    assert weight.tolist() == model.weight.tolist()
    assert (outcome.applied, outcome.loss_scales) == ((True,), ())
    assert Precision().state_dict() == {}


def test_prepare_refuses_wrapped_models_for_every_backend() -> None:
    model = layer()
    wrapped = nn.DataParallel(model)
    with pytest.raises(PreparationError, match="already wrapped in DataParallel"):
        PrepareOnly().prepare([wrapped], [])
    assert not hasattr(model, "prepared")
    PrepareOnly().prepare([model], [])
    assert hasattr(model, "prepared")


def test_a_backend_that_overrides_prepare_itself_keeps_working() -> None:
    """A third-party class with its own `prepare` and `backward(**options)` trains, and inside a wrapper too."""
    plain = trained(Precision())[0].tolist()
    backend = WholeContract()
    assert trained(backend)[0].tolist() == plain
    assert backend.calls == 1
    assert trained(PrecisionWrapper(backend))[0].tolist() == plain
    assert backend.calls == 2


def test_a_wrapper_passes_everything_on() -> None:
    """No public method of the contract is left at its fp32 default, except those of CUDA graphs, which are refused."""
    public = {name for name, value in vars(Precision).items() if inspect.isfunction(value) and name[0] != "_"}
    left_out = {name for name in public if name not in vars(PrecisionWrapper)} - {"prepare"}
    assert left_out == GRAPHS
    assert PrecisionWrapper(make_precision("fp32")).why_no_cuda_graph([]) is not None
    assert "_prepare" in vars(PrecisionWrapper)


@pytest.mark.parametrize("name", BUILT_IN)
def test_arguments_of_backward_are_explicit(name: str) -> None:
    """Every backend names `loss_id` and `delay_unscale`, so that a mistyped keyword is an error."""
    spec = BUILT_IN[name]
    arm = spec.contract[0].text if spec.contract else name
    if spec.library is not None and spec.library.missing():
        pytest.skip(spec.library.missing())
    parameters = inspect.signature(make_precision(arm).backward).parameters
    assert list(parameters) == ["loss", "optimizers", "loss_id", "delay_unscale"]
    assert all(parameters[key].kind is inspect.Parameter.KEYWORD_ONLY for key in ("loss_id", "delay_unscale"))
