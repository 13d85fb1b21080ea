"""What names mean in a module: imports, assignments and parameters of each scope."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampcompare.source.syntax import dotted

__all__ = ["Function", "ModuleNames", "Scope", "flat_values"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
MAX_ALIASES = 8
LEAVES = frozenset({ast.Name, ast.Constant, ast.Load, ast.Store, ast.Del, ast.alias})
BINDING = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem)
# Modules that hold what another one shows.
SHOWN_AS = {
    "torch.cuda.amp.autocast_mode.": "torch.cuda.amp.",
    "torch.cuda.amp.grad_scaler.": "torch.cuda.amp.",
    "torch.cpu.amp.autocast_mode.": "torch.cpu.amp.",
    "torch.cpu.amp.grad_scaler.": "torch.cpu.amp.",
    "torch.amp.autocast_mode.": "torch.amp.",
    "torch.amp.grad_scaler.": "torch.amp.",
    "torch.nn.utils.clip_grad.": "torch.nn.utils.",
    "apex.amp.frontend.": "apex.amp.",
    "apex.amp.handle.": "apex.amp.",
    "apex.parallel.distributed.": "apex.parallel.",
}


@dataclass(eq=False)
class Scope:
    """One module, class or function.

    Attributes:
        node: what it belongs to.
        parent: the scope around it; None for the module.
        owner: the class whose method this is.
        imports: full names by local name.
        alternatives: every full name that imports bind to a local name, as of `try` and `except`.
        parameters: of the function.
        values: what is assigned to a name, or in methods to an attribute such as `self.scaler`, by its dotted text.
        functions: that are defined in it.
    """

    node: ast.Module | ast.ClassDef | Function | ast.Lambda
    parent: Scope | None
    owner: Scope | None = None
    imports: dict[str, str] = field(default_factory=dict)
    alternatives: dict[str, set[str]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    functions: dict[str, Scope] = field(default_factory=dict)

    def enclosing(self) -> Iterator[Scope]:
        """Yield the scopes in which a name of this one is looked up."""
        scope: Scope | None = self
        while scope is not None:
            if scope is self or not isinstance(scope.node, ast.ClassDef):
                yield scope
            scope = scope.parent


class ModuleNames:
    """The scopes of a module, with the parent of each node.

    Attributes:
        module: the outermost scope.
        scopes: all scopes, the outer ones first.
        parents: the node around each node.
        scope_of: the scope in which each node is evaluated.
        calls: all calls, in the order of the source.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None)
        self.scopes = [self.module]
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scope_of: dict[ast.AST, Scope] = {tree: self.module}
        self.calls: list[ast.Call] = []
        self.stars: list[str] = []
        self._visit(tree, self.module)
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))

    def _visit(self, root: ast.AST, root_scope: Scope) -> None:
        stack: list[tuple[ast.AST, Scope]] = [(root, root_scope)]
        parents, scope_of = self.parents, self.scope_of
        while stack:
            node, scope = stack.pop()
            for child in ast.iter_child_nodes(node):
                parents[child] = node
                scope_of[child] = scope
                if type(child) in LEAVES:
                    continue
                inner = scope
                if isinstance(child, ast.Call):
                    self.calls.append(child)
                elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
                    inner = self._open(child, scope)
                elif isinstance(child, ast.Import):
                    for alias in child.names:
                        head = alias.name.partition(".")[0]
                        scope.imports[alias.asname or head] = alias.name if alias.asname else head
                elif isinstance(child, ast.ImportFrom):
                    self._import_from(child, scope)
                elif isinstance(child, BINDING):
                    self._assign(child, scope)
                stack.append((child, inner))

    def _open(self, node: Function | ast.Lambda | ast.ClassDef, scope: Scope) -> Scope:
        inner = Scope(node, scope)
        if isinstance(scope.node, ast.ClassDef):
            inner.owner = scope
        elif not isinstance(node, ast.ClassDef):
            inner.owner = scope.owner  # a function inside a method sees its `self`
        if not isinstance(node, ast.ClassDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            inner.parameters = {argument.arg for argument in named if argument is not None}
        if not isinstance(node, ast.Lambda):
            scope.functions[node.name] = inner
        self.scopes.append(inner)
        return inner

    def _import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        module = "." * node.level + (node.module or "")
        for alias in node.names:
            if alias.name == "*":
                self.stars.append(module)
            else:
                name = alias.asname or alias.name
                scope.imports[name] = f"{module}.{alias.name}" if node.module else f"{module}{alias.name}"
                scope.alternatives.setdefault(name, set()).add(scope.imports[name])

    def _assign(self, node: ast.AST, scope: Scope) -> None:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            pairs = [(node.target, ast.Starred(node.iter))]  # an element, whatever it is
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, ast.Starred(node.context_expr))]
        for target, value in pairs:
            parts: list[tuple[ast.expr, ast.expr]] = [(target, value)]
            if isinstance(target, (ast.Tuple, ast.List)):
                values = (
                    value.elts
                    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
                    else [ast.Starred(value) for _ in target.elts]
                )
                parts = list(zip(target.elts, values, strict=True))
            for name, one in parts:
                text = dotted(name)
                if text is None:
                    continue
                holder = scope.owner if text.startswith("self.") and scope.owner is not None else scope
                holder.values.setdefault(text, []).append(one)

    def values_of(self, text: str, scope: Scope) -> list[ast.expr] | None:
        """Return what the scopes around assign to a name or attribute; None where nothing says, as for a parameter."""
        if "." in text:
            if text.startswith("self.") and scope.owner is not None:
                found = scope.owner.values.get(text)
                return None if found is None else flat_values(found)
        head = text.partition(".")[0]
        for one in scope.enclosing():
            if text in one.values:
                return flat_values(one.values[text])
            if head in one.parameters:
                return None
        return None

    def resolve(self, node: ast.expr, scope: Scope, depth: int = 0) -> str | None:
        """Return the full name of an expression by imports, such as `apex.amp.initialize`, or None."""
        text = dotted(node)
        if text is None or depth > MAX_ALIASES:
            return None
        head, _, rest = text.partition(".")
        for one in scope.enclosing():
            full = one.imports.get(head)
            if full is not None:
                return _shown(f"{full}.{rest}" if rest else full)
            values = one.values.get(head)
            if values is not None and not (len(values) == 1 and dotted(values[0]) == head):
                alias = _alias(values)
                base = None if alias is None else self.resolve(alias, one, depth + 1)
                return None if base is None else _shown(f"{base}.{rest}" if rest else base)
            if head in one.parameters or head in one.functions:
                break
        if head == "self" and scope.owner is not None and rest:
            name, _, beyond = rest.partition(".")
            values = scope.owner.values.get(f"self.{name}")
            alias = None if values is None else _alias(values)
            inside = next((one for one in scope.owner.functions.values()), scope)
            base = None if alias is None else self.resolve(alias, inside, depth + 1)
            return None if base is None else _shown(f"{base}.{beyond}" if beyond else base)
        return None

    def has_alternatives(self, node: ast.expr) -> bool:
        """Return whether imports, or an import and an assignment, bind the head of an expression differently."""
        head = (dotted(node) or "").partition(".")[0]
        return any(
            len(one.alternatives.get(head, ())) > 1 or (head in one.alternatives and head in one.values)
            for one in self.scope_of[node].enclosing()
        )

    def resolve_here(self, node: ast.expr) -> str | None:
        """Return the full name of an expression, in the scope in which it stands."""
        return self.resolve(node, self.scope_of[node])


def flat_values(values: list[ast.expr]) -> list[ast.expr]:
    """Return values with those of conditional expressions one by one."""
    found: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.IfExp):
            found += flat_values([value.body, value.orelse])
        else:
            found.append(value)
    return found


def _alias(values: list[ast.expr]) -> ast.expr | None:
    """Return the name that all values but None agree on, if they are no more than a name."""
    named = [value for value in flat_values(values) if not (isinstance(value, ast.Constant) and value.value is None)]
    return named[0] if len(named) == 1 and dotted(named[0]) is not None else None


def _shown(name: str) -> str:
    for inner, outer in SHOWN_AS.items():
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name
