"""Trainings of which each step is written in several ways: as plain scripts, by hand for a library, as our loop."""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.base.tensors.cuda_casts import TwoNestedContexts, cuda_casts
from ampcompare.training.precision.base import make_precision
from tests.script.small_script import batch, gan_loss, network, two_networks

Trained = list[tuple[list[Tensor], Any]]


@dataclass(frozen=True)
class Program:
    """A training that two sides run.

    Attributes:
        optimizer: "plain" SGD, "sgd" with momentum, "adam", AdamW with two "groups", or Apex's "fused" Adam.
        losses: into one optimizer, each with a backward pass of its own.
        micro: batches that are accumulated.
        delay: `delay_unscale` on all but the last block of a step, for Apex.
        clip: nothing, the norm of "master" parameters or of those of the "model", each "value", or by "hand".
        overflow_at: step whose first loss is infinite.
        resume_at: step before which all is saved and loaded into new objects.
        evaluate: run the model without gradients between the steps.
        clear: "optimizer" or "model", whose `zero_grad` is called.
        early: gradients are cleared before the passes of a step, not behind it.
        closure: a plain script's optimizer calls forward and backward passes.
    """

    optimizer: str = "sgd"
    losses: int = 1
    micro: int = 1
    delay: bool = False
    clip: str = ""
    overflow_at: int = -1
    resume_at: int = -1
    evaluate: bool = False
    schedule: bool = False
    clear: str = "optimizer"
    early: bool = False
    closure: bool = False
    steps: int = 5


class Plain:
    """How a script does what may differ: here it knows no mixed precision."""

    loads_first = False  # a checkpoint, before `prepare`

    def prepare(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[Any], list[Any]]:
        return models, optimizers

    def forward(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, optimizer: Any, *, last: bool, number: int = 0) -> None:
        loss.backward()

    def params(self, how: str, model: nn.Module, optimizer: Any) -> list[Any]:
        """Return what is clipped, with gradients that are unscaled."""
        return list(model.parameters())

    def step(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.step()

    def clear(self, owner: Any, optimizer: Any, *models: nn.Module) -> None:
        """Clear gradients as a script does: by the optimizer or a model, whichever is the owner."""
        owner.zero_grad()

    def state(self) -> Any:
        return {}

    def load(self, state: Any) -> None:
        assert not state

    def scale(self) -> float:
        return 1.0

    def end(self) -> None:
        """Take away what acts on later scripts."""


class TorchAmp(Plain):
    """A script with `torch.autocast` around the model and its loss, or the model alone, and a GradScaler for fp16."""

    def __init__(self, dtype: torch.dtype | None, *, whole: bool = True, **options: Any) -> None:
        self.dtype, self.whole = dtype, whole
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, **options)

    def cast(self) -> AbstractContextManager[Any]:
        return (
            nullcontext()
            if self.dtype is None
            else TwoNestedContexts(cuda_casts(), torch.autocast("cpu", dtype=self.dtype))
        )

    def forward(self) -> AbstractContextManager[Any]:
        return self.cast() if self.whole else nullcontext()

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        # what autocast for CUDA rounds in a loss of 16-bit outputs, it does not in one of fp32 outputs
        if self.whole:
            return model(x).float()  # type: ignore[no-any-return]
        with self.cast():
            out: Tensor = model(x)
        return out.float()

    def backward(self, loss: Tensor, optimizer: Any, *, last: bool, number: int = 0) -> None:
        self.scaler.scale(loss).backward()

    def params(self, how: str, model: nn.Module, optimizer: Any) -> list[Any]:
        self.scaler.unscale_(optimizer)
        return list(model.parameters())

    def step(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()  # one scale, which may only move when all are stepped

    def state(self) -> Any:
        return self.scaler.state_dict()

    def load(self, state: Any) -> None:
        self.scaler.load_state_dict(state)

    def scale(self) -> float:
        return self.scaler.get_scale()


class Apex(Plain):
    """A script for Apex: on ampcompare's engine, or on what stands behind its names under an arm."""

    def __init__(self, amp: Any, level: str = "O1", end: Callable[[], None] | None = None) -> None:
        self.amp, self.level, self.end = amp, level, end or amp._amp_state.close  # type: ignore[method-assign]

    def prepare(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[Any], list[Any]]:
        options: dict[str, Any] = {"opt_level": self.level, "verbosity": 0}
        if len(models) == 1:
            model, optimizer = self.amp.initialize(models[0], optimizers[0], **options)
            return [model], [optimizer]
        prepared: tuple[list[Any], list[Any]] = self.amp.initialize(
            models, optimizers, num_losses=3, **options
        )
        return prepared

    def backward(self, loss: Tensor, optimizer: Any, *, last: bool, number: int = 0) -> None:
        with self.amp.scale_loss(loss, optimizer, loss_id=number, delay_unscale=not last) as scaled:
            scaled.backward()

    def params(self, how: str, model: nn.Module, optimizer: Any) -> list[Any]:
        return list(self.amp.master_params(optimizer) if how == "master" else model.parameters())

    def state(self) -> Any:
        return dict(self.amp.state_dict())

    def load(self, state: Any) -> None:
        self.amp.load_state_dict(state)


class OurLoop(Plain):
    """The calls that ampcompare's loop makes."""

    loads_first = True

    def __init__(self, arm: str) -> None:
        self.precision = make_precision(arm)

    def prepare(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[Any], list[Any]]:
        return self.precision.prepare(models, optimizers)

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        with self.precision.autocast():
            out: Tensor = model(x)
        return out.float()

    def backward(self, loss: Tensor, optimizer: Any, *, last: bool, number: int = 0) -> None:
        self.precision.backward(loss, [optimizer], delay_unscale=not last)

    def params(self, how: str, model: nn.Module, optimizer: Any) -> list[Any]:
        return self.precision.unscale(optimizer)

    def step(self, *optimizers: Any) -> None:
        for optimizer in optimizers:
            self.precision.step(optimizer)

    def clear(self, owner: Any, optimizer: Any, *models: nn.Module) -> None:
        optimizer.zero_grad(set_to_none=True)
        for param in itertools.chain(*(model.parameters() for model in models)):
            param.grad = None

    def state(self) -> Any:
        return self.precision.state_dict()

    def load(self, state: Any) -> None:
        self.precision.load_state_dict(state)

    def scale(self) -> float:
        return next(iter(self.precision.loss_scales()), 1.0)


def optimizer_for(kind: str, model: nn.Module) -> Any:
    if kind == "groups":
        first, *rest = model.children()
        groups = [{"params": first.parameters(), "lr": 0.02}, {"params": nn.Sequential(*rest).parameters()}]
        return torch.optim.AdamW(groups, lr=0.01)
    if kind in ("plain", "sgd"):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "sgd" else 0)
    return (torch.optim.Adam if kind == "adam" else FusedAdam)(model.parameters(), lr=0.01)


