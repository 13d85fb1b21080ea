"""Functions of torch that a name, an attribute or a container keeps from before `amp.initialize`, without O1's casts.

O1 puts other functions in the place of those of `torch`, `torch.nn.functional` and `torch.Tensor`: what
`from torch.nn.functional import mse_loss`, `self.loss = F.mse_loss` or `getattr(F, name)` gave by then stays the one
without casts. Autocast casts a function whatever its name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ampcompare.source.amp_names import is_in_adapter_module
from ampcompare.source.migrate.read.cast_lists import CAST_BY_AUTOCAST
from ampcompare.source.module import ImportedName, Module, Scope
from ampcompare.source.syntax import (
    ForNode,
    FunctionNode,
    argument_values,
    dotted_name,
    last_name,
    last_part,
    walk,
)

BOUND_EARLY = (
    "{}: bound before amp.initialize where this runs above it, so that O1 does not cast under this name; autocast "
    "casts under any"
)
BOUND_EARLY_IN = "in {}, " + BOUND_EARLY.format("functions of torch")
PLACES = frozenset({"torch", "torch.nn.functional", "torch.functional", "torch.Tensor"})
OPERATORS = frozenset({"__matmul__", "__rmatmul__", "__pow__", "__rpow__"})  # of torch.Tensor
# Of other modules of torch, by what they call.
OF_OTHER_MODULES = frozenset({
    "torch.linalg.cond", "torch.linalg.matmul", "torch.linalg.matrix_norm", "torch.linalg.matrix_power",
    "torch.linalg.multi_dot", "torch.linalg.norm", "torch.linalg.pinv", "torch.linalg.vector_norm",
    "torch.special.expm1", "torch.special.log1p", "torch.special.log_softmax", "torch.special.logsumexp",
    "torch.special.softmax",
})  # fmt: skip
NAMES = CAST_BY_AUTOCAST | OPERATORS | {last_part(each) for each in OF_OTHER_MODULES}
NOT_IN_FUNCTIONAL = frozenset({"sum", "pow"})  # which are Python's below `from torch.nn.functional import *`
MAX_NAMES = 8  # through which a value is followed
# Calls that need a type, a device or no more than a description, and one that calls what it gets at once.
KEEPING_NOTHING = frozenset({
    "to", "type", "finfo", "iinfo", "set_default_dtype", "isinstance", "callable", "signature", "print", "checkpoint",
})  # fmt: skip
# Methods of dicts and lists that give what is in them, and attributes of a function that are called in its place.
GIVING = frozenset(
    {"items", "values", "get", "pop", "copy", "setdefault", "__getitem__", "__call__", "__get__"}
)
NEEDING_NO_VALUE = (
    ast.Compare, ast.Expr, ast.If, ast.While, ast.IfExp, ast.Assert, ast.UnaryOp, ast.FormattedValue,
)  # fmt: skip
OF_LOSSES = frozenset({"scale_loss", "step", "master_params"})  # get an optimizer, and initialize nothing


def find_early_bindings_of_torch(module: Module) -> dict[ast.AST, str]:
    """Return the statements and expressions that may bind functions of torch, which autocast casts, before O1 casts.

    With the names of these. Left out is what is called where it stands, what a function surely keeps no longer than
    its call, and what surely runs below `amp.initialize`.
    """
    found: dict[ast.AST, list[str]] = {}
    uses = _UsesOfFunctionValues(module)
    for statement, name in _imports_binding_early(module, uses):
        found.setdefault(statement, []).append(name)
    for node, name in (*_named_functions(module), *_looked_up_functions(module)):
        if not uses.runs_below_initialize(node) and not uses.is_kept_by_nothing(node):
            found.setdefault(node, []).append(name)
    return {node: ", ".join(dict.fromkeys(names)) for node, names in found.items()}


def has_early_bindings_of_torch(module: Module) -> bool:
    """Return whether a module may bind a function of torch before O1 casts."""
    return bool(find_early_bindings_of_torch(module))


def _name_cast_by_autocast(full_name: str) -> bool:
    head, _, name = full_name.rpartition(".")
    if full_name in OF_OTHER_MODULES:
        return True
    return head in PLACES and (name in CAST_BY_AUTOCAST or (head == "torch.Tensor" and name in OPERATORS))


# What gives a function.


def _imports_binding_early(module: Module, uses: _UsesOfFunctionValues) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the imports that bind functions before O1 casts, each with the name of one."""
    for imported in module.imports:
        statement, alias, full = imported
        if last_part(full) == "*":
            names = _names_used_of_star(module, imported)
        else:
            names = [alias.name] if _name_cast_by_autocast(full) else []
        if not names or uses.runs_below_initialize(statement):
            continue
        scope = module.scope_of[statement]
        if alias.name == "*" or not uses.is_name_kept_by_nothing(alias.asname or alias.name, scope):
            yield from ((statement, name) for name in names)


