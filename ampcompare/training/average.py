"""An exponential moving average of the weights (EMA), kept in fp32 whatever the arm stores, and evaluated apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ampcompare.errors import CheckpointError
from ampcompare.parallel.ranks import Ranks
from ampcompare.precision.base import Precision, owned_params

__all__ = ["WeightAverage"]


class WeightAverage:
    """`torch.optim.swa_utils.AveragedModel` over what the optimizers update: fp32 masters where an arm has them.

    Make it before `Precision.prepare`, while the models are fp32, and let it `follow` what `prepare` returned. Where an
    arm keeps 16-bit weights alone, they are widened for the average, which would stand still in 16 bits. Floating-point
    buffers, such as the statistics of batch norm, are averaged too.

    Args:
        models: in fp32, on the device.
        decay: share of the old average that each update keeps; the first update copies.
    """

    def __init__(self, models: Sequence[nn.Module], decay: float) -> None:
        self.decay = decay
        self._averaged = AveragedModel(
            nn.ModuleList(models),
            multi_avg_fn=get_ema_multi_avg_fn(decay),
            use_buffers=True,
        )
        self._models = cast(nn.ModuleList, self._averaged.module)  # the average holds a copy
        self._optimizers: Sequence[Optimizer] = ()
        self._owned: list[Tensor] = []
        self._sources: _Sources | None = None

    def follow(self, replicas: Sequence[nn.Module], optimizers: Sequence[Optimizer], owned: Sequence[Tensor]) -> None:
        """Average the weights of `replicas` from now on.

        Args:
            replicas: the models as `prepare` returned them, unwrapped.
            optimizers: as `prepare` returned them.
            owned: the parameters that the optimizers held before `prepare`, in order; at the same places stand the
                masters afterwards, in Apex only after the first backward pass.
        """
        self._replicas = list(replicas)
        self._optimizers = optimizers
        self._owned = list(owned)
        self._sources = None

    def update(self) -> None:
        """Take in the weights as they are now; call it once after each step."""
        if self._sources is None:
            self._sources = self._find_sources()
        self._sources.refresh()
        self._averaged.update_parameters(self._sources)

    def _find_sources(self) -> _Sources:
        updated = [param for optimizer in self._optimizers for param in owned_params(optimizer)]
        masters = {id(param): master for param, master in zip(self._owned, updated, strict=True)}
        params = [param for model in self._replicas for param in model.parameters()]
        buffers = [buffer for model in self._replicas for buffer in model.buffers()]
        return _Sources([masters.get(id(param), param) for param in params], buffers)

    @contextmanager
    def applied(self, precision: Precision) -> Iterator[None]:
        """Put the average into the replicas, cast to what they store, and put their own weights back at the end."""
        averaged = [*self._models.parameters(), *self._models.buffers()]
        here: list[Tensor] = [tensor for model in self._replicas for tensor in model.parameters()]
        here += [tensor for model in self._replicas for tensor in model.buffers()]
        pairs = [(own, mean) for own, mean in zip(here, averaged, strict=True) if own.is_floating_point()]
        kept = [own.detach().clone() for own, _ in pairs]
        _write([own for own, _ in pairs], [mean for _, mean in pairs], precision)
        try:
            yield
        finally:
            _write([own for own, _ in pairs], kept, precision)

    def equalize_buffers(self, ranks: Ranks) -> None:
        """Give every rank the averaged statistics of the first, as its own statistics are before an evaluation."""
        ranks.equalize_buffers([self._averaged])

    def state_dict(self) -> dict[str, Any]:
        """Return the decay, the number of updates taken in, and per model the averaged tensors under its own names."""
        models = [dict(model.state_dict()) for model in self._models]
        return {"decay": self.decay, "num_updates": int(self._averaged.n_averaged), "models": models}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the decay stays that of this run.

        Raises:
            CheckpointError: the tensors are those of another model.
        """
        try:
            for model, saved in zip(self._models, state["models"], strict=True):
                model.load_state_dict(saved)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"the saved average of the weights does not fit this model: {error}; resume without --ema-decay, "
                "or with the model that it was made of"
            ) from None
        self._averaged.n_averaged.fill_(int(state["num_updates"]))


class _Sources(nn.Module):
    """What is averaged, seen as a module: tensors of 32 bits as they are, others through an fp32 copy of their own."""

    def __init__(self, params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__()
        narrow = [t for t in [*params, *buffers] if t.is_floating_point() and t.dtype is not torch.float32]
        wide = {id(tensor): torch.empty_like(tensor, dtype=torch.float32) for tensor in narrow}
        self._narrow = [tensor.detach() for tensor in narrow]
        self._wide = [wide[id(tensor)] for tensor in narrow]
        self._shown_params = [wide.get(id(param), param) for param in params]
        self._shown_buffers = [wide.get(id(buffer), buffer) for buffer in buffers]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the narrow tensors anew."""
        if self._narrow:
            torch._foreach_copy_(self._wide, self._narrow)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(self._shown_params)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return iter(self._shown_buffers)


@torch.no_grad()
def _write(targets: list[Tensor], values: list[Tensor], precision: Precision) -> None:
    if targets:
        torch._foreach_copy_(targets, [value.detach() for value in values])
    precision.weights_replaced()
