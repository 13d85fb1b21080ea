"""Does the law of the state in `diagnose --ahead` hold? Small trainings, with the second moment rounded to bf16 or not.

    python benchmarks/ahead_state.py     # writes docs/benchmarks/ahead-state.json; a quarter of an hour on one core

The state that divides the steps, and nothing else, is rounded after each step. A training has failed if its mean loss
over the last tenth is more than 2 % above that of fp32. What the first tenth says is `PrefixWatch`'s mean error of the
step over the rest. What is in the file is not trained again.
"""

import json
import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import ahead
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

from ampcompare.diagnosis.prefix import PrefixWatch
from ampcompare.diagnosis.state_rounding import state_tensors_of

OUT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks" / "ahead-state.json"
LENGTHS = (300, 800, 2400)
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "AdamW": (lambda params: AdamW(params, 3e-3), "exp_avg_sq"),
    "Adam, beta2 0.99": (lambda params: Adam(params, 3e-3, betas=(0.9, 0.99)), "exp_avg_sq"),
    "Adamax": (lambda params: Adamax(params, 5e-3), "exp_inf"),
    "Adagrad": (lambda params: Adagrad(params, 3e-2), "sum"),
    "RMSprop": (lambda params: RMSprop(params, 1e-3), "square_avg"),
}


class Recurrent(nn.Module):
    """An LSTM and what its last output says."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def walks() -> ahead.Batch:
    """Return random walks, and a product of their sums."""
    generator = torch.Generator().manual_seed(100)
    x = torch.randn(400, 12, 3, generator=generator).cumsum(1) * 0.3
    return x, (x[:, :, 0] * x[:, :, 1]).sum(1, keepdim=True).tanh() + 0.3 * x[:, -1, 2:]


TASKS = {**ahead.TASKS, "sums of walks": (Recurrent, walks, F.mse_loss)}


def train(
    task: str, name: str, steps: int, until: int, *, rounds: bool = False, watch: PrefixWatch | None = None
) -> float:
    """Return the mean loss of the last tenth of a training, or of what is made of it."""
    make, data, loss_of = TASKS[task]
    torch.manual_seed(1)
    model = make()
    x, y = data()
    make_optimizer, state = OPTIMIZERS[name]
    optimizer = make_optimizer(model.parameters())
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    batches = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(until):
        index = torch.randint(len(x), (ahead.BATCH,), generator=batches)
        loss = loss_of(model(x[index]), y[index])
        if watch is not None:
            watch.see_loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rounds:
            for param in model.parameters():
                held = dict(state_tensors_of(optimizer, param))[state]
                held.copy_(held.bfloat16())
        losses.append(loss.item())
    return statistics.fmean(losses[-steps // 10 :])


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else []
    done = {(row["task"], row["optimizer"], row["steps"]) for row in rows}
    for steps in LENGTHS:
        for name in OPTIMIZERS:
            for task in TASKS:
                if (task, name, steps) in done:
                    continue
                with closing(PrefixWatch(steps // 10, total=steps)) as watch:
                    train(task, name, steps, steps // 10, watch=watch)
                error = watch.read_prefix().state_errors["bf16"]
                gap = train(task, name, steps, steps, rounds=True) / train(task, name, steps, steps) - 1
                rows.append(
                    {
                        "task": task,
                        "optimizer": name,
                        "steps": steps,
                        "error": error.largest_error,
                        "gap": gap,
                    }
                )
                OUT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                print(
                    f"{task}, {name}, {steps} steps: error {error.largest_error:.3f}, gap {100 * gap:+.1f} %"
                )


if __name__ == "__main__":
    main()
