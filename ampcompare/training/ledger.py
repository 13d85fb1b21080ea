"""The ledger of a training: looks at a few of its steps and notes in which types they ran.

The first two steps are looked at operation by operation. After them one step in a block shows the types of what is held
and of what the optimizer gets, as long as all looks together take at most a hundredth of the time.
"""

import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from ampcompare.base.tensors.lists import largest_magnitudes
from ampcompare.base.tensors.products import (
    EmulatedLinearProduct,
    OperationMode,
    narrowest_type_name,
    product_flops,
    type_name_in_reports,
)
from ampcompare.base.tensors.sharded import local_part
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.base.tensors.type_names import HALF_NAMES
from ampcompare.results.records.ledger import GroupTypes, Ledger, LinearFormat, Types
from ampcompare.training.precision.base import Precision, PrecisionWrapper, learning_rate_of
from ampcompare.training.precision.stepped_weights import COMPENSATION

DETAILED = 2  # steps that are looked at operation by operation
MAX_SHARE = 0.01  # of the time, for all later looks
SAMPLE = 1024  # elements of a tensor whose update is followed
# of Adam, RMSprop, Adagrad, Adamax, by which they divide
SQUARES = ("exp_avg_sq", "square_avg", "sum", "exp_inf")


PARTS_OF_GROUP = ("weights", "masters", "gradients", "state")


@dataclass
class _SeenTypes:
    """Elements, or multiply-adds, by type."""

    groups: dict[tuple[int, int], dict[str, Counter[str]]] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    # by id: type, elements
    weights: dict[int, tuple[weakref.ref[Tensor], str, int]] = field(default_factory=dict)
    # ids of weights that optimizers update, by masters perhaps
    trained: set[int] = field(default_factory=set)
    stepped: set[int] = field(default_factory=set)  # ids of what has had a gradient in a step
    # of steps: whether an update was applied
    outcomes: list[Callable[[], bool]] = field(default_factory=list)
    accumulated: Counter[str] = field(default_factory=Counter)
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    # by type of forward products
    looks: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    products: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    linear: dict[tuple[str, str], list[EmulatedLinearProduct]] = field(
        default_factory=lambda: defaultdict(list)
    )
    reduced: Counter[str] = field(default_factory=Counter)
    has_compensation: bool = False
    updates: list[Tensor] = field(default_factory=list)  # elements that should move, that stayed, that differ
    denominators: list[Tensor] = field(default_factory=list)  # elements, those divided by 0
    # by optimizer and group: what is added to denominators, and whether it is 0 in their type
    eps: dict[tuple[int, int], tuple[float, bool]] = field(default_factory=dict)
    largest: list[Tensor] = field(default_factory=list)  # gradients


