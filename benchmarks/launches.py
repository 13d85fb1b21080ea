"""Count the kernels that a step would launch on CUDA, and its waits for the device, on a machine without a GPU.

One step runs on fake tensors: nothing is computed, every operation is written down. An operation on lists of tensors is
replayed through the chunking loop of torch's multi-tensor kernels; any other that is not a view or an allocation counts
as one kernel. Kernels of forward and backward of the fp32 model are taken off: what is left is casts, scaling, checks
and the optimizer.

A wait is a read that stops the host until the device has caught up. A late read is that of the flag of the step before,
which has been copied to the host meanwhile.

    python benchmarks/launches.py [--arch resnet50] [--limits 4096 | 32768] [--optimizer sgd | adamw]
"""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex import amp
from ampcompare.apex.amp._engine import device_skip
from ampcompare.base.tensors.skippable_step import FlagCopyToHost, make_step_skippable
from ampcompare.tasks.models import build_model
from ampcompare.training.precision import half
from ampcompare.training.precision.base import Precision, make_precision

ARMS = ("fp32", "apex:O1", "apex:O2", "apex:O3", "native:fp16", "half", "half:masters=fp32,dynamic")
IMPLEMENTATIONS = ("foreach", "foreach, skip on device", "fused", "fused, skip on device")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, **options: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=1e-4, **options
    ),
    "adamw": lambda params, **options: torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-2, **options),
}

_BLOCK = 65536  # elements


@dataclass(frozen=True)
class Limits:
    """What one launch of a multi-tensor kernel holds: tensors by number of lists, and blocks."""

    tensors: tuple[int, ...]
    blocks: int


# By bytes of kernel arguments: torch 2.11 and earlier, or CUDA 12; torch 2.13 on CUDA 13.
LIMITS = {4096: Limits((110, 64, 48, 36, 30), 320), 32768: Limits((770, 448, 336, 252, 210), 2240)}

_CAT_INPUTS = 64  # of one launch of `cat`, with strides
_FREE = (
    "empty",
    "detach",
    "alias",
    "view",
    "expand",
    "permute",
    "transpose",
    "t",
    "select",
    "slice",
    "as_strided",
)
_FREE_NAMES = frozenset(
    [
        *_FREE,
        "_unsafe_view",
        "_reshape_alias",
        "unsqueeze",
        "squeeze",
        "unbind",
        "lift_fresh",
        "split",
        "split_with_sizes",
    ]
)


def launches_of_lists(lists: Sequence[Sequence[Tensor]], limits: Limits) -> int:
    """Return the launches of a multi-tensor kernel over rows of these lists; one a row if dtypes or sizes are mixed."""
    rows = [row for row in zip(*lists, strict=True) if row[0].numel()]
    if any(len({tensor.dtype for tensor in tensors}) > 1 for tensors in lists):
        return len(rows)
    if any(tensor.shape != row[0].shape for row in rows for tensor in row):
        return len(rows)
    launches = blocks = tensors = 0
    for row in rows:
        tensors += 1
        chunks = math.ceil(row[0].numel() / _BLOCK)
        for chunk in range(1, chunks + 1):
            blocks += 1
            full = tensors == limits.tensors[len(lists) - 1] and chunk == chunks
            if full or blocks == limits.blocks:
                launches, blocks = launches + 1, 0
                tensors = 0 if chunk == chunks else 1
    return launches + (1 if blocks else 0)


