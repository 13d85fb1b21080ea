"""Which names of a module mean something of Apex or torch, by its imports, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ampcompare.migrate.read.neighbours import Helper
from ampcompare.migrate.read.tree import Function, Tree, walk
from ampcompare.source.syntax import dotted

if TYPE_CHECKING:
    from ampcompare.migrate.edits import Edits

__all__ = ["STARS", "Names", "drop_passed"]

STARS = {
    "apex": ("amp", "parallel", "optimizers", "normalization", "fp16_utils", "multi_tensor_apply"),
    "apex.fp16_utils": (
        "BN_convert_float",
        "DynamicLossScaler",
        "FP16Model",
        "FP16_Optimizer",
        "LossScaler",
        "clip_grad_norm",
        "convert_module",
        "convert_network",
        "master_params_to_model_params",
        "model_grads_to_master_grads",
        "network_to_half",
        "prep_param_lists",
        "to_python_float",
        "tofp16",
    ),
    "apex.amp": ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"),
    "apex.parallel": ("DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model"),
    "apex.optimizers": ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "FusedAdagrad"),
}
ROOTS = ("apex", "torch", "amp_C", "apex_C")


class Names:
    """The imports of a module.

    Attributes:
        imports: of Apex: the statement and the alias; the alias of a star import is "*".
        uses: expressions that mean something of Apex, each the widest attribute chain, with its full name.
        parameters: of functions of a script that only ever get `apex.amp` itself, each with the arguments for it.
        passed: these arguments, by `id`.
        modules: names of imported modules that are neither Apex nor torch.
        helpers: functions of other files that scale a loss, by what this file calls them.
    """

    def __init__(
        self,
        tree: Tree,
        helpers: Mapping[str, Helper] = MappingProxyType({}),
        passed_on: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.tree = tree
        self.helpers = helpers
        self.modules: set[str] = set()
        self._meanings: dict[str, set[str]] = {}
        self.imports: list[tuple[ast.Import | ast.ImportFrom, ast.alias]] = []
        for node in tree.nodes:
            if isinstance(node, ast.Import):
                self._add_import(node)
            elif isinstance(node, ast.ImportFrom):
                self._add_from(node)
        for name, meaning in passed_on.items():
            self._add(name, meaning)
        self._shadowing = self._find_shadowing()
        self.parameters = _find_passed(tree, self.imported, self.meaning)
        self.passed = {id(each) for _, _, arguments in self.parameters for each in arguments}
        for function, parameter, _ in self.parameters:
            self._shadowing[parameter.arg].remove(function)
        self.uses: list[tuple[ast.Name | ast.Attribute, str]] = list(self._find_uses())

    def _add(self, name: str, meaning: str) -> None:
        self._meanings.setdefault(name, set()).add(meaning)

    def _add_import(self, node: ast.Import) -> None:
        for alias in node.names:
            root = alias.name.split(".")[0]
            if root not in ROOTS:
                self.modules.add(alias.asname or root)
                continue
            self._add(alias.asname or root, alias.name if alias.asname else root)
            if root in ("apex", "amp_C", "apex_C"):
                self.imports.append((node, alias))

    def _add_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or module.split(".")[0] not in ROOTS:
            self.modules |= {alias.asname or alias.name for alias in node.names}
            return
        for alias in node.names:
            if alias.name == "*":
                for name in STARS.get(module, ()):
                    self._add(name, f"{module}.{name}")
            else:
                self._add(alias.asname or alias.name, f"{module}.{alias.name}")
            if module.split(".")[0] != "torch":
                self.imports.append((node, alias))

    def _find_shadowing(self) -> dict[str, list[ast.AST]]:
        """Return the functions where a name of an import means something else: a parameter or a local variable."""
        found: dict[str, list[ast.AST]] = {}
        for node in self.tree.nodes:
            if isinstance(node, ast.arg) and node.arg in self._meanings:
                function = self.tree.parent(self.tree.parent(node))
                found.setdefault(node.arg, []).append(function)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in self._meanings:
                scope = self.tree.function(node)
                if scope is not None and not self._reaches(scope, node.id):
                    found.setdefault(node.id, []).append(scope)
        return found

    @staticmethod
    def _reaches(function: ast.AST, name: str) -> bool:
        """Return whether a name bound in a function can still mean an import: one in it, or it is global there."""
        for node in walk(function):
            if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
                return True
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                if any((alias.asname or alias.name.split(".")[0]) in (name, "*") for alias in node.names):
                    return True
        return False

    def _is_shadowed(self, node: ast.Name) -> bool:
        functions = self._shadowing.get(node.id)
        return functions is not None and any(outer in functions for outer in self.tree.ancestors(node))

    def _is_member(self, node: ast.AST) -> bool:
        """Return whether a name is bound in the body of a class, such as a member of an enumeration."""
        scopes = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        return isinstance(
            next((each for each in self.tree.ancestors(node) if isinstance(each, scopes)), None), ast.ClassDef
        )

    def meaning(self, node: ast.AST | None) -> str | None:
        """Return the full name of an expression; None if it is not imported from Apex or torch, or ambiguous."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or self._is_shadowed(node):
            return None
        meanings = self._meanings.get(node.id, set())
        apex = [meaning for meaning in meanings if not meaning.startswith("torch")]
        chosen = apex or sorted(meanings)
        if not chosen:
            return None
        return ".".join([min(chosen, key=len), *reversed(parts)])

    def may_be_none(self, node: ast.AST) -> bool:
        """Return whether a name of Apex is None by choice of the script, and not only where Apex is missing."""
        name = dotted(node)
        for each in self.tree.nodes:
            if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store):
                if not isinstance(self.tree.parent(self.tree.statement(each)), (ast.ExceptHandler, ast.Module)):
                    return True
        return False

    def imported(self, name: str) -> str | None:
        """Return the full name in Apex of an imported name, wherever it is imported."""
        apex = [meaning for meaning in self._meanings.get(name, ()) if not meaning.startswith("torch")]
        return min(apex, key=len) if apex else None

    def local(self, meaning: str) -> str | None:
        """Return a name by which the module imports something, such as "torch"."""
        return next((name for name, meanings in self._meanings.items() if meanings == {meaning}), None)

    def _find_uses(self) -> Iterator[tuple[ast.Name | ast.Attribute, str]]:
        for node in self.tree.nodes:
            if not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            if isinstance(self.tree.parent(node), ast.Attribute):
                continue  # a part of a wider chain
            if isinstance(node.ctx, ast.Store) and self._is_member(node):
                continue
            chain: ast.AST = node
            while isinstance(chain, ast.Attribute) and self.meaning(chain) is None:
                chain = chain.value  # such as `amp.master_params(x).y`, which goes through a call
            if not isinstance(chain, (ast.Name, ast.Attribute)):
                continue
            meaning = self.meaning(chain)
            if meaning is not None and not meaning.startswith("torch"):
                yield chain, meaning


