"""Which names of a module mean something of Apex or torch, by its imports, wherever they stand."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ampcompare.source.amp_names import APEX, ROOTS
from ampcompare.source.migrate.read.neighbours import Helper
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import dotted, walk

if TYPE_CHECKING:
    from ampcompare.source.edits import Edits

__all__ = ["Names", "drop_passed"]

# A function, its parameter, and the argument of each call.
_Passed: TypeAlias = tuple[Function, ast.arg, list[ast.expr]]


class Names:
    """The imports of a module.

    Attributes:
        imports: of Apex: the statement and the alias; the alias of a star import is "*".
        uses: expressions that mean something of Apex, each the widest attribute chain, with its full name.
        parameters: of functions of a script that only ever get `apex.amp` itself, each with the arguments for it.
        passed: these arguments, by `id`.
        passed_on: names of Apex that come from other files, with what they mean.
        modules: names of imported modules that are neither Apex nor torch.
        helpers: functions of other files that scale a loss, by what this file calls them.
        running: names of functions of other files that run a backward pass, likewise.
    """

    def __init__(
        self,
        module: Module,
        helpers: Mapping[str, Helper] = MappingProxyType({}),
        passed_on: Mapping[str, str] = MappingProxyType({}),
        running: Collection[str] = (),
    ) -> None:
        self.module = module
        self.helpers = helpers
        self.imports: list[tuple[ast.Import | ast.ImportFrom, ast.alias]] = [
            (node, alias) for node, alias, full in module.imports if full.split(".")[0] in APEX
        ]
        self.passed_on = passed_on
        self.running = frozenset(running)
        for name, meaning in passed_on.items():
            module.top.bind(name, meaning)
        bound = [pair for scope in module.scopes for pair in scope.imports.items()]
        self.modules = {name for name, full in bound if not any(one.split(".")[0] in ROOTS for one in full)}
        self._apex = {name for name, full in bound if "apex.amp" in full}
        self.parameters = list(self._find_passed())
        self.passed = {id(each) for _, _, arguments in self.parameters for each in arguments}
        for function, parameter, _ in self.parameters:
            module.scope_from[function].bind(parameter.arg, "apex.amp")
        self.uses: list[tuple[ast.Name | ast.Attribute, str]] = list(self._find_uses())

    def meaning(self, node: ast.AST | None) -> str | None:
        """Return the full name of an expression; None if it is not imported from Apex or torch."""
        full = None if node is None else self.module.resolve(node, follow=False)
        return full if full is not None and full.split(".")[0] in ROOTS else None

    def may_be_none(self, node: ast.AST) -> bool:
        """Return whether a name of Apex is None by choice of the script, and not only where Apex is missing."""
        name = dotted(node)
        for each in self.module.nodes:
            if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Store):
                if not isinstance(self.module.parent(self.module.statement(each)), (ast.ExceptHandler, ast.Module)):
                    return True
        return False

    def _find_uses(self) -> Iterator[tuple[ast.Name | ast.Attribute, str]]:
        for node in self.module.nodes:
            if not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            if isinstance(self.module.parent(node), ast.Attribute):
                continue  # a part of a wider chain
            if isinstance(node.ctx, ast.Store) and isinstance(self.module.scope_of[node].node, ast.ClassDef):
                continue  # such as a member of an enumeration
            chain: ast.AST = node
            while isinstance(chain, ast.Attribute) and self.meaning(chain) is None:
                chain = chain.value  # such as `amp.master_params(x).y`, which goes through a call
            if not isinstance(chain, (ast.Name, ast.Attribute)):
                continue
            meaning = self.meaning(chain)
            if meaning is not None and not meaning.startswith("torch"):
                yield chain, meaning

    def _find_passed(self) -> Iterator[_Passed]:
        """Yield the parameters, in a file that is run as a script: no other file calls its functions.

        A function that initializes is left out: what it asks of the parameter before that has no equivalent.
        """
        if not any(isinstance(node, ast.Constant) and node.value == "__main__" for node in self.module.nodes):
            return
        for function in self.module.tree.body:
            if not isinstance(function, ast.FunctionDef) or _initializes(function):
                continue
            for parameter in (*function.args.args, *function.args.kwonlyargs):
                if parameter.arg in self._apex and (arguments := self._arguments(function, parameter)):
                    yield function, parameter, arguments

    def _arguments(self, function: ast.FunctionDef, parameter: ast.arg) -> list[ast.expr]:
        """Return the arguments of all calls if each is `apex.amp`, under the name that the parameter has; else none."""
        place = next((i for i, each in enumerate(function.args.args) if each is parameter), None)
        found: list[ast.expr] = []
        for node in self.module.nodes:
            if not isinstance(node, ast.Name) or node.id != function.name:
                continue
            call = self.module.parent(node)
            if not (isinstance(call, ast.Call) and call.func is node):
                return []
            if any(isinstance(each, ast.Starred) for each in call.args) or any(
                each.arg is None for each in call.keywords
            ):
                return []
            given = [each.value for each in call.keywords if each.arg == parameter.arg]
            if place is not None and place < len(call.args):
                given.append(call.args[place])
            if len(given) != 1 or self.meaning(given[0]) != "apex.amp":
                return []
            found += given
        return found


def _initializes(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "initialize" for node in walk(function))


def drop_passed(module: Module, edits: Edits, parameters: list[_Passed]) -> None:
    """Remove the parameters and their arguments: the scaler is in reach of all functions."""
    for function, parameter, arguments in parameters:
        _drop(module, edits, parameter, _default(function, parameter) or parameter)
        for argument in arguments:
            outer = module.parent(argument)
            whole = outer if isinstance(outer, ast.keyword) else argument
            _drop(module, edits, whole, whole)


def _default(function: Function, parameter: ast.arg) -> ast.expr | None:
    arguments = function.args
    if parameter in arguments.kwonlyargs:
        return arguments.kw_defaults[arguments.kwonlyargs.index(parameter)]
    place = arguments.args.index(parameter) - (len(arguments.args) - len(arguments.defaults))
    return arguments.defaults[place] if place >= 0 else None


def _drop(module: Module, edits: Edits, first: ast.AST, last: ast.AST) -> None:
    """Remove a member of a list with one of its commas."""
    start, end = module.span(first)[0], module.span(last)[1]
    rest = module.text[end:]
    if rest.lstrip().startswith(","):
        comma = end + len(rest) - len(rest.lstrip()) + 1
        after = module.text[comma:]
        blank = len(after) - len(after.lstrip(" "))
        edits.replace_span(start, comma + blank, "")
        return
    head = module.text[:start].rstrip()
    edits.replace_span(len(head) - 1 if head.endswith(",") else start, end, "")
