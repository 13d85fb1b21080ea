"""`LARC` of Apex as hooks around the step of an optimizer, in a function that the module gets."""

from __future__ import annotations

import ast

from ampcompare.migrate.edits import Edits
from ampcompare.migrate.read.sites import Unsure
from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["rewrite_larc", "uses_larc"]

NAME = "larc"
# It has the parameters of the class, so that calls stay as they are.
FUNCTION = '''\
def larc(optimizer, trust_coefficient=0.02, clip=True, eps=1e-8):
    """Scale each gradient by the norm of its weight over its own before an optimizer steps, as LARC of Apex did."""
    decays = []

    @{torch}.no_grad()
    def adapt(optimizer, *_):
        decays[:] = [group.get("weight_decay", 0) for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, decays):
            group["weight_decay"] = 0
            for param in group["params"]:
                if param.grad is None:
                    continue
                weight, grad = param.norm(), param.grad.norm()
                if weight != 0 and grad != 0:
                    rate = trust_coefficient * weight / (grad + weight * decay + eps)
                    if clip:
                        rate = {torch}.clamp(rate / group["lr"], max=1)
                    param.grad.add_(param, alpha=decay).mul_(rate)

    def restore(optimizer, *_):
        for group, decay in zip(optimizer.param_groups, decays):
            group["weight_decay"] = decay

    optimizer.register_step_pre_hook(adapt)
    optimizer.register_step_post_hook(restore)
    return optimizer
'''


def uses_larc(meanings: list[str]) -> bool:
    """Return whether LARC is among the full names that a module uses: its hooks need gradients that are unscaled.

    Optimizers with `fused=True` unscale inside their step, after such hooks.
    """
    return any(each.startswith("apex.parallel.LARC") for each in meanings)


def rewrite_larc(tree: Tree, edits: Edits, torch: str, node: ast.Name | ast.Attribute) -> None:
    """Replace the class in a call by the function, which the first call brings along.

    Args:
        torch: the name by which the module knows torch.

    Raises:
        Unsure: the class is not called, or the module has another use for the name of the function.
    """
    call = tree.parent(node)
    if not isinstance(call, ast.Call) or call.func is not node:
        raise Unsure(node, "LARC is passed as a value; torch has no class of that kind")
    if any(getattr(each, "id", getattr(each, "name", None)) == NAME for each in tree.nodes):
        raise Unsure(node, f"LARC becomes a function {NAME}, but the module has something else of that name")
    if any(isinstance(each, ast.keyword) and each.arg == "fused" for each in tree.nodes):
        raise Unsure(node, "LARC scales gradients before the step, and a fused optimizer unscales them in it")
    edits.replace(node, NAME)
    if NAME + "(optimizer, trust" not in edits.inserted():
        statement: ast.AST = tree.statement(node)
        while not isinstance(tree.parent(statement), ast.Module):
            statement = tree.parent(statement)
        unit = tree.unit
        lines = FUNCTION.format(torch=torch).replace("    ", unit).splitlines()
        edits.before(statement, [*lines, "", ""])  # type: ignore[arg-type]
    statement = tree.statement(call)
    key = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    for each in tree.nodes:  # the optimizer inside is the optimizer itself now
        if isinstance(each, ast.Attribute) and each.attr == "optim" and key is not None and dotted(each.value) == key:
            edits.replace(each, key)
