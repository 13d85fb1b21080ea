"""What the adapter of `migrate` costs on the host at O1, as a ratio to the same loop on torch.autocast and GradScaler.

    python benchmarks/adapter.py [--processes 3] [--models deep,attention,convolutions] [--out docs/benchmarks/adapter]

Each process holds three loops of one model: torch.autocast and GradScaler written by hand, the same again (A/A, the
noise floor), and the loop of a script for Apex on the adapter. They take turns in blocks of steps, in random order, on
the CPU clock of the process with one thread; a ratio is taken within a round, and shown is the median of the
processes' medians, with the range over processes. What the adapter puts in the place of functions of torch is there
while its own loop runs. Calls of functions of a step are exact counts, more than by hand.

O1 needs CUDA. Here autocast of the CPU, in fp16, has the name of that of CUDA, so that both loops are cast by one list
and computed by the CPU; SGD runs by `foreach`, as on CUDA. All layers are so small that a step is little else than
overhead: this is what Python adds where a GPU waits for it, not what a training that keeps a GPU busy loses.
"""

import itertools
import statistics
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from bare import autocast_fp16, legacy
from counts import count_calls
from harness import make_table, median_ratio, take_turns, turns_command
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import Workload, deep

from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import adapter_text

BLOCK = 10
ROUNDS = 30
GOAL = 1.3
NAMES = ("plain", "a/a", "adapter")
Block = Callable[[], None]


class Attention(nn.Module):
    """A block of a transformer of width 16 with one head, as scripts write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_one, self.norm_two = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(16, width) if width != 0 else nn.Linear(32, 16) for width in (48, 16, 32, 0)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_one(x)).chunk(3, -1)
        weights = F.softmax(torch.matmul(q, k.transpose(-2, -1)) / 4, dim=-1)
        x = x + self.out(torch.matmul(weights, v))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_two(x))))
        return result


class Residual(nn.Module):
    """A convolution of four channels with batch norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def attention() -> Workload:
    """Six blocks of a transformer on 4 sequences of 4."""
    layers = [Attention() for _ in range(6)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))
    return model, torch.randn(4, 4, 16), torch.randint(0, 10, (4,))


def convolutions() -> Workload:
    """Twelve convolutions on 2 images of 4 x 4."""
    layers = [Residual() for _ in range(12)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))
    return model, torch.randn(2, 4, 4, 4), torch.randint(0, 10, (2,))


WORKLOADS = {"deep": deep, "attention": attention, "convolutions": convolutions}


class _CpuAutocast(torch.autocast):
    """Autocast of the CPU by the name of that of CUDA."""

    def __init__(self, device_type: str, *arguments: Any, **options: Any) -> None:
        super().__init__("cpu", *arguments, **options)


class _Adapter:
    """The adapter at work, in this process, whose functions can be taken out of torch and put back."""

    def __init__(self) -> None:
        torch.autocast = _CpuAutocast  # type: ignore[misc]
        torch.set_autocast_enabled = _set_enabled_for_cpu_and_cuda  # type: ignore[assignment]
        self.module: Any = types.ModuleType(ADAPTER)
        sys.modules[ADAPTER] = self.module
        exec(compile(adapter_text(), ADAPTER, "exec"), self.module.__dict__)
        self._owners = [*dict.fromkeys(each for each, _, _ in self.module._CASTS), torch.autocast]
        self._own: list[tuple[Any, str, Any]] = []
        self._others: list[tuple[Any, str, Any]] = []

    def start(self, make_step: Callable[[], Block]) -> Block:
        """Return a step at O1, which `make_step` initializes."""
        before = [dict(vars(each)) for each in self._owners]
        make, available = torch.empty, torch.cuda.is_available
        torch.empty = lambda *sizes, device=None, **options: make(*sizes, **options)
        torch.cuda.is_available = lambda: True
        step = make_step()
        torch.empty, torch.cuda.is_available = make, available
        for owner, old in zip(self._owners, before, strict=True):
            changed = [(name, each) for name, each in vars(owner).items() if old.get(name) is not each]
            self._own += [(owner, name, each) for name, each in changed]
            self._others += [(owner, name, old.get(name)) for name, _ in changed]
        self._leave()
        return step

    def choose(self, name: str) -> None:
        """Put the adapter's functions into torch, or take them out, as the loop of a name needs it."""
        if name == "adapter":
            for owner, key, value in self._own:
                setattr(owner, key, value)
            self.module._casts.blocks.block.__enter__()
        else:
            self._leave()

    def _leave(self) -> None:
        if torch.is_autocast_enabled():
            self.module._casts.blocks.block.__exit__(None, None, None)
        for owner, key, value in self._others:
            if value is not None:
                setattr(owner, key, value)
            elif key in vars(owner):
                delattr(owner, key)


_set_enabled = torch.set_autocast_enabled


def _set_enabled_for_cpu_and_cuda(device_type: str, enabled: bool) -> None:
    """Let what asks for CUDA get the state of the CPU."""
    _set_enabled("cpu", enabled)
    _set_enabled("cuda", enabled)


def _sgd(params: Iterable[nn.Parameter], *, fused: bool = False) -> torch.optim.SGD:
    """SGD by `foreach`, as torch takes it on CUDA."""
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=1e-4, foreach=True)


def _data(model_name: str) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model, x, y = WORKLOADS[model_name]()
    return model, itertools.repeat((x, y))


def _repeat(step: Block) -> Block:
    def block() -> None:
        for _ in range(BLOCK):
            step()

    return block


def measure(arm: str, model_name: str, seed: int) -> dict[str, Any]:
    """Time the three loops in this process; return the medians of the paired ratios, and exact counts."""
    adapter = _Adapter()
    adapted = adapter.start(lambda: legacy(*_data(model_name), amp=adapter.module, opt_level=arm, make=_sgd))
    blocks = {name: _repeat(autocast_fp16(*_data(model_name), make=_sgd)) for name in NAMES[:2]}
    blocks["adapter"] = _repeat(adapted)
    for name, block in blocks.items():
        adapter.choose(name)
        for _ in range(3):
            block()
    seconds = take_turns(blocks, ROUNDS, seed, steps=BLOCK, before=adapter.choose)
    calls = {}
    for name, block in blocks.items():
        adapter.choose(name)
        calls[name] = count_calls(block) / BLOCK
    return {
        "plain_microseconds": statistics.median(seconds["plain"]) * 1e6,
        "ratios": {name: median_ratio(seconds, name, "plain") for name in NAMES[1:]},
        "calls": calls,
    }


def table(data: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    headers = [
        "model",
        "level",
        "us, by hand",
        "a/a",
        f"adapter, goal {GOAL}",
        "calls, by hand",
        "more calls",
    ]
    return make_table([_row(row) for row in data], headers)


def _row(row: dict[str, Any]) -> list[str]:
    processes = row["processes"]
    shown = [f"{statistics.median(process['plain_microseconds'] for process in processes):.0f}"]
    for name in NAMES[1:]:
        medians = [process["ratios"][name] for process in processes]
        shown.append(f"{statistics.median(medians):.3f} ({min(medians):.3f}-{max(medians):.3f})")
    calls = processes[0]["calls"]
    return [
        row["model"],
        row["arm"],
        *shown,
        f"{calls['plain']:.0f}",
        f"{calls['adapter'] - calls['plain']:+.0f}",
    ]


if __name__ == "__main__":
    turns_command(
        __file__,
        "What the adapter costs on the host",
        __doc__,
        measure,
        table,
        models=",".join(WORKLOADS),
        arms="O1",
        processes=3,
    )()
