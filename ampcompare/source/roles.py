"""What an object of a training script is, by what is assigned to it, or else by its name."""

from __future__ import annotations

import ast
import re

from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import dotted

__all__ = ["Roles"]

# Classes with another name, such as a scaler of Paddle or of the script itself, may work otherwise.
SCALERS = ("GradScaler", "ShardedGradScaler", "get_grad_scaler", "grad_scaler")
OPTIMIZER = re.compile(r"^(?:opt|optim|optimizer)(?:s|izers)?(?:_?[a-z0-9]{1,12})*$|(?:^|_)(?:opt|optim|optimizer)s?$")
SCHEDULER = re.compile(r"sched|^lr_|warmup|_lr$")
OTHER_FRAMEWORKS = ("paddle", "mindspore", "oneflow", "tensorflow", "mxnet", "jittor", "sklearn")


class Roles:
    """Roles of the objects of one module."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[tuple[str, Scope], str] = {}

    def of(self, node: ast.expr, scope: Scope) -> str:
        """Return `scaler`, `optimizer`, `scheduler`, or an empty text."""
        base = node.value if isinstance(node, ast.Subscript) else node
        text = dotted(base)
        if text is None:
            return ""
        key = (text, scope)
        if key not in self._known:
            self._known[key] = self._decide(text, scope)
        return self._known[key]

    def is_new_scaler(self, node: ast.expr, scope: Scope) -> bool:
        """Return whether an expression builds a GradScaler."""
        return isinstance(node, ast.Call) and self._made(node, scope) == "scaler"

    def is_new_optimizer(self, node: ast.expr, scope: Scope) -> bool:
        """Return whether an expression builds an optimizer of torch or Apex."""
        return isinstance(node, ast.Call) and self._made(node, scope) == "optimizer"

    def _decide(self, text: str, scope: Scope) -> str:
        last = text.rpartition(".")[2].strip("_").lower()
        values = self._module.values_of(text, scope) or []
        values = [value for value in values if not isinstance(value, (ast.Constant, ast.Starred))]
        made = {self._made(value, scope) for value in values if isinstance(value, ast.Call)}
        for role in ("scaler", "scheduler", "optimizer"):
            if role in made:
                return role
        if SCHEDULER.search(last):
            return "scheduler"
        if "scaler" in last:
            # A scaler of another kind, such as StandardScaler or timm's NativeScaler, works otherwise.
            return "" if made else "scaler"
        is_setting = last.startswith("optimization") or text.rpartition(".")[2].isupper()
        return "optimizer" if OPTIMIZER.search(last) and not is_setting else ""

    def _made(self, call: ast.Call, scope: Scope) -> str:
        name = self._module.resolve(call.func, scope) or dotted(call.func) or ""
        if name.startswith(OTHER_FRAMEWORKS):
            return "other"
        last = name.rpartition(".")[2]
        if last in SCALERS:
            return "scaler"
        if "lr_scheduler" in name or SCHEDULER.search(last.lower()) or last.endswith("LR"):
            return "scheduler"
        if name.startswith(("torch.optim.", "apex.optimizers.")) and ".swa_utils." not in name:
            return "optimizer"
        return "unknown"