def _names_used_of_star(module: Module, imported_name: ImportedName) -> list[str]:
    """Return the functions that a module uses of an import of all names."""
    place = imported_name.full.removesuffix(".*")
    if place not in PLACES:
        return []
    without = NOT_IN_FUNCTIONAL if place != "torch" else frozenset()
    used = {
        node.id: None
        for node in module.nodes
        if isinstance(node, ast.Name)
        and node.id in CAST_BY_AUTOCAST - without
        and not any(
            node.id in names
            for scope in module.scope_of[node].lookup_scopes()
            for names in (scope.values, scope.parameters, scope.functions, scope.imports)
        )
    }
    return list(used)


def _named_functions(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the functions that are named by attributes, as values."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in NAMES and isinstance(node.ctx, ast.Load):
            outer = module.parent(node)
            if isinstance(outer, ast.Call) and outer.func is node:
                continue  # before its name is looked up
            if _name_cast_by_autocast(f"{_full_name_of_module(module, node.value)}.{node.attr}"):
                yield node, node.attr


def _full_name_of_module(module: Module, node: ast.expr) -> str:
    """Return the full name of an expression that gives a module or class: by imports, or as text; "" for any other."""
    text: ast.expr | None = None
    if isinstance(node, ast.Call) and last_name(node.func) in ("import_module", "__import__") and node.args:
        text = node.args[0]
    elif isinstance(node, ast.Subscript) and last_name(node.value) == "modules":
        text = node.slice
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return text.value
    return module.resolve(node) or ""


def _looked_up_functions(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield the functions that are looked up by a text: by `getattr`, `vars`, `__dict__`, `attrgetter` or `eval`."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "__dict__":
            yield from _functions_of_dict(module, node, node.value)
        elif isinstance(node, ast.Call) and node.args:
            name, first = last_name(node.func), node.args[0]
            if name in ("vars", "getmembers"):
                yield from _functions_of_dict(module, node, first)
            elif name == "getattr" and len(node.args) > 1:
                yield from _functions_by_key(module, node, first, node.args[1])
            elif name == "eval":
                yield from _evaluated_functions(module, node, first)
            elif isinstance(node.func, ast.Call) and last_name(node.func.func) == "attrgetter":
                base = _full_name_of_module(module, first)
                texts = [str(each.value) for each in node.func.args if isinstance(each, ast.Constant)]
                yield from (
                    (node, last_part(each)) for each in texts if _name_cast_by_autocast(f"{base}.{each}")
                )


def _functions_of_dict(module: Module, node: ast.expr, base: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield what is taken of all that a module has: one by its key, or any."""
    outer = module.parent(node)
    around = module.parent(outer)
    if isinstance(outer, ast.Subscript) and outer.value is node:
        yield from _functions_by_key(module, outer, base, outer.slice)
    elif isinstance(outer, ast.Attribute) and isinstance(around, ast.Call) and around.args:
        yield from _functions_by_key(module, around, base, around.args[0])
    else:
        yield from _functions_by_key(module, node, base, None)


def _functions_by_key(
    module: Module, node: ast.expr, base: ast.expr, key: ast.expr | None
) -> Iterator[tuple[ast.expr, str]]:
    """Yield what a lookup in a module may give: the functions that the key surely names, or the lookup as text."""
    place = _full_name_of_module(module, base)
    if place not in PLACES or _gives_dtype(module, node, key):
        return
    keys = None if key is None else _possible_string_values(module, key)
    if keys is not None:
        yield from ((node, each) for each in keys if _name_cast_by_autocast(f"{place}.{each}"))
    elif _may_name_function(place, key):
        yield node, f"a function from {' '.join(module.source(node).split())}"


def _gives_dtype(module: Module, node: ast.expr, key: ast.expr | None) -> bool:
    """Return whether the names around a lookup say that it gives a `torch.dtype`, as `getattr(torch, args.dtype)`."""
    outer = module.parent(node)
    given = outer.arg or "" if isinstance(outer, ast.keyword) else ""
    targets = outer.targets if isinstance(outer, ast.Assign) else []
    names = [given, *map(last_name, targets), "" if key is None else last_name(key)]
    return any(each.endswith("dtype") for each in names)


def _possible_string_values(module: Module, key: ast.expr) -> list[str] | None:
    """Return the texts that a key may be, if all of them are written in the module."""
    values = [key]
    name = dotted_name(key)
    if name is not None:
        if any(name in scope.globals for scope in module.scopes):
            return None
        values = module.values_of(name, module.scope_of[key]) or values
    elif isinstance(key, ast.IfExp):
        values = [key.body, key.orelse]
    texts = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return texts if len(texts) == len(values) else None


def _may_name_function(place: str, key: ast.expr | None) -> bool:
    """Return whether a text may name a function that autocast casts, by the text that it surely begins with."""
    start = ""
    first = key.values[0] if isinstance(key, ast.JoinedStr) and key.values else key
    while isinstance(first, ast.BinOp) and isinstance(first.op, ast.Add):
        first = first.left
    if isinstance(first, ast.Constant):
        start = str(first.value)
    return any(name.startswith(start) and _name_cast_by_autocast(f"{place}.{name}") for name in NAMES)


def _evaluated_functions(module: Module, node: ast.Call, text: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    """Yield the functions that `eval` gives of a text, as `eval("F.softplus")` or `eval("F." + name)`."""
    first = text.values[0] if isinstance(text, ast.JoinedStr) and text.values else text
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        first = text.left
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return
    head, _, name = first.value.rpartition(".")
    try:
        base = ast.parse(head, mode="eval").body
    except (SyntaxError, ValueError):
        return
    place = module.resolve(base, module.scope_of[node]) or ""
    if first is not text and place in PLACES:
        yield node, f"a function from {' '.join(module.source(node).split())}"
    elif first is text and _name_cast_by_autocast(f"{place}.{name}"):
        yield node, name


# What becomes of it.


class _UsesOfFunctionValues:
    """What a module does with functions as values, and where it calls `amp.initialize`."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._initializes = [call for call in module.calls if _is_initialize(module, call)]
        leading = self._names_leading_to_initialize()
        self._leading = {call for call in module.calls if last_name(call.func) in leading}

    def _names_leading_to_initialize(self) -> set[str]:
        """Return the names of functions and classes of the module that may call `amp.initialize`, through others."""
        module, names = self._module, {"initialize"}
        calls = [(each, last_name(each.func)) for each in module.calls] if "initialize" in module.text else []
        known = 0
        while known != len(names):
            known = len(names)
            for call, name in calls:
                if name in names or call in self._initializes:
                    for function in module.functions_around(call):
                        home = module.class_of(function)
                        names.add(home.name if home and function.name == "__init__" else function.name)
        return names

    def runs_below_initialize(self, node: ast.AST) -> bool:
        """Return whether a node surely runs behind `amp.initialize`: below it, in its function or in the script."""
        module = self._module
        for call in self._initializes:
            function = module.function_around(call)
            if (call.end_lineno or 0) < node.lineno and (  # type: ignore[attr-defined]
                function is None or function in module.functions_around(node)
            ):
                return True
        return False

    def is_kept_by_nothing(self, node: ast.AST, num_followed: int = 0, *, in_container: bool = False) -> bool:
        """Return whether a value is called or compared where it stands, or surely kept no longer than a call lasts.

        Args:
            num_followed: how many names led to it.
            in_container: whether it is a container that holds the value.
        """
        module = self._module
        below, outer = node, module.parent(node)
        while _passes_value_on(outer, below):
            in_container |= isinstance(outer, (ast.Tuple, ast.List, ast.Set, ast.Dict))
            in_container &= not isinstance(outer, ast.Subscript)
            if isinstance(outer, ast.NamedExpr) and not self._is_target_kept_by_nothing(
                outer.target, num_followed, in_container
            ):
                return False
            below, outer = outer, module.parent(outer)
        if isinstance(outer, ast.Call):
            if outer.func is below or last_name(outer.func) in KEEPING_NOTHING:
                return True
            function = module.function_around(outer)  # which runs in every step, and surely in those with O1
            return (
                function is not None and function.name == "forward" and module.class_of(function) is not None
            )
        if isinstance(outer, ast.Attribute):
            return not in_container and outer.attr not in GIVING
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1:
            return self._is_target_kept_by_nothing(outer.targets[0], num_followed, in_container)
        if isinstance(outer, ForNode | ast.comprehension) and outer.iter is below:
            return self._is_target_kept_by_nothing(outer.target, num_followed, False)
        return isinstance(outer, NEEDING_NO_VALUE)

    def _is_target_kept_by_nothing(self, target: ast.expr, num_followed: int, in_container: bool) -> bool:
        return isinstance(target, ast.Name) and self.is_name_kept_by_nothing(
            target.id, self._module.scope_of[target], num_followed, in_container=in_container
        )

    def is_name_kept_by_nothing(
        self, name: str, scope: Scope, num_followed: int = 0, *, in_container: bool = False
    ) -> bool:
        """Return whether a name is one of a function that surely initializes nothing, where nothing keeps its value."""
        function = scope.node
        if num_followed > MAX_NAMES or not isinstance(function, FunctionNode):
            return False
        for node in walk(function):
            if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
                return False
            if isinstance(node, ast.Call) and self._may_initialize(node):
                return False
            if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
                if self._module.scope_of[node] is not scope:
                    return False
                if not self.is_kept_by_nothing(node, num_followed + 1, in_container=in_container):
                    return False
        return True

    def _may_initialize(self, call: ast.Call) -> bool:
        """Return whether a call may lead to `amp.initialize`, in this file or by what gets an optimizer."""
        if call in self._leading or call in self._initializes:
            return True
        if last_name(call.func) in OF_LOSSES or (self._module.resolve(call.func) or "").startswith("torch."):
            return False
        return any("optim" in last_name(each) for each in argument_values(call))


def _is_initialize(module: Module, call: ast.Call) -> bool:
    full = module.resolve(call.func) or ""
    return full == "apex.amp.initialize" or (
        is_in_adapter_module(full.rpartition(".")[0]) and last_part(full) == "initialize"
    )


def _passes_value_on(outer: ast.AST, inner_node: ast.AST) -> bool:
    """Return whether an expression gives, or holds, the value of one in it."""
    if isinstance(outer, ast.IfExp):
        return inner_node is not outer.test
    if isinstance(outer, ast.Subscript):
        return inner_node is outer.value
    if isinstance(outer, ast.Call):
        return last_name(outer.func) == "partial" and inner_node is not outer.func
    kinds = (ast.BoolOp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.keyword, ast.NamedExpr)
    return isinstance(outer, kinds)
