"""Names of torch's functions that a module binds before `amp.initialize`, under which O1 does not cast them.

O1 puts other functions in the place of those of `torch` and `torch.nn.functional`: what
`from torch.nn.functional import mse_loss` has bound by then stays the one without casts. Autocast casts a function
whatever its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.module import Module

BOUND_EARLY = "{}: bound before amp.initialize, so O1 does not cast under this name; autocast casts under any"
PLACES = ("torch.nn.functional.", "torch.")
# What autocast casts on CUDA, of torch and torch.nn.functional (https://docs.pytorch.org/docs/stable/amp.html).
CAST_BY_AUTOCAST = frozenset({
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm", "mv", "prelu", "einsum",
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cdist", "cosine_similarity",
    "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss",
    "kl_div", "l1_loss", "layer_norm", "log", "log_softmax", "log10", "log1p", "log2", "margin_ranking_loss",
    "mse_loss", "multilabel_margin_loss", "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist",
    "poisson_nll_loss", "pow", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax",
    "softmin", "softplus", "sum", "renorm", "tan", "triplet_margin_loss", "scaled_dot_product_attention",
})  # fmt: skip


def find_early_names(module: Module) -> dict[ast.AST, str]:
    """Return the statements and expressions that bind functions of torch which autocast casts, with their names.

    Those of imports at the top, and those of a function as a value, where the module is imported or a constructor
    runs.
    """
    found: dict[ast.AST, list[str]] = {}
    for node, name in _early_bindings(module):
        found.setdefault(node, []).append(name)
    return {node: ", ".join(names) for node, names in found.items()}


def _early_bindings(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for statement, alias, full in module.imports:
        if _name_cast_by_autocast(full) and _is_evaluated_early(module, statement):
            yield statement, alias.name
    for node in module.nodes:
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        outer = module.parent(node)
        is_called = isinstance(outer, ast.Call) and outer.func is node
        name = "" if is_called or node.attr not in CAST_BY_AUTOCAST else module.resolve(node, follow=False)
        if name and _name_cast_by_autocast(name) and _is_evaluated_early(module, node):
            yield node, node.attr


def _is_evaluated_early(module: Module, node: ast.AST) -> bool:
    """Return whether a node runs where its module is imported, or in a constructor."""
    below = node
    for outer in module.ancestors(node):
        if isinstance(outer, ast.Lambda):
            return False
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)) and below in outer.body:
            return outer.name == "__init__" and not isinstance(node, ast.stmt)
        below = outer
    return True


def has_early_names(module: Module) -> bool:
    """Return whether a module binds a function of torch early."""
    return any(True for _ in _early_bindings(module))


def _name_cast_by_autocast(full: str) -> bool:
    head, _, name = full.rpartition(".")
    return f"{head}." in PLACES and name in CAST_BY_AUTOCAST
