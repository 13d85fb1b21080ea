"""Watches the operations of one step after the other; another object says where a step begins and ends."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.patches import GRADIENT_READS
from ampcompare.base.tensors.products import dtype_name
from ampcompare.diagnosis.fp32_lines import run_lines_in_fp32
from ampcompare.diagnosis.fp32_reference import Fp32Reference
from ampcompare.diagnosis.observation import RunObservation, StepFacts, name_of_parameter
from ampcompare.diagnosis.operation_watch import Key, OperationWatch, computing_without_modes
from ampcompare.diagnosis.ranges import total_nonfinite_and_lost_of
from ampcompare.diagnosis.sites import RunningModulesTracker
from ampcompare.diagnosis.watched_precision import StepObserver
from ampcompare.results.records.diagnosis import LostUpdates, Phase
from ampcompare.training.ledger import is_eps_zero_in
from ampcompare.training.precision.base import StepOutcome, learning_rate_of, owned_params

MAX_SKIPPED = 20  # a dynamic scale that begins too high is halved at each


class StepOperationsWatch(StepObserver):
    """The modes and counters of one run.

    Args:
        observation: gets what each step has shown.
        steps: updates to make; up to 20 skipped ones are added.
        is_idle: only count the steps, as on a rank that is not watched.
        reference: type of the wide run; None for ranges alone.
        kept_lines: file:line of calls that run in fp32.
    """

    def __init__(
        self,
        observation: RunObservation,
        *,
        steps: int,
        is_idle: bool = False,
        reference: torch.dtype | None = torch.float32,
        kept_lines: Sequence[str] = (),
    ) -> None:
        self.observation = observation
        self.steps = steps
        self.is_watched = not is_idle
        self.scale = 1.0
        self.sites = RunningModulesTracker()
        self.updates = LostUpdateCounter(self.sites.named_parameters_of_step)
        self._reference = None if reference is None else Fp32Reference(reference)
        self.operations = OperationWatch(self.sites, self._reference)
        self._kept_lines = kept_lines
        self._stack = ExitStack()
        self._step = self._applied = 0
        self._broken_before: set[str] = set()  # parameters that had a gradient which is not finite

    def begin(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Follow models and optimizers, enter the modes, and begin with the first step.

        Args:
            models: whose modules are named.
            optimizers: whose updates are counted.
        """
        self.sites.hook_modules(models)
        for optimizer in optimizers:
            self._stack.callback(
                optimizer.register_step_pre_hook(self.updates.keep_weights_before_step).remove
            )
            self._stack.callback(
                optimizer.register_step_post_hook(self.updates.count_lost_updates_after_step).remove
            )
        self.open()
        self.begin_step()

    def see_cast_buffers(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        reference = self.operations.reference
        if reference is not None:
            for buffer, exact in pairs:
                reference.keep_wide_tensor(buffer, exact.to(buffer.device, reference.dtype))

    def open(self) -> None:
        self._stack.callback(self.sites.close)
        self._stack.enter_context(run_lines_in_fp32(self._kept_lines, self.observation.functions))
        self._stack.enter_context(self.operations)

    def close(self) -> None:
        """Leave the modes, and hand over what holds for the whole run."""
        self._stack.close()
        self.observation.modules = self.sites.modules_in_call_order
        self.observation.failures |= set() if self._reference is None else self._reference.failures

    @property
    def is_over(self) -> bool:
        """Whether all steps are made, or further ones show nothing new."""
        is_made = self._applied >= self.steps or self._step >= self.steps + MAX_SKIPPED
        return is_made or self.observation.is_broken

    def begin_step(self) -> None:
        self.operations.is_paused = not self.is_watched
        if self.is_watched:
            self.count_weights()

    def see_update(self, outcome: StepOutcome, optimizers: Sequence[Optimizer]) -> None:
        self.end_step(all(outcome.applied), optimizers)

    def end_step(self, applied: bool, optimizers: Sequence[Optimizer]) -> None:
        """Hand over what the step has shown, in which `optimizers` have changed weights.

        Args:
            applied: whether the update was made, and not skipped.
            optimizers: those that stepped.
        """
        self.sites.forget_step()
        step = self.operations.drain()
        updates = self.updates.take_lost_updates()
        stepped = {update.parameter for update in updates}
        for event in step.events:
            if stepped and event.key[3] == "gradient":  # of another optimizer, whose step it was not
                event.constant |= name_of_parameter(event.key) not in stepped
        if step.events and self.is_watched:
            self.observation.add_step(StepFacts(self._step, applied, self.scale, step, updates))
        else:
            self.observation.count_unwatched_step(applied)
        if self._reference is not None:  # weights have changed: the next step begins from those of the arm
            self._reference.forget_wide_tensors(param for _, param in self.sites.named_parameters_of_step())
            self._reference.forget_wide_tensors(
                param for optimizer in optimizers for param in owned_params(optimizer)
            )
        self._step += 1
        self._applied += applied

    def end_unfinished_step(self, *, only_nonfinite: bool = False) -> None:
        """Hand over what the script computed before it ended in a step, of which the last result counts as the loss.

        So ends one that stops training, or raises, at a number that is not finite, or is finite and wrong.

        Args:
            only_nonfinite: not if its last result is finite, as where the reason of its end is known.
        """
        step = self.operations.drain()
        last = next(
            (at for at, event in reversed([*enumerate(step.events)]) if event.key[3] == "forward"), None
        )
        if last is None or (only_nonfinite and not total_nonfinite_and_lost_of(step.events[last].row)[1]):
            return
        step.losses = step.losses or [last]
        self.observation.add_unfinished_step(
            StepFacts(self._step, False, self.scale, step, [], is_unfinished=True)
        )

    def note_gradients_before_backward(self) -> None:
        """Note which gradients are not finite already, such as a skipped step leaves: a pass that adds to them makes
        none of that."""
        self._broken_before = set()
        with GRADIENT_READS.pause_notices_of_reads(), computing_without_modes():
            for name, param in self.sites.named_parameters_of_step():
                if param.grad is not None and not param.grad.is_sparse and not param.grad.isfinite().all():
                    self._broken_before.add(name)

    def count_weights(self, model: nn.Module | None = None) -> None:
        self._add_parameters("weight", model)

    def count_gradients(self) -> None:
        """Count the gradients that a backward pass has left; one from 16-bit tensors has a wide one alongside."""
        self._add_parameters("gradient")

    def _add_parameters(self, phase: Phase, model: nn.Module | None = None) -> None:
        named: list[tuple[Key, Tensor]] = []
        stepped = self.updates.stepped_params
        unused: set[Key] = set()
        if phase == "weight" and self._reference is not None:  # it begins from the weights of the arm
            self._reference.forget_wide_tensors(
                param for _, param in self.sites.named_parameters_of_step(model)
            )
        for name, param in self.sites.named_parameters_of_step(model):
            with GRADIENT_READS.pause_notices_of_reads():  # an arm unscales for a reader, into another tensor
                tensor = param if phase == "weight" else param.grad
            self.observation.device_type = param.device.type
            if tensor is not None and tensor.is_floating_point() and not tensor.is_sparse:
                key: Key = (*_module_and_own_name_of_parameter(name), "", phase)
                named.append((key, tensor))
                # what comes behind its step is not used by it, and what was not finite before is of no pass
                if phase == "gradient" and (name in stepped or name in self._broken_before):
                    unused.add(key)
        with self.operations.pause():
            self.operations.add_weights_or_gradients(named, unused)


def _module_and_own_name_of_parameter(name: str) -> tuple[str, str]:
    """Return the module of a parameter, and the parameter's own name."""
    place = max(name.rfind("."), name.rfind(":"))
    is_model = place >= 0 and name[place] == ":"
    return name[: place + is_model] if place >= 0 else "", name[place + 1 :]


class LostUpdateCounter:
    """Compares weights before and after each step of optimizers; its two methods for that are hooks of torch.

    An update is lost where it is smaller than half a unit in the last place of the weight.

    Attributes:
        masters: returns the pairs of a weight and what an optimizer has in its place, as far as the arm knows them.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._named = named
        self.masters: Callable[[Optimizer], Iterable[tuple[Tensor, Tensor]]] = lambda _: ()
        self._names: dict[int, dict[int, str]] = {}  # of parameters, by optimizer
        self._before: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._counts: list[tuple[str, str, float | None, Tensor]] = []

    @property
    def stepped_params(self) -> set[str]:
        """The names of the parameters that were stepped since `take_lost_updates`."""
        return {name for name, *_ in self._counts}

    def take_lost_updates(self) -> list[LostUpdates]:
        """Return the counts since the last call, read from the device at once."""
        counts, self._counts = self._counts, []
        if not counts:
            return []
        rows = torch.stack([row for *_, row in counts]).tolist()
        return [
            LostUpdates(
                parameter=name,
                dtype=dtype,
                moved=row[0],
                lost=row[1],
                nonfinite=row[2],
                nonfinite_gradient=row[3],
                eps=eps,
            )
            for (name, dtype, eps, _), row in zip(counts, rows, strict=True)
        ]

    def keep_weights_before_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Keep copies of the weights about to be stepped, and which of their gradients are zero or not finite."""
        with computing_without_modes():
            self._before = [
                (one, one.detach().clone(), grad != 0, _num_nonfinite(grad))
                for one, grad in params_and_dense_grads_to_step(optimizer)
            ]

    def count_lost_updates_after_step(self, optimizer: Optimizer, *_arguments: Any) -> None:
        """Count what the step has changed, and what not."""
        if self._before and id(optimizer) not in self._names:
            self._names[id(optimizer)] = self._names_of_stepped(optimizer)
        names = self._names.get(id(optimizer), {})
        eps = _vanishing_eps_by_weight(optimizer)
        with computing_without_modes():
            for param, before, moved, broken in self._before:
                name = names.get(id(param)) or _name_of_loose_tensor(param)
                counts = torch.stack([*_moving_lost_and_nonfinite_counts(param, before, moved), broken])
                self._counts.append((name, dtype_name(param.dtype), eps.get(id(param)), counts))
        self._before = []

    def _names_of_stepped(self, optimizer: Optimizer) -> dict[int, str]:
        """Return the names of what an optimizer steps; a master weight has that of its weight.

        Where the arm does not know that one, as of optimizers that have masters by themselves, it is the next parameter
        of its shape.
        """
        known = list(self._named())
        names = {id(param): name for name, param in known}
        names |= {
            id(master): names[id(param)] for param, master in self.masters(optimizer) if id(param) in names
        }
        stepped = owned_params(optimizer)
        taken = {name for held in self._names.values() for name in held.values()}
        taken |= {names[id(param)] for param in stepped if id(param) in names}
        rest = [(name, param) for name, param in known if name not in taken and param.requires_grad]
        for param in stepped:
            if id(param) not in names:
                match = next((at for at, (_, other) in enumerate(rest) if other.shape == param.shape), None)
                if match is not None:
                    names[id(param)] = rest.pop(match)[0]
        return {id(param): names[id(param)] for param in stepped if id(param) in names}


def _name_of_loose_tensor(param: Tensor) -> str:
    """Return a name for a parameter that no module has, such as a prompt or an image."""
    return f"a tensor of {' x '.join(map(str, param.shape)) or 'one number'} outside of modules"


def params_and_dense_grads_to_step(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Return what a step will change: the parameters with a learning rate and a dense gradient, and their gradients."""
    found: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        if learning_rate_of(group) == 0:
            continue
        for param in group["params"]:
            if param.grad is not None and not param.grad.is_sparse:
                found.append((param, param.grad))
    return found


def _vanishing_eps_by_weight(optimizer: Optimizer) -> dict[int, float]:
    """Return the eps of each fp16 weight in whose type it is zero."""
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        if is_eps_zero_in(group, torch.float16) and group["eps"]:
            halves = [param for param in group["params"] if param.dtype is torch.float16]
            found |= dict.fromkeys(map(id, halves), float(group["eps"]))
    return found


def _moving_lost_and_nonfinite_counts(
    param: Tensor, weights_before: Tensor, moved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many elements should have moved, how many of them stayed, and how many are not finite."""
    lost = torch.count_nonzero((param == weights_before).logical_and_(moved))
    return torch.count_nonzero(moved), lost, _num_nonfinite(param)


def _num_nonfinite(tensor: Tensor) -> Tensor:
    return tensor.numel() - torch.count_nonzero(torch.isfinite(tensor))
