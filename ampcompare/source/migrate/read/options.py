"""Look up the dict that a call gets as `**options`."""

import ast

from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.module import Module
from ampcompare.source.syntax import HIDDEN, arguments, last_name

UNSEEN = ast.Constant(...)  # stands for a value that only some runs give
# Options that torch.amp has nothing for, so that it does not matter whether a run gives them.
WITHOUT_TWIN = frozenset({"keep_batchnorm_fp32", "master_weights", "verbosity"})
FUNCTIONS = {"bool", "hasattr", "isinstance", "callable"}


def find_dict_entries(
    module: Module, options: ast.expr, optional: frozenset[str]
) -> dict[str, ast.expr] | None:
    """Return the entries of a dict that one statement above makes; None if something else may change it.

    What it holds is evaluated there and used at the call, so a name in it must not be bound again in between. Of
    `optional` keys that may also be set in between the value is `UNSEEN`.
    """
    if isinstance(options, (ast.Dict, ast.Call)):
        return _find_literal_entries(options)
    if not isinstance(options, ast.Name):
        return None
    scope = module.function_around(options) or module.tree
    found: dict[str, ast.expr] | None = None
    later: set[str] = set()
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or node.id != options.id or node is options:
            continue
        parent = module.parent(node)
        if isinstance(parent, ast.Assign) and parent.targets == [node] and found is None:
            found = _find_literal_entries(parent.value)
            is_above = parent.lineno < options.lineno and module.is_in_statements(
                options, module.block_of(parent)
            )
            if found is None or not is_above or _is_read_name_rebound(scope, parent, options):
                return None
        elif isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store) and parent.value is node:
            key = parent.slice.value if isinstance(parent.slice, ast.Constant) else None
            if key not in optional or not isinstance(module.parent(parent), ast.Assign):
                return None
            later.add(str(key))
        else:
            return None
    return None if found is None else found | dict.fromkeys(later, UNSEEN)


def _find_literal_entries(value: ast.expr) -> dict[str, ast.expr] | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
        given = arguments(value)
        return None if value.args or given.keys() & HIDDEN else given
    if not isinstance(value, ast.Dict):
        return None
    keys = [
        each.value for each in value.keys if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    return dict(zip(keys, value.values, strict=True)) if len(keys) == len(value.keys) else None


def _is_read_name_rebound(scope: ast.AST, statement: ast.Assign, use: ast.expr) -> bool:
    """Return whether a name that the value of a statement reads gets another value before the use."""
    read = {each.id for each in ast.walk(statement.value) if isinstance(each, ast.Name)}
    return any(
        isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Store)
        and each.id in read
        and statement.lineno < each.lineno < use.lineno
        for each in ast.walk(scope)
    )


def bind_arguments_by_name(
    call: ast.Call, names: tuple[str, ...], module: Module | None = None
) -> dict[str, ast.expr]:
    """Return the arguments of a call by name.

    Args:
        module: to look up the dict of `**options` in; without it such a call is refused.
    """
    bound = arguments(call, names)
    spread = bound.pop("**", None)
    options: dict[str, ast.expr] | None = {}
    if spread is not None:
        single = sum(each.arg is None for each in call.keywords) == 1
        options = find_dict_entries(module, spread, WITHOUT_TWIN) if module and single else None
    if "*" in bound or options is None:
        raise UnsureRewrite(
            call, "its arguments are passed as * or **, so they cannot be seen here; write them out"
        )
    bound |= options
    unknown = next((name for name in bound if name not in names), None)
    if unknown is not None:
        raise UnsureRewrite(call, f"Apex has no argument {unknown}")
    return bound


def expression_as_bool(module: Module, text: str) -> str:
    """Return an expression with `bool(...)` around it, unless it is one already."""
    return (
        text
        if _is_boolean_expression(ast.parse(text, mode="eval").body, _boolean_names(module))
        else f"bool({text})"
    )


def _is_boolean_expression(node: ast.expr, flags: set[str]) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    if isinstance(node, ast.BoolOp):
        return all(_is_boolean_expression(each, flags) for each in node.values)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
    if isinstance(node, (ast.Name, ast.Attribute)):
        return (node.attr if isinstance(node, ast.Attribute) else node.id) in flags
    return isinstance(node, ast.Compare) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


def _boolean_names(module: Module) -> set[str]:
    """Return names that the file makes boolean: options with `store_true`, annotations, assignments."""
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Call) and last_name(node.func) == "add_argument":
            given = arguments(node)
            action = given.get("action")
            if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
                names = [
                    each.value for each in (*node.args, given.get("dest")) if isinstance(each, ast.Constant)
                ]
                found |= {str(name).lstrip("-").replace("-", "_") for name in names}
        elif isinstance(node, ast.arg | ast.AnnAssign):
            if isinstance(node.annotation, ast.Name) and node.annotation.id == "bool":
                target = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
                found.add(str(target))
    return found
