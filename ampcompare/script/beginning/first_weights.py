"""The first weights of a script, as its optimizers get them: kept, or taken from a file in place of the script's own.

The file has the tensors that the recorder of a stack stores, matched by their order and shape.
"""

from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ampcompare.base.errors import ConfigError, UnsupportedCombination
from ampcompare.base.patches import Subscriptions

# What a weight has of which a rank holds a part: of FSDP, DTensor, DeepSpeed.
PARTS = ("_fsdp_flattened", "_local_tensor", "ds_id")


class FirstWeightsFollower:
    """Follows what optimizers get, each tensor once.

    Args:
        events: what optimizers get is followed until their end.
        stored: a file with the weights to begin with; None keeps the script's own.

    Attributes:
        kept: what the optimizers begin with, on the CPU, where nothing is stored.
        count: the number of tensors.
        changed: how many tensors of the script's own were others than the stored ones.
    """

    def __init__(self, events: Subscriptions, stored: Path | None = None) -> None:
        self.kept: list[torch.Tensor] = []
        self.count = self.changed = 0
        self._stored = (
            None if stored is None else list(torch.load(stored, map_location="cpu", weights_only=True))
        )
        self._seen: set[int] = set()
        self._has_stepped = False
        events.wrap(Optimizer, "add_param_group", self._follow_added_param_group)

    def note_step_and_is_first(self) -> bool:
        """Record that a step follows, so that what optimizers get from here on is not first.

        Returns:
            Whether it is the first step.

        Raises:
            ConfigError: stored weights are left over.
        """
        if not self._has_stepped and self._stored:
            raise ConfigError(
                f"the stored first weights do not fit this script: {len(self._stored)} of them are left over"
            )
        is_first, self._has_stepped = not self._has_stepped, True
        return is_first

    def _follow_added_param_group(self, inner: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        inner(optimizer, *args, **kwargs)
        if not self._has_stepped:
            self._keep_or_replace_weights(optimizer.param_groups[-1]["params"])

    @torch.no_grad()
    def _keep_or_replace_weights(self, params: list[torch.Tensor]) -> None:
        for param in params:
            if id(param) in self._seen:
                continue
            if any(hasattr(param, name) for name in PARTS):
                raise UnsupportedCombination(
                    "first weights are kept of one rank for all, and each rank of this script holds a part of the "
                    "weights, as under FSDP, tensor parallelism and ZeRO; compare without --first-weights, or with DDP"
                )
            self._seen.add(id(param))
            self.count += 1
            if self._stored is None:
                self.kept.append(param.detach().to("cpu", copy=True))
            else:
                self._replace_by_stored_weight(param, self._stored)

    def _replace_by_stored_weight(self, param: torch.Tensor, stored: list[torch.Tensor]) -> None:
        shape = tuple(param.shape)
        if not stored or tuple(stored[0].shape) != shape:
            found = f"one of {tuple(stored[0].shape)}" if stored else "nothing more"
            raise ConfigError(
                f"the stored first weights do not fit this script: weight {self.count} has shape {shape}, and {found} "
                "is stored"
            )
        value = stored.pop(0).to(param.device, param.dtype)
        self.changed += not torch.equal(value, param)
        param.copy_(value)
