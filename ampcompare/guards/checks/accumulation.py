"""Guard of gradient accumulation: a mean loss must be divided by the number of passes that add up.

Several backward passes before a step are not a mistake by themselves: GANs, several losses, penalties and truncated
sequences need them. What is reported is the same call, made more than once before a step in two updates, whose loss
ends in a mean that nothing divides, in a loop that continues past the step (`if i % 4 == 0: optimizer.step()`), or in
an inner loop whose head says what it is (`accum`, `micro`, `chunk`, `split`).
"""

from __future__ import annotations

import ast
import linecache
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any

from ampcompare.guards.detector import Detector, guard_of
from ampcompare.guards.location import Location, call_site, user_frames
from ampcompare.guards.script_state import first_with_gradient, parameters_of, will_skip
from ampcompare.source.lint.rules.update_order import SAYS_SO

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LossUndivided", "is_undivided_mean", "keeps_adding"]

UPDATES = 2
MAX_NODES = 64
PASSED = tuple(
    f"{name}Backward"
    for name in (
        "Alias",
        "Clone",
        "Expand",
        "Index",
        "ReshapeAlias",
        "Select",
        "Squeeze",
        "ToCopy",
        "Unsqueeze",
        "View",
    )
)
REDUCED_BY_MEAN = 1

Stack = list[tuple[CodeType, int]]


class LossUndivided(Detector):
    """Passes from one place that add up before a step, undivided."""

    guard = guard_of("loss-undivided")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Of this update: passes by call site; for repeated ones the stack, and whether all are undivided.
        self._passes: Counter[tuple[int, ...]] = Counter()
        self._again: dict[tuple[int, ...], tuple[Stack, bool]] = {}
        # Over all updates: how often a call site looked wrong; None once it turned out right.
        self._wrong: dict[tuple[int, ...], int | None] = {}
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._versions: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._clipped = False

    def backward(self, losses: Any, grad_outputs: Any) -> None:
        from torch import Tensor

        # In a block ampcompare's engine starts the pass from the loss scale instead of ones.
        weighted = grad_outputs is not None and not self.facts.blocks
        if self.facts.stepping or weighted or not isinstance(losses, Tensor):
            return
        site = call_site()
        self._passes[site] += 1
        if self._passes[site] > 1 and self._wrong.get(site, 0) is not None:
            so_far = self._again.get(site, ([], True))[1]
            scaled = self.facts.is_scaled(losses)
            self._again[site] = (user_frames(), so_far and is_undivided_mean(losses, skip_scale=scaled))

    def after_backward(self, losses: Any) -> None:
        if self._again and not self.facts.blocks:
            self._note_gradients()

    def after_block(self, optimizers: Any) -> None:
        if self._again:
            self._note_gradients()
        if any(map(will_skip, optimizers)):
            self._forget()  # no attempt ends this update: Apex replaces the step by its own function

    def zero_grad(self) -> None:
        self._forget()

    def clip(self, parameters: Any) -> None:
        self._clipped = True

    def attempt(self, optimizer: Any, scaler: Any) -> None:
        self._optimizers.add(optimizer)
        if not self._again:
            self._passes.clear()
            return
        again, untouched = dict(self._again), self._are_untouched(optimizer)
        self._forget()
        for site, (stack, undivided) in again.items():
            if not undivided or not untouched or not keeps_adding(stack, user_frames()):
                self._wrong[site] = None
                continue
            updates = self._wrong[site] = (self._wrong.get(site) or 0) + 1
            if updates == UPDATES:
                code, line = stack[0]
                self.report(
                    "several mean losses add up before a step without being divided by their number",
                    Location(code.co_filename, line),
                )

    def _forget(self) -> None:
        self._passes.clear()
        self._again.clear()
        self._versions.clear()
        self._clipped = False

    def _note_gradients(self) -> None:
        for optimizer in self._optimizers:
            parameter = first_with_gradient(parameters_of(optimizer))
            if parameter is not None and parameter.grad is not None:
                self._versions[optimizer] = (id(parameter.grad), parameter.grad._version)

    def _are_untouched(self, optimizer: Any) -> bool:
        """Return whether the gradients are unchanged since the passes, except by what is known not to divide them."""
        if self._clipped or optimizer in self.facts.unscaled or optimizer not in self._versions:
            return True
        parameter = first_with_gradient(parameters_of(optimizer))
        grad = None if parameter is None else parameter.grad
        return grad is not None and (id(grad), grad._version) == self._versions[optimizer]


def is_undivided_mean(loss: Tensor, *, skip_scale: bool = False) -> bool:
    """Return whether a loss is a mean, or a sum with a mean in it, that nothing divides.

    Its graph is followed from the end through sums, casts and weights up to the reductions. Any division counts as one,
    whatever the divisor, and so does a product with the reciprocal of a whole number.

    Args:
        skip_scale: the last node is the product with the loss scale.
    """
    node = loss.grad_fn
    if node is not None and skip_scale:
        node = node.next_functions[0][0]
    nodes, is_mean = [node], False
    for node in nodes:
        if node is None or len(nodes) > MAX_NODES:
            continue
        name = node.name()
        if name.startswith("Div"):
            return False
        if name.startswith("Mul"):
            factor = _factor(node)
            if factor is None or _is_reciprocal(factor):
                return False
        elif name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == REDUCED_BY_MEAN:
            is_mean = True
            continue
        elif not name.startswith(("AddBackward", "SubBackward", *PASSED)):
            continue
        nodes += [previous for previous, _ in node.next_functions]
    return is_mean


def _factor(node: Any) -> float | None:
    """Return the constant of a product, if reading it does not wait for a device."""
    from torch import Tensor
    from torch.utils._python_dispatch import _disable_current_modes

    for name in ("_saved_other", "_saved_self"):
        try:
            value = getattr(node, name, None)
        except RuntimeError:  # an earlier pass has freed it
            return None
        if isinstance(value, (int, float)):
            return float(value)
        if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" and not value.requires_grad:
            # A dispatch mode, such as the emulation of fp16, cannot take a tensor that stands for a plain number.
            with _disable_current_modes():
                return value.item()
    return None


def _is_reciprocal(factor: float) -> bool:
    inverse = 1 / factor if factor else 0.0
    return round(inverse) >= 2 and abs(inverse - round(inverse)) < 0.02


def keeps_adding(passes: Stack, step: Stack) -> bool:
    """Return whether the loop around a repeated pass accumulates: it continues past the step, or its head says so.

    Args:
        passes: the user's frames at the last pass, innermost first.
        step: those at the step.
    """
    for (code, pass_line), (other, step_line) in zip(reversed(passes), reversed(step), strict=False):
        if code is not other:
            return False
        if pass_line != step_line:
            heads = list(_loops_around(code.co_filename, pass_line, step_line))
            return not heads or any(SAYS_SO.search(head) for head in heads)
    return False


def _loops_around(file: str, line: int, outside: int) -> Iterator[str]:
    """Yield the heads of the loops of a file that contain `line` and not `outside`."""
    for node in _loops(file):
        last = node.end_lineno or node.lineno
        if node.lineno <= line <= last and not node.lineno <= outside <= last:
            yield ast.unparse(node.test if isinstance(node, ast.While) else node.iter)


@lru_cache(maxsize=32)
def _loops(file: str) -> list[ast.For | ast.While]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While))]
