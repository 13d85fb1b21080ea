"""What an optimizer steps where the weights of a model have 16 bits: those, fp32 masters, or copies for each step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampcompare.base.environment.ranks import has_other_ranks
from ampcompare.base.tensors.lists import copy_tensors_by_dtype
from ampcompare.training.parallel.replication import average_over_ranks_in
from ampcompare.training.precision.optimizer_state import cast_optimizer_state, cast_state_of_parameter
from ampcompare.training.precision.stochastic_rounding import StochasticRounding

COMPENSATION = "compensation"


class OptimizerWeights:
    """What an optimizer steps: the weights of the model as they are. What stands in their place overrides this."""

    def __init__(self, optimizer: Optimizer) -> None:
        cast_optimizer_state(optimizer)

    def add_up_gradients(self) -> None:
        """Add up the gradients so far, before those of another backward pass come."""

    def take_gradients_from_model(self) -> None:
        """Give what the optimizer steps the gradients of the model."""

    def give_weights_to_model(self) -> None:
        """Give the model the weights of a step."""

    def end_update_without_step(self) -> None:
        """End an update whose step is skipped."""

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return each weight of the model in whose place the optimizer has another tensor at present, with that."""
        return []


class MasterWeights(OptimizerWeights):
    """fp32 master weights that replace the 16-bit parameters of an optimizer, and the copies between the two.

    Parameters of groups that are added later get masters at the next step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._params: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._num_groups = 0
        self._make_masters()

    @torch.no_grad()
    def _make_masters(self) -> None:
        optimizer = self._optimizer
        for group in optimizer.param_groups[self._num_groups :]:
            for index, param in enumerate(group["params"]):
                if param.dtype is torch.float32 or param.is_complex():  # which an arm leaves as they are
                    continue
                master = param.detach().float().requires_grad_(param.requires_grad)
                self._params.append(param)
                self._masters.append(master)
                group["params"][index] = master
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)
        self._num_groups = len(optimizer.param_groups)

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._masters, strict=True))

    @torch.no_grad()
    def take_gradients_from_model(self) -> None:
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        narrow: list[Tensor] = []
        wide: list[Tensor] = []
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                narrow.append(param.grad)
                wide.append(torch.empty_like(param.grad, dtype=torch.float32))
                master.grad, param.grad = wide[-1], None
        copy_tensors_by_dtype(wide, narrow)

    @torch.no_grad()
    def give_weights_to_model(self) -> None:
        copy_tensors_by_dtype(self._params, self._masters)


class MastersWithFp32Gradients(MasterWeights):
    """Masters whose gradients are sums in fp32: that of each micro-batch is added before the next one comes.

    A wrapper for several processes reduces the gradients of the last micro-batch. The sum of the earlier ones, which it
    left alone under `no_sync`, is reduced here, once, in the type `reduce` or fp32.
    """

    def __init__(self, optimizer: Optimizer, reduce: torch.dtype | None = None) -> None:
        super().__init__(optimizer)
        self._reduce = reduce or torch.float32

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            if param.grad is not None:
                grad = param.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                param.grad = None

    @torch.no_grad()
    def take_gradients_from_model(self) -> None:
        if has_other_ranks():
            collected: list[Tensor] = [master.grad for master in self._masters if master.grad is not None]
            average_over_ranks_in(self._reduce, collected)
        if len(self._optimizer.param_groups) != self._num_groups:
            self._make_masters()
        self.add_up_gradients()


class Fp32CopiesPerStep(OptimizerWeights):
    """fp32 copies of an optimizer's 16-bit weights, made for each step; its state has `state_dtype` between steps.

    With `kahan` what rounding has cut off is kept as `compensation` in the state of the weight, and the next step
    begins from the sum of both. That is Kahan's compensated summation of the updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        state_dtype: torch.dtype | None = None,
        stochastic: StochasticRounding | None = None,
        kahan: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._state_dtype = state_dtype
        self._stochastic = stochastic
        self._kahan = kahan
        self._places: list[tuple[list[Tensor], int]] = []
        self._params: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._compensations: list[Tensor | None] = []
        for group in optimizer.param_groups:
            for param in group["params"]:
                cast_state_of_parameter(optimizer, param, state_dtype or param.dtype)

    def weight_master_pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._params, self._copies, strict=True))

    @torch.no_grad()
    def take_gradients_from_model(self) -> None:
        for group in self._optimizer.param_groups:
            held = group["params"]
            for index, param in enumerate(held):
                if param.dtype is not torch.float32 and param.requires_grad and not param.is_complex():
                    self._put_fp32_copy(held, index, param)

    def _put_fp32_copy(self, held: list[Tensor], index: int, param: Tensor) -> None:
        """Put an fp32 copy with the weight's state and gradient in its place in a group of the optimizer."""
        copy = param.detach().float()
        entries = self._optimizer.state.pop(param, {})
        # Out of the optimizer's sight: it takes a state without its own entries for one that it has made.
        compensation = entries.pop(COMPENSATION, None)
        if compensation is not None:
            copy.add_(compensation)
        if entries:
            self._optimizer.state[copy] = entries
            cast_state_of_parameter(self._optimizer, copy, torch.float32)
        if param.grad is not None:
            copy.grad, param.grad = param.grad.float(), None
        held[index] = copy.requires_grad_()
        self._places.append((held, index))
        self._params.append(param)
        self._copies.append(copy)
        self._compensations.append(compensation)

    @torch.no_grad()
    def give_weights_to_model(self) -> None:
        if self._stochastic is not None:
            self._stochastic.round_into(self._params, self._copies)
        else:
            copy_tensors_by_dtype(self._params, self._copies)
        if self._kahan:
            for number, (param, copy) in enumerate(zip(self._params, self._copies, strict=True)):
                if copy.grad is not None:
                    self._compensations[number] = (copy.detach() - param).to(param.dtype)
        self.end_update_without_step()

    def end_update_without_step(self) -> None:
        rows = zip(self._places, self._params, self._copies, self._compensations, strict=True)
        for (held, index), param, copy, compensation in rows:
            held[index] = param
            cast_state_of_parameter(self._optimizer, copy, self._state_dtype or param.dtype)
            entries = self._optimizer.state.pop(copy, {})
            if compensation is not None:
                entries[COMPENSATION] = compensation
            if entries:
                self._optimizer.state[param] = entries
        for kept in (self._places, self._params, self._copies, self._compensations):
            kept.clear()