class StepTypeRecorder:
    """Looks at steps: call `begin`, let the step run under `operations_observed_in_block`, then call `end`.

    Args:
        parameters: returns what the models hold, in their order, frozen ones too.
        masters: returns the weights of models in whose place an optimizer has other tensors, with those.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[Tensor]],
        masters: Callable[[Optimizer], Sequence[tuple[Tensor, Tensor]]] = lambda optimizer: (),
    ) -> None:
        self._parameters = parameters
        self.masters = masters
        self._weight_of: Any = WeakIdKeyDictionary()  # of masters of unknown origin
        self._seen = _SeenTypes()
        self._order: list[Optimizer] = []  # in which they were seen
        self._before: dict[int, list[Tensor]] = {}
        self._stepped: dict[int, list[tuple[Tensor, Tensor | None, Tensor | None]]] = {}
        self._given: set[int] = set()  # ids of optimizers in a step whose gradients were there when it began
        self._operations = _ProductCounter(self._seen)
        self._hooks: list[Any] = []
        self._forward_before: Counter[str] = Counter()
        self._is_detailed = False
        self.steps: list[int] = []

    def begin(self, step: int, optimizers: Sequence[Optimizer], *, detailed: bool) -> None:
        """Begin to look at a step.

        Args:
            step: its number.
            optimizers: of the training.
            detailed: whether a sample of each update is followed.
        """
        self.steps.append(step)
        self._is_detailed = detailed
        self._hooks = [
            register_optimizer_step_pre_hook(self._note_gradients_at_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._forward_before = Counter(self._seen.forward)
        if detailed:
            self._before = {
                id(optimizer): _copies_of_sampled_weights(optimizer)
                for optimizer in map(_optimizer_inside_wrapper, optimizers)
            }

    def operations_observed_in_block(self) -> AbstractContextManager[Any]:
        """Return the context whose operations are seen; those of optimizers in it are not."""
        return self._operations if self._is_detailed else nullcontext()

    @contextmanager
    def operations_unseen_in_block(self) -> Iterator[None]:
        """Run a block whose operations are not seen, such as a compiled program, which would not run under a mode."""
        if _get_current_dispatch_mode() is not self._operations:
            yield
            return
        self._operations.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self._operations.__enter__()  # type: ignore[no-untyped-call]

    def note_outcome(self, applied: Callable[[], bool]) -> None:
        """Note what returns later whether a step that was looked at updated something."""
        self._seen.outcomes.append(applied)

    def is_trained_weight(self, weight: Tensor) -> bool:
        """Return whether a look has found an optimizer that updates a weight."""
        return id(weight) in self._seen.trained

    def trained_or_frozen_weights(self, *, trained: bool) -> list[Tensor]:
        """Return the weights that optimizers update, or the others, which are frozen, as far as they are there yet."""
        entries = self._seen.weights.items()
        found = [entry[0]() for key, entry in entries if (key in self._seen.trained) == trained]
        return [weight for weight in found if weight is not None]

    def optimizers_with_gradients(self) -> list[Optimizer]:
        """Return the optimizers that have got gradients."""
        places = {place for (place, _), counts in self._seen.groups.items() if counts["gradients"]}
        return [optimizer for place, optimizer in enumerate(self._order) if place in places]

    def note_accumulated_gradients(self) -> None:
        """Note what holds the gradients of earlier micro-batches; called in a further backward pass."""
        held = [param.grad for param in self._parameters() if param.grad is not None]
        stepped = [p.grad for one in self._order for group in one.param_groups for p in group["params"]]
        _count_elements_by_type(
            self._seen.accumulated, held or [grad for grad in stepped if grad is not None]
        )

    def end(self, optimizers: Sequence[Optimizer]) -> None:
        """Note what is held after the step, and look no longer."""
        self.note_types_held_after_step(optimizers)
        self.close()

    def close(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()
        for name in self._seen.forward - self._forward_before:
            self._seen.looks[name].append(self.steps[-1])
        self._before, self._stepped = {}, {}

    def note_types_held_after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """Note what is held after a step of one of these optimizers; another one may step yet."""
        weights = [weight for weight in self._parameters() if weight.is_floating_point()]
        for weight in weights:
            self._seen.weights[id(weight)] = weakref.ref(weight), type_name_in_reports(weight), weight.numel()
        bare = list(map(_optimizer_inside_wrapper, optimizers))
        held = {id(param) for one in bare for group in one.param_groups for param in group["params"]}
        for optimizer in bare:
            self._note_held_types(optimizer, weights, held)
            self._count_update_of_sample(optimizer)

    def _note_gradients_at_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note the gradients that an optimizer gets; those of a closure are there after the step."""
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            self._operations.is_idle = True
            self._given.add(id(optimizer))
            self._keep_sample_of_update(optimizer, self._dense_gradients_after_noting_types(optimizer))

    # A step that is looked at stays on the device, as the others do.
    _note_gradients_at_step.only_looks = True  # type: ignore[attr-defined]

    def _keep_sample_of_update(
        self, optimizer: Optimizer, grads: Sequence[Tensor], *, is_over: bool = False
    ) -> None:
        """Keep what shows which elements of a sample a step moves, or has moved if it is over."""
        if not (self._is_detailed and grads):
            return
        largest = largest_magnitudes(map(local_part, grads))
        self._seen.largest.append(largest.max())
        is_good = largest.isfinite().all()  # else the step is skipped, here or on the device
        stepped = self._stepped[id(optimizer)] = []
        for group in optimizer.param_groups:
            is_moved = bool(learning_rate_of(group))
            for param in group["params"]:
                before = None if is_over else _first_elements_of(param).clone()
                stepped.append(
                    (
                        param.detach(),
                        before,
                        _mask_of_moving_elements(param.grad, is_good) if is_moved else None,
                    )
                )

    def _dense_gradients_after_noting_types(self, optimizer: Optimizer) -> list[Tensor]:
        """Note the types of gradients, and return those that are dense."""
        grads = []
        for number, group in enumerate(optimizer.param_groups):
            own = [param.grad for param in group["params"] if param.grad is not None]
            self._seen.stepped.update(id(param) for param in group["params"] if param.grad is not None)
            _count_elements_by_type(self._type_counts_to_add_to(optimizer, number)["gradients"], own)
            grads += [grad for grad in own if not grad.is_sparse and grad.numel()]
        return grads

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._operations.is_idle = False
        if id(optimizer) not in self._given:  # a closure has computed them in the step
            self._keep_sample_of_update(
                optimizer, self._dense_gradients_after_noting_types(optimizer), is_over=True
            )
        self._given.discard(id(optimizer))

    _after_step.only_looks = True  # type: ignore[attr-defined]

    def _type_counts_to_add_to(self, optimizer: Optimizer, number: int) -> dict[str, Counter[str]]:
        key = (self._number_of_optimizer(optimizer), number)
        self._seen.names[key] = f"{type(optimizer).__name__} {number}"
        return self._seen.groups.setdefault(key, defaultdict(Counter))

    def _number_of_optimizer(self, optimizer: Optimizer) -> int:
        place = next((place for place, other in enumerate(self._order) if other is optimizer), None)
        if place is None:
            place = len(self._order)
            self._order.append(optimizer)
        return place

    def _note_held_types(self, optimizer: Optimizer, weights: Sequence[Tensor], all_held: set[int]) -> None:
        """Note the types of what an optimizer holds, and which weights of models it updates."""
        own, pairs = set(map(id, weights)), self._weights_by_master(optimizer)
        trained = [one for one in weights if one.requires_grad and id(one) not in all_held]
        free = [one for one in trained if type_name_in_reports(one) in HALF_NAMES]
        for number, group in enumerate(optimizer.param_groups):
            counts = self._type_counts_to_add_to(optimizer, number)
            elements = 0
            for param in group["params"]:
                mastered = self._weights_behind_master(param, pairs, [] if id(param) in own else free)
                is_trained = any(one.requires_grad for one in mastered or [param])
                if id(param) not in self._seen.stepped and not is_trained:
                    continue  # it is frozen, or a master of what is, at least for now
                elements += param.numel()
                if mastered:
                    _count_elements_by_type(counts["masters"], [param])
                self._seen.trained.update(map(id, mastered or [param]))
                _count_elements_by_type(counts["weights"], mastered or [param])
                state = optimizer.state.get(param, {})
                self._seen.has_compensation |= COMPENSATION in state
                _count_elements_by_type(
                    counts["state"],
                    [
                        one
                        for name, one in _entries_of_state(state)
                        if _is_gradient_statistic(name, one, param)
                    ],
                )
            key = self._number_of_optimizer(optimizer), number
            self._seen.parameters[key] = max(elements, self._seen.parameters.get(key, 0))

    def _weights_by_master(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Return the weights of an optimizer's masters, by the ids of these, as far as the arm or Apex tells them."""
        stash = getattr(optimizer, "_amp_stash", None)
        of_apex = (getattr(stash, f"all_{name}", ()) for name in ("fp16_params", "fp32_from_fp16_params"))
        pairs = [*zip(*of_apex, strict=False), *self.masters(optimizer)]
        return {id(master): weight for weight, master in pairs}

    def _weights_behind_master(
        self, param: Tensor, pairs: Mapping[int, Tensor], free: list[Tensor]
    ) -> list[Tensor]:
        """Return the weights that `param` is a master of; none if it is a weight itself.

        A master that the script keeps belongs to that 16-bit weight of `free`, of its shape, whose values are nearest,
        and a flat one to all of them that are left.
        """
        if id(param) in pairs:
            return [pairs[id(param)]]
        known = self._weight_of.get(param)
        if known is None and free and type_name_in_reports(param) not in HALF_NAMES:
            alike = [one for one in free if one.shape == param.shape]
            if len(alike) > 1:
                alike.sort(
                    key=lambda one: float(
                        (_first_elements_of(one).to(param) - _first_elements_of(param)).abs().sum()
                    )
                )
            if not alike and (param.dim() != 1 or param.numel() > sum(one.numel() for one in free)):
                return []
            known = self._weight_of[param] = [weakref.ref(one) for one in (alike[:1] or free)]
        found = [one for reference in known or () if (one := reference()) is not None]
        taken = set(map(id, found))
        free[:] = [one for one in free if id(one) not in taken]
        return found

    def _count_update_of_sample(self, optimizer: Optimizer) -> None:
        """Count, unread, which elements of the sample have a gradient, which of them stayed, and which were not rounded
        to the nearest of what the optimizer has computed on a copy."""
        stepped = self._stepped.pop(id(optimizer), [])
        held = (
            [(param, at) for at, group in enumerate(optimizer.param_groups) for param in group["params"]]
            if stepped
            else []
        )
        for (_, _, moves), (param, at) in zip(stepped, held, strict=False):
            second = find_second_moment(optimizer, param)
            if moves is not None and second is not None:
                is_zero = self._note_eps_and_whether_zero(optimizer, at, second.dtype)
                zero = (_first_elements_of(second) == 0) if is_zero else torch.zeros_like(moves)
                self._seen.denominators.append(torch.stack([torch.ones_like(zero).sum(), zero.sum()]))
        for old, (copy, given, moves), (new, _) in zip(
            self._before.get(id(optimizer), []), stepped, held, strict=False
        ):
            now = _first_elements_of(new)
            before = old if old.dtype is now.dtype else given  # masters that were made in this step
            if before is None or moves is None or moves.shape != old.shape:
                continue
            stayed = (before == now).logical_and_(moves)
            apart = torch.zeros_like(stayed)
            if copy.dtype is not now.dtype:
                apart = (_first_elements_of(copy).to(now.dtype) != now).logical_and_(moves)
            self._seen.updates.append(torch.stack([moves.sum(), stayed.sum(), apart.sum()]))

    def _note_eps_and_whether_zero(self, optimizer: Optimizer, number: int, dtype: torch.dtype) -> bool:
        """Note the eps of a group, and return whether it is zero in the type of a second moment."""
        group = optimizer.param_groups[number]
        is_zero = is_eps_zero_in(group, dtype)
        if isinstance(eps := group.get("eps"), float):
            key = (self._number_of_optimizer(optimizer), number)
            self._seen.eps[key] = eps, is_zero or self._seen.eps.get(key, (eps, False))[1]
        return is_zero

    def read_ledger_from_device(self, **facts: Any) -> Ledger:
        """Return what was seen, with further fields from `facts`; reads the counts of updates from the device."""
        seen = self._seen
        lost = None
        update = ""
        frozen: Counter[str] = Counter()
        for key, (_, name, elements) in seen.weights.items():
            frozen[name] += elements * (key not in seen.trained)
        moved, stayed, apart = _column_sums_read_from_device(seen.updates) or (0, 0, 0)
        if moved:
            lost, update = stayed / moved, "stochastic" if apart else "nearest"
        if seen.has_compensation:
            update = "kahan"
        adam, zero = _column_sums_read_from_device(seen.denominators) or (0, 0)
        main = max(seen.forward, key=lambda name: seen.forward[name], default="")
        groups = []
        for place, counts in sorted(seen.groups.items()):
            shares = {part: _shares_of_counts(counts[part]) for part in PARTS_OF_GROUP}
            if not any(shares.values()):  # of a group without parameters
                continue
            elements = seen.parameters.get(place, 0)
            eps, is_zero = seen.eps.get(place, (None, False))
            groups.append(
                GroupTypes(name=seen.names[place], parameters=elements, eps=eps, zero_eps=is_zero, **shares)
            )
        return Ledger(
            steps=self.steps,
            groups=groups,
            frozen=_shares_of_counts(frozen),
            skipped=sum(not applied() for applied in seen.outcomes),
            accumulated=_shares_of_counts(seen.accumulated),
            forward=_shares_of_counts(seen.forward),
            forward_steps=dict(seen.looks),
            backward=_shares_of_counts(seen.backward),
            elsewhere={name: sorted(found) for name, found in seen.products.items() if name != main},
            linear=_formats_by_role(seen.linear),
            linear_in_bf16=_layers_in_bf16(seen.linear),
            lost_gradients=_products_with_lost_gradients(seen.linear),
            reduced=_shares_of_counts(seen.reduced),
            update=update,
            lost=lost if update == "nearest" else None,  # the others keep what they cut off
            largest_gradient=max(map(float, seen.largest), default=None),
            zero_denominators=zero / adam if adam else None,
            **facts,
        )


class _ProductCounter(OperationMode):
    """Counts multiply-adds by type and pass, and what ranks reduce."""

    def __init__(self, seen: _SeenTypes) -> None:
        super().__init__()
        self._seen = seen

    def see_linear_product(self, product: EmulatedLinearProduct) -> None:
        self._seen.linear[product.role, product.text].append(product)
        passes = self._seen.forward if product.role == "fprop" else self._seen.backward
        passes[product.format] += product.flops

    def see_operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            if "reduce" in name:
                _count_elements_by_type(
                    self._seen.reduced, [one for one in tensors_in_value(args) if one.numel() > 1]
                )
            return
        flops = product_flops(func, args, kwargs, result)
        if not flops:
            return
        dtype = narrowest_type_name([*tensors_in_value(args), *tensors_in_value(kwargs)])
        if torch._C._current_autograd_node() is not None:
            self._seen.backward[dtype] += flops
        else:
            self._seen.forward[dtype] += flops
            self._seen.products[dtype].add(name)


class TrainingLedgerRecorder:
    """Looks at the steps of ampcompare's own loop; a compiled program has no operations to see."""

    def __init__(self, models: Sequence[nn.Module], every: int, *, sees_operations: bool = True) -> None:
        self._models = models
        self._every = every
        self._details = DETAILED if sees_operations else 0
        self._step = 0
        self._spent = 0.0
        self._since = time.perf_counter()
        self.look = StepTypeRecorder(self._parameters_of_models)

    def _parameters_of_models(self) -> list[Tensor]:
        return [param for model in self._models for param in model.parameters()]

    def make_recorded_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return `update` of the loop with looks at some of its calls."""

        def watched_update(
            models: Sequence[nn.Module],
            optimizers: Sequence[Optimizer],
            precision: Precision,
            *arguments: Any,
        ) -> Any:
            step, self._step = self._step, self._step + 1
            may_look = self._spent <= MAX_SHARE * (time.perf_counter() - self._since)
            if step >= DETAILED and (step % self._every or not may_look):
                return update(models, optimizers, precision, *arguments)
            self.look.masters = precision.masters
            begin, detailed = time.perf_counter(), step < self._details
            self.look.begin(step, optimizers, detailed=detailed)
            self._spent += time.perf_counter() - begin
            try:
                with self.look.operations_observed_in_block():
                    inner = _PrecisionNotingAccumulation(precision, self.look) if detailed else precision
                    result = update(models, optimizers, inner, *arguments)
                self.look.note_outcome(lambda: not result[-1].applied or any(result[-1].applied))
                return result
            finally:
                begin = time.perf_counter()
                self.look.end(optimizers)
                self._spent += time.perf_counter() - begin
                if step < DETAILED:  # only later looks cost time that is measured
                    self._spent, self._since = 0.0, time.perf_counter()

        return watched_update


class _PrecisionNotingAccumulation(PrecisionWrapper):
    """The precision of a step that is looked at."""

    def __init__(self, inner: Precision, look: StepTypeRecorder) -> None:
        super().__init__(inner)
        self._look = look
        self._passes = 0

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        if self._passes and loss.requires_grad:  # where the pass begins, an arm has collected what was there
            loss.register_hook(lambda _: self._look.note_accumulated_gradients())
        self._passes += 1


def _optimizer_inside_wrapper(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a library has wrapped."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def _count_elements_by_type(counts: Counter[str], tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        counts[type_name_in_reports(tensor)] += tensor.numel()


_Linear = Mapping[tuple[str, str], Sequence[EmulatedLinearProduct]]
"""Products of linear layers by role and format."""


def _formats_by_role(products_by_role: _Linear) -> list[LinearFormat]:
    """Return the formats of each role, read from the device."""
    flops = {key: sum(one.flops for one in products) for key, products in products_by_role.items()}
    found = []
    for (role, text), products in sorted(
        products_by_role.items(), key=lambda item: ("fdw".index(item[0][0][0]), item[0][1])
    ):
        total = sum(count for (other, _), count in flops.items() if other == role)
        entry: dict[str, Any] = {"role": role, "format": text, "share": flops[role, text] / total}
        entry["layers"] = sorted({one.layer for one in products if one.format == "bf16"})
        figures = [one.figures for one in products if one.figures is not None]
        if figures:
            elements, cut, zeroed, scales, ends, error, square = torch.stack(figures).sum(0).tolist()
            entry |= {"cut_off": cut / elements, "zeroed": zeroed / elements, "scales_at_end": ends / scales}
            entry["error"] = math.sqrt(error / square) if square else 0.0
        found.append(LinearFormat(**entry))
    return found


def _layers_in_bf16(products_by_role: _Linear) -> list[str]:
    formats: dict[str, set[str]] = defaultdict(set)
    for one in (one for products in products_by_role.values() for one in products):
        formats[one.layer].add(one.format)
    return sorted(name for name, found in formats.items() if found == {"bf16"})


def _products_with_lost_gradients(products_by_role: _Linear) -> list[str]:
    """Return the products that were all 0 where those of bf16 were not."""
    every = [one for products in products_by_role.values() for one in products]
    return sorted({f"{one.layer} {one.role}" for one in every if one.is_lost is not None and one.is_lost})


def _shares_of_counts(counts: Counter[str]) -> Types:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.most_common() if count}


def find_second_moment(optimizer: Optimizer, param: Tensor) -> Tensor | None:
    """Return the state by which an optimizer divides the step of a parameter, such as `exp_avg_sq` of Adam.

    Args:
        optimizer: that has stepped.
        param: one of its parameters.

    Returns:
        A tensor of the parameter's shape, in the type in which the optimizer keeps it; None if there is none.
    """
    state = dict(_entries_of_state(optimizer.state.get(param)))
    for name in SQUARES:
        found = state.get(name)
        if isinstance(found, Tensor) and found.shape == param.shape:
            return found
    return None


def is_eps_zero_in(group: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Return whether the eps of a group rounds to zero in a type; a fused step computes in fp32, where it does not.

    Args:
        group: parameter group of an optimizer; without an `eps` that is a number the answer is no.
        dtype: in which the optimizer computes.
    """
    eps = group.get("eps")
    return isinstance(eps, float) and not group.get("fused") and float(torch.tensor(eps).to(dtype)) == 0


def _column_sums_read_from_device(rows: Sequence[Tensor]) -> list[int]:
    """Return the sums of counts over all rows, read from the device."""
    return torch.stack([row.to(rows[0].device) for row in rows]).sum(dim=0).tolist() if rows else []


def _entries_of_state(state: Any) -> Iterable[tuple[str, Any]]:
    return state.items() if isinstance(state, Mapping) else ()


def _is_gradient_statistic(name: str, value: Any, param: Tensor) -> bool:
    """Return whether an entry of a state is a statistic of the gradients, not a count of steps or a remainder."""
    return (
        isinstance(value, Tensor)
        and name not in (COMPENSATION, "step")
        and value.dtype is not torch.bool
        and (value.numel() > 1 or value.shape == param.shape)
    )


def _first_elements_of(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).reshape(-1)[:SAMPLE]


def _mask_of_moving_elements(grad: Tensor | None, is_good: Tensor) -> Tensor | None:
    """Return where a weight should move; nowhere in a step that is skipped."""
    return (
        None
        if grad is None or grad.is_sparse
        else (_first_elements_of(grad) != 0).logical_and_(is_good.to(grad.device))
    )


def _copies_of_sampled_weights(optimizer: Optimizer) -> list[Tensor]:
    """Return copies of the first elements of what an optimizer steps."""
    return [
        _first_elements_of(param).clone() for group in optimizer.param_groups for param in group["params"]
    ]