@dataclass
class Counts:
    """Kernels by operation, waits of the host, and its late reads."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: int = 0
    late_reads: int = 0

    @property
    def total(self) -> int:
        """All launches."""
        return sum(self.launches.values())


class _Ledger(TorchDispatchMode):
    """Counts operations, except those on the scalars of `on_host`, such as step counts."""

    def __init__(self, limits: Limits, on_host: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.limits = limits
        self.counts = Counts()
        self.on_host = {id(tensor) for tensor in on_host}

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        if id(first[0] if _is_list(first) else first) in self.on_host:
            return 1.0 if name == "_local_scalar_dense" else func(*args, **(kwargs or {}))
        if name == "_local_scalar_dense":
            self.counts.waits += 1
            self.counts.launches[name] += 1
            return 0.0
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.counts.launches[name] += self._launches(name, func, args, result)
        return result

    def _launches(self, name: str, func: Any, args: Any, result: Any) -> int:
        if name.startswith(("_foreach", "_fused", "_amp_foreach")):
            lists = [value for value in args if _is_list(value)]
            scalars = [value for value in lists if name.startswith("_fused") and value[0].numel() == 1]
            lists = [value for value in lists if not any(value is scalar for scalar in scalars)]
            if _is_list(result) and not name.endswith("_") and name != "_foreach_norm":
                lists.append(result)
            return launches_of_lists(lists, self.limits)
        if func.is_view or name in _FREE_NAMES or name.startswith(("empty", "new_empty")):
            return 0
        return math.ceil(len(args[0]) / _CAT_INPUTS) if name == "cat" else 1


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)


def count_step(
    arm: str | None,
    implementation: str = "foreach",
    *,
    arch: str = "resnet50",
    limits: Limits = LIMITS[4096],
    optimizer: str = "sgd",
) -> Counts:
    """Count the third step of an arm; without an arm, forward and backward alone.

    Every tensor says that it is on CUDA, as the engine decides by that; values are not known, so no step overflows.
    """
    told = torch.Tensor.is_cuda
    like_a_gpu = frozenset({"cpu"})
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            patch.object(device_skip, "_DEVICE_TYPES", like_a_gpu),
            patch.object(half, "_DEVICE_TYPES", like_a_gpu),
            patch.object(importlib.import_module("torch.optim.adam"), "_get_value", lambda count: 1.0),
        ):
            model = build_model(arch, num_classes=1000, sample_shape=(3, 64, 64))
            batch = torch.randn(2, 3, 64, 64)
            torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, misc]
            with patch.object(torch.nn.Module, "_apply", _apply_to_data):
                step, made = _step_of(model, batch, arm, implementation, optimizer)
            return _count(step, limits, made)
    finally:
        torch.Tensor.is_cuda = told  # type: ignore[misc]
        amp._amp_state.close()


def _step_of(
    model: torch.nn.Module, batch: Tensor, arm: str | None, implementation: str, name: str
) -> tuple[Callable[[], None], torch.optim.Optimizer | None]:
    if arm is None:
        return lambda: _bare_step(model, batch), None
    kind, _, skips = implementation.partition(", ")
    optimizer = OPTIMIZERS[name](model.parameters(), **{kind: True})
    if skips:
        make_step_skippable(optimizer)
    precision: Precision = make_precision(arm)
    (model,), (made,) = precision.prepare([model], [optimizer])

    def step() -> None:
        with precision.autocast():
            loss = model(batch).float().sum()
        precision.backward(loss, [made])
        precision.step(made)
        made.zero_grad()

    return step, made


def _bare_step(model: torch.nn.Module, batch: Tensor) -> None:
    model(batch).sum().backward()
    model.zero_grad()


def _apply_to_data(self: torch.nn.Module, convert: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """Be `Module._apply` for fake parameters, which torch cannot swap."""
    for module in self.modules():
        for param in module.parameters(recurse=False):
            param.data = convert(param.data)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, convert(buffer))
    return self


def _count(step: Callable[[], None], limits: Limits, optimizer: torch.optim.Optimizer | None) -> Counts:
    counts = Counts()
    for _ in range(3):  # the first two create state, and read what they created of it
        states = [] if optimizer is None else optimizer.state.values()
        steps = [state["step"] for state in states if "step" in state and state["step"].dim() == 0]
        on_host = steps if optimizer is not None and not optimizer.defaults.get("fused") else []
        ledger = _Ledger(limits, on_host)
        late: list[FlagCopyToHost] = []
        with ledger, patch.object(FlagCopyToHost, "receive", lambda self, late=late: bool(late.append(self))):
            step()
        counts = ledger.counts
        counts.late_reads = len(late)
    return counts


@click.command(help=__doc__)
@click.option("--arch", default="resnet50", show_default=True, help="A model of ampcompare.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="sgd", show_default=True)
@click.option(
    "--limits",
    type=click.Choice(["4096", "32768"]),
    default="4096",
    help="Bytes of kernel arguments.",
)
@click.option("--detail", is_flag=True, help="Print the kernels of each arm by operation, too.")
def main(arch: str, limits: str, optimizer: str, detail: bool) -> None:
    held = LIMITS[int(limits)]
    own = count_step(None, arch=arch, limits=held)
    click.echo(
        f"| arm | {optimizer} | launches in addition to the model's {own.total} | waits | late reads |"
    )
    click.echo("|---|---|---:|---:|---:|")
    for arm in ARMS:
        for implementation in IMPLEMENTATIONS:
            counts = count_step(arm, implementation, arch=arch, limits=held, optimizer=optimizer)
            row = (arm, implementation, counts.total - own.total, counts.waits, counts.late_reads)
            click.echo(f"| {' | '.join(map(str, row))} |")
            if detail:
                more = counts.launches.copy()
                more.subtract(own.launches)
                click.echo(f"    { {name: number for name, number in more.items() if number} }")


if __name__ == "__main__":
    main()