# The function, its parameter, and the argument of each call.
_Passed: TypeAlias = tuple[Function, ast.arg, list[ast.expr]]


Meaning: TypeAlias = Callable[[ast.AST], str | None]


def _find_passed(tree: Tree, imported: Callable[[str], str | None], meaning: Meaning) -> list[_Passed]:
    """Return the parameters, in a file that is run as a script: no other file calls its functions.

    A function that initializes is left out: what it asks of the parameter before that has no equivalent.

    Args:
        imported: the full name in Apex of an imported name.
        meaning: the full name of an expression.
    """
    if not any(isinstance(node, ast.Constant) and node.value == "__main__" for node in tree.nodes):
        return []
    functions = [node for node in tree.module.body if isinstance(node, ast.FunctionDef) and not _initializes(node)]
    found: list[_Passed] = []
    for function in functions:
        for parameter in (*function.args.args, *function.args.kwonlyargs):
            if imported(parameter.arg) != "apex.amp":
                continue
            arguments = _arguments(tree, meaning, function, parameter)
            if arguments:
                found.append((function, parameter, arguments))
    return found


def _initializes(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "initialize" for node in ast.walk(function))


def _arguments(tree: Tree, meaning: Meaning, function: ast.FunctionDef, parameter: ast.arg) -> list[ast.expr]:
    """Return the arguments of all calls if each is `apex.amp`, under the name that the parameter has; else none."""
    place = next((i for i, each in enumerate(function.args.args) if each is parameter), None)
    found: list[ast.expr] = []
    for node in tree.nodes:
        if not isinstance(node, ast.Name) or node.id != function.name:
            continue
        call = tree.parent(node)
        if not (isinstance(call, ast.Call) and call.func is node):
            return []
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return []
        given = [each.value for each in call.keywords if each.arg == parameter.arg]
        if place is not None and place < len(call.args):
            given.append(call.args[place])
        if len(given) != 1 or meaning(given[0]) != "apex.amp":
            return []
        found += given
    return found


def drop_passed(tree: Tree, edits: Edits, parameters: list[_Passed]) -> None:
    """Remove the parameters and their arguments: the scaler is in reach of all functions."""
    for function, parameter, arguments in parameters:
        _drop(tree, edits, parameter, _default(function, parameter) or parameter)
        for argument in arguments:
            outer = tree.parent(argument)
            whole = outer if isinstance(outer, ast.keyword) else argument
            _drop(tree, edits, whole, whole)


def _default(function: Function, parameter: ast.arg) -> ast.expr | None:
    arguments = function.args
    if parameter in arguments.kwonlyargs:
        return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)]
    place = arguments.args.index(parameter) - (len(arguments.args) - len(arguments.defaults))
    return arguments.defaults[place] if place >= 0 else None


def _drop(tree: Tree, edits: Edits, first: ast.AST, last: ast.AST) -> None:
    """Remove a member of a list with one of its commas."""
    start, end = tree.span(first)[0], tree.span(last)[1]
    rest = tree.text[end:]
    if rest.lstrip().startswith(","):
        comma = end + len(rest) - len(rest.lstrip()) + 1
        after = tree.text[comma:]
        blank = len(after) - len(after.lstrip(" "))
        edits.replace_span(start, comma + blank, "")
        return
    head = tree.text[:start].rstrip()
    edits.replace_span(len(head) - 1 if head.endswith(",") else start, end, "")