def clip(how: str, params: list[Any], *, strict: bool) -> None:
    """Clip gradients; those that are not finite are an error where it is strict, as in Fabric."""
    if how == "value":
        clip_grad_value_(params, 0.01)
    elif how == "hand":
        for param in params:
            if param.grad is not None:
                param.grad = param.grad * 0.5
    else:
        nn.utils.clip_grad_norm_(params, 0.1, error_if_nonfinite=strict)  # as it is while the training runs


def begin(program: Program, side: Plain, model: nn.Module, saved: Sequence[Any] = ()) -> tuple[Any, Any, Any]:
    """Return a model, an optimizer and a scheduler, or None, that a side has prepared, with what was saved."""
    optimizer = optimizer_for(program.optimizer, model)

    def load() -> Any:
        if saved:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if program.schedule else None

    scheduler = load() if side.loads_first else None
    (model,), (optimizer,) = side.prepare([model], [optimizer])
    if not side.loads_first:
        scheduler = load()
    if saved:
        side.load(saved[2])
    return model, optimizer, scheduler


def clear(program: Program, side: Plain, model: nn.Module, optimizer: Any) -> None:
    side.clear(optimizer if program.clear == "optimizer" else model, optimizer, model)


def passes(program: Program, side: Plain, model: nn.Module, optimizer: Any, step: int) -> Tensor:
    """Make the passes of a step, clip their gradients, and return the sum of the losses."""
    total = torch.zeros(())
    if program.early:
        clear(program, side, model, optimizer)
    blocks = list(itertools.product(range(program.micro), range(program.losses)))
    for number, (micro, index) in enumerate(blocks):
        x, y = batch(step, micro)
        with side.forward():
            loss = nn.functional.cross_entropy(side.call(model, x).roll(index, 1), y) / program.micro
        if (step, number) == (program.overflow_at, 0):
            loss = loss * float("inf")
        last = number == len(blocks) - 1 or not (program.delay or isinstance(side, OurLoop))
        side.backward(loss, optimizer, last=last)
        total += loss.detach()
    if program.clip:
        strict = type(side) is Plain and program.overflow_at >= 0
        clip(program.clip, side.params(program.clip, model, optimizer), strict=strict)
    return total


