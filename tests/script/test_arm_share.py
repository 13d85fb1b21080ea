"""On which steps of a script the arm acted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ampcompare.script.arm_share import Acted


class Rows:
    """A recorder that holds its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ends: list[Callable[[], None]] = []

    def after_row(self, function: Callable[[dict[str, Any]], None]) -> None:
        self.listener = function

    def before_close(self, function: Callable[[], None]) -> None:
        self.ends.append(function)

    def add_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)


def counted(train: Callable[[Acted, Callable[[torch.Tensor], None]], None], *, casts: bool = True) -> Any:
    rows = Rows()
    acted = Acted(rows, casts=casts)  # type: ignore[arg-type]

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        rows.listener({"kind": "plain_backward", "loss": loss})
        for optimizer in range(2):
            rows.listener({"kind": "step", "optimizer": optimizer})

    train(acted, step)
    rows.ends[0]()
    return rows.rows[0]["steps"], rows.rows[0]["without"]


def test_a_step_is_by_the_arm_where_gradients_passed_its_casts() -> None:
    """A pass that was repeated without casts is not, a part or an evaluation without casts is; fp32 casts nothing."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)

    def falls_back(acted: Acted, step: Any) -> None:
        acted.forward(model(x), cast=True)
        plain = model(x)
        acted.forward(plain, cast=False)
        step(plain.sum())

    def in_part(acted: Acted, step: Any) -> None:
        body = model(x)
        acted.forward({"logits": body}, cast=True)
        head = model(body)
        acted.forward(head, cast=False)
        step(head.sum())
        acted.forward(model(x), cast=False)  # an evaluation that keeps its graph
        in_cast = model(x)
        acted.forward(in_cast, cast=True)
        step(in_cast.sum())

    def in_an_object(acted: Acted, step: Any) -> None:
        acted.forward(object(), cast=True)
        step(model(x).sum())

    def without_modules(acted: Acted, step: Any) -> None:
        step((model.weight * 2).sum())

    assert counted(falls_back) == (2, 2)
    assert counted(in_part) == (4, 0)
    assert counted(in_an_object) == (2, 0)
    assert counted(without_modules) == (2, 0)
    assert counted(falls_back, casts=False) == (2, None)


def test_a_step_past_the_loss_scaler_counts_as_without_the_arm() -> None:
    """A script that switches its autocast and GradScaler off half way has no row for what it steps from then on."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def switches_off(acted: Acted, step: Any) -> None:
        for number in range(4):
            output = model(x)
            acted.forward(output, cast=number < 1)
            if number < 1:
                step(output.sum())
            else:
                output.sum().backward()
            optimizer.step()

    def has_rows(acted: Acted, step: Any) -> None:
        for _ in range(2):
            output = model(x)
            acted.forward(output, cast=True)
            output.sum().backward()
            optimizer.step()
            step(model(x).sum())

    assert counted(switches_off) == (2 + 3, 3)
    assert counted(has_rows)[1] == 0
    assert not _global_optimizer_pre_hooks