def train(
    program: Program, make: Callable[[], Plain], seen: Callable[[Any], Any] = methodcaller("state")
) -> Trained:
    """Return the weights and buffers after each step, and what is seen of the side then."""
    side = make()
    model, optimizer, scheduler = begin(program, side, network())
    after = []
    for step in range(program.steps):
        if step == program.resume_at:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), side.state()])
            side.end()  # a new process begins
            side = make()
            model, optimizer, scheduler = begin(program, side, network(1), saved)
        if program.closure and type(side) is Plain:
            optimizer.step(partial(passes, program, side, model, optimizer, step))
        else:
            passes(program, side, model, optimizer, step)
            side.step(optimizer)
        if not program.early:
            clear(program, side, model, optimizer)
        if scheduler is not None:
            scheduler.step()
        if program.evaluate:
            model.eval()
            with side.forward(), torch.no_grad():
                side.call(model, batch(step, 99)[0])
            model.train()
        after.append(([value.detach().clone() for value in model.state_dict().values()], seen(side)))
    side.end()
    return after


@dataclass(frozen=True)
class Gan:
    """A training of two networks with two optimizers that two sides run.

    Attributes:
        together: for each step whether both optimizers step after all losses; else they take turns.
        losses: of the judge, each with a backward pass.
        micro: backward passes of the maker.
        clip: gradients of both.
        overflows: steps and networks whose first loss is infinite.
    """

    together: tuple[bool, ...] = (False,) * 4
    losses: int = 1
    micro: int = 1
    clip: bool = False
    overflows: tuple[tuple[int, str], ...] = ()


def train_gan(program: Gan, side: Plain, seen: Callable[[Any], Any] = methodcaller("state")) -> Trained:
    """Return the weights of both networks after each step, and what is seen of the side then."""
    (maker, judge), (for_maker, for_judge) = side.prepare(*two_networks())
    after = []

    def backward(who: str, count: int, step: int) -> None:
        optimizer = for_maker if who == "maker" else for_judge
        side.clear(optimizer, optimizer, maker, judge)
        for number in range(count):
            overflow = (step, who) if (step, who) in program.overflows else (-1, "")
            with side.forward():
                loss = gan_loss(
                    step, who, number, partial(side.call, maker), partial(side.call, judge), overflow
                )  # type: ignore[arg-type]
            side.backward(
                loss, optimizer, last=number == count - 1 or not isinstance(side, OurLoop), number=number
            )

    def update(*pairs: tuple[Any, Any]) -> None:
        for model, optimizer in pairs if program.clip else ():
            clip("norm", side.params("master", model, optimizer), strict=False)
        side.step(*(optimizer for _, optimizer in pairs))

    for step, together in enumerate(program.together):
        backward("judge", program.losses, step)
        if not together:
            update((judge, for_judge))
        backward("maker", program.micro, step)
        update(*([(judge, for_judge)] if together else []), (maker, for_maker))
        after.append(
            ([value.clone() for net in (maker, judge) for value in net.state_dict().values()], seen(side))
        )
    side.end()
    return after


def has_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same type and bits: a NaN equals a NaN."""
    return one.dtype is other.dtype and torch.equal(
        *(each.reshape(-1).view(torch.uint8) for each in (one, other))
    )


def assert_equal(one: Trained, other: Trained, what: object = "") -> None:
    """Check that all tensors have the same bits, and that what was seen is equal."""
    for step, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        assert all(map(has_bits, ours[0], theirs[0])), f"weights after step {step} of {what}"
        assert ours[1] == theirs[1], f"state after step {step} of {what}"
