"""Which function a call names, who calls a function, and what it reaches, in a module or over a project.

A name stands for all that its scope binds it to, an attribute for all that its class, or anything else, puts there.
What no line of the project says is unknown, and an answer that only may be right is never given as the one.
"""

from __future__ import annotations

import ast
import builtins
import copy
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from ampcompare.source.amp_names import STARS, WRAPPERS, public_full_name
from ampcompare.source.module import Module, Scope
from ampcompare.source.project import Project
from ampcompare.source.syntax import (
    FunctionNode,
    LoopNode,
    WithNode,
    argument_values,
    child_nodes,
    dotted_name,
    last_name,
    strip_star,
)
from ampcompare.source.torch_methods import ADDING, GIVING_BACK

T = TypeVar("T")
MAX_DEPTH = 24
MAX_VALUES = 24  # that an expression may have; beyond it nothing is known
# Functions that give back what they get, as far as calls of it go.
SAME = frozenset({
    *WRAPPERS, "torch.compile", "torch.jit.script", "copy.copy", "copy.deepcopy", "functools.wraps", "typing.cast",
    "apex.parallel.convert_syncbn_model", "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "weakref.proxy",
})  # fmt: skip
LISTS = frozenset({"list", "tuple", "iter", "reversed", "sorted", "set", "collections.OrderedDict", "dict"})
# Functions whose result may be anything, or whose call may bind any name.
GIVING_ANYTHING = frozenset({
    "setattr", "globals", "locals", "vars", "__import__", "eval", "next", "map", "filter", "zip", "enumerate",
})  # fmt: skip
PROPERTIES = ("property", "functools.cached_property", "cached_property")
# What tensors, optimizers and schedulers are called, whose methods have names such as `backward` and `step`.
NO_PROJECT_CLASS = re.compile(
    r"^_*(?:\w*loss\w*|err\w*|opt\w*|\w*optim\w*|\w*sched\w*|scaler)$", re.IGNORECASE
)
OF_OBJECT = frozenset(dir(object))
BUILTINS = frozenset(dir(builtins))


class Answer(Enum):
    """An answer that may be unknown: yes, no or unknown."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProjectFunction:
    """A function, method or lambda of the project.

    Attributes:
        scope: that it makes.
        receiver: the class of the object whose method it is; None where none is known.
        given: calls of `functools.partial` that have bound arguments of it, the first one first.
    """

    scope: Scope
    receiver: Scope | None = None
    given: tuple[ast.Call, ...] = ()

    @property
    def module(self) -> Module:
        """The module in which it is."""
        return self.scope.module

    @property
    def name(self) -> str:
        """Its name; that of a lambda is empty."""
        return getattr(self.scope.node, "name", "")


@dataclass(frozen=True)
class ImportedObject:
    """What no file of the project defines: a function, class or object of another package, by its full name."""

    name: str


@dataclass(frozen=True)
class SeveralFunctions:
    """One of some functions, all of which are known."""

    choices: tuple[ProjectFunction | ImportedObject, ...]


@dataclass(frozen=True)
class UnknownFunction:
    """A function that no line of the project names, or one of some that are known in part.

    Attributes:
        candidates: those that are.
    """

    candidates: tuple[ProjectFunction | ImportedObject, ...] = ()


Callee: TypeAlias = ProjectFunction | ImportedObject | SeveralFunctions | UnknownFunction


@dataclass(frozen=True)
class _ProjectClass:
    scope: Scope


@dataclass(frozen=True)
class _ClassInstance:
    """An object of a class of the project, or what calls of another package's function give."""

    of: Scope | ImportedObject


@dataclass(frozen=True)
class _ProjectModule:
    """A module of the project."""

    module: Module


@dataclass(frozen=True)
class _WrittenContainer:
    """A list, tuple, set or dict that is written out.

    Attributes:
        node: of it.
        name: the last part of the name that it is bound to, by which elements are added.
        level: how often it must be taken apart before its elements come.
    """

    node: ast.expr
    scope: Scope
    receiver: Scope | None
    name: str = ""
    level: int = 0


class _UnknownValue(Enum):
    UNKNOWN = "unknown"


UNKNOWN = _UnknownValue.UNKNOWN
Value: TypeAlias = (
    ProjectFunction
    | ImportedObject
    | _ProjectClass
    | _ClassInstance
    | _ProjectModule
    | _WrittenContainer
    | _UnknownValue
)
Values: TypeAlias = frozenset[Value]
NOT_KNOWN: Values = frozenset({UNKNOWN})


class _Binding(NamedTuple):
    """Something that binds a name in a scope.

    Attributes:
        place: line and column.
        always: whether it runs whenever its scope does.
        what: the expression that is assigned, the scope of a definition, or the full name of an import.
    """

    place: tuple[int, int]
    always: bool
    node: ast.AST
    what: ast.expr | Scope | str


@dataclass(frozen=True)
class SoughtEvent:
    """An event that is searched for in functions and in all that they call, such as a step of an optimizer.

    Attributes:
        name: of the event.
        is_at: returns whether a node of a module is it.
        harmless: returns whether an unknown call surely is not it.
    """

    name: str
    is_at: Callable[[Module, ast.AST], bool]
    harmless: Callable[[Module, ast.Call], bool] = lambda module, call: False


class _project_cached_property(Generic[T]):
    """A cached property of `Index` whose value is computed once for all modules of the project."""

    def __init__(self, make: Callable[[Index], T]) -> None:
        self._make = make

    def __get__(self, index: Index, owner: type[Index]) -> T:
        tables = index.tables
        if self not in tables:
            tables[self] = self._make(index)
        return cast(T, tables[self])


class Index:
    """Which function each call names, and what an expression may be, in a module or in all modules of a project.

    Attributes:
        module: from which it is looked at.
        tables: what is made once.
        modules: all that are looked at.
    """

    def __init__(self, module: Module, project: Project | None = None, *, alone: bool = False) -> None:
        self.module = module
        self._alone = alone  # whether nobody else is asked who calls its functions
        self.tables: dict[object, object] = {}
        self._project = project if project is not None and project.path is not None else None
        self._values: dict[tuple[ast.AST, Scope | None], Values] = {}
        self._meanwhile: dict[tuple[ast.AST, Scope | None], Values] = {}
        self._active: set[tuple[ast.AST, Scope | None]] = set()
        self._asked: set[tuple[Module, str]] = set()
        self._cut = 0
        self._bindings: dict[Scope, dict[str, list[_Binding]]] = {}
        self._reached: dict[tuple[str, Scope, Scope | None], Answer] = {}
        self._orders: dict[Scope, tuple[list[Scope], str | None]] = {}

    @_project_cached_property
    def modules(self) -> list[Module]:
        """The module itself and those around it."""
        if self._project is None or self._project.path is None or self._alone:
            return [self.module]
        return [self.module, *(each for _, each in self._project.modules_connected_by_imports())]

    def index_seen_from(self, module: Module) -> Index:
        """Return the same index, as it is looked at from another one of its modules."""
        view = copy.copy(self)
        view.module = module
        return view

    # Questions.

    def callee(self, call: ast.Call, scope: Scope, receiver: Scope | None = None) -> Callee:
        """Return which function a call names.

        Args:
            scope: in which the call stands.
            receiver: the class of the object that `self` is there, where it is known.
        """
        return _callee_from_candidates(
            self._functions_behind_values(self.values_of_expression(call.func, scope, receiver))
        )

    def function_of_expression(self, node: ast.expr, scope: Scope, receiver: Scope | None = None) -> Callee:
        """Return which function an expression is, such as one that is passed to be called."""
        return _callee_from_candidates(
            self._functions_behind_values(self.values_of_expression(node, scope, receiver))
        )

    def classes_of_expression(self, node: ast.expr, scope: Scope) -> list[Scope]:
        """Return the classes of the project that an expression may be, such as what is called to make an object."""
        return [
            each.scope for each in self.values_of_expression(node, scope) if isinstance(each, _ProjectClass)
        ]

    def project_functions_of(self, call: ast.Call, scope: Scope) -> list[ProjectFunction]:
        """Return the functions of the project of which a call surely names one; none where it may name another thing.

        What such a call does, their lines say; its name says nothing.
        """
        callee = self.callee(call, scope)
        named = functions_of_callee(callee)
        known = [each for each in named if isinstance(each, ProjectFunction)]
        return known if len(known) == len(named) and not isinstance(callee, UnknownFunction) else []

    def possible_outside_names_of(self, node: ast.expr, scope: Scope) -> set[str]:
        """Return the full names of other packages that an expression may have; "" stands for anything else."""
        return {
            each.name if isinstance(each, ImportedObject) else ""
            for each in self.values_of_expression(node, scope)
        }

    def possible_calls_and_completeness(self, function: Scope) -> tuple[list[ast.Call], bool]:
        """Return the calls that may be of a function, and whether these are all.

        They are not where the function is passed on, or where a call of its name cannot be resolved.
        """
        return self._calls_by_function.get(function, []), function not in self._functions_with_unseen_calls

    def relative_path_of(self, module: Module) -> str:
        """Return the path of a module from the folder of the one that is looked at; empty for text alone."""
        path = None if self._project is None else self._project.path_of(module)
        own = None if self._project is None else self._project.path_of(self.module)
        return "" if path is None or own is None else os.path.relpath(path, own.parent)

    def scope_around_call(self, call: ast.Call) -> Scope:
        """Return the function, or the module, in which a call of any of the modules stands."""
        return self._scopes_around_calls[call]

    def reaches_event(self, function: ProjectFunction, event: SoughtEvent) -> Answer:
        """Return whether a call of a function leads to an event, in it or in what it calls."""
        key = (event.name, function.scope, function.receiver)
        if key not in self._reached:
            self._reached[key] = Answer.NO  # for a function that calls itself
            self._reached[key] = self._search_event_in(function, event)
        return self._reached[key]

    def _search_event_in(self, function: ProjectFunction, event: SoughtEvent) -> Answer:
        found = Answer.NO
        for node in own_nodes_of_scope(function.scope):
            if event.is_at(function.module, node):
                return Answer.YES
            if not isinstance(node, ast.Call):
                continue
            callee = self.callee(node, function.scope, function.receiver)
            for each in functions_of_callee(callee):
                answer = self.reaches_event(each, event) if isinstance(each, ProjectFunction) else Answer.NO
                if answer is Answer.YES:
                    return answer
                found = answer if answer is Answer.UNKNOWN else found
            if isinstance(callee, UnknownFunction) and not event.harmless(function.module, node):
                found = Answer.UNKNOWN
        return found

    def has_outside_base(self, scope: Scope, *names: str) -> bool:
        """Return whether a class has a base of another package, by one of some full names."""
        for each in self._project_bases_and_first_outside(scope)[0]:
            for expression in getattr(each.node, "bases", []):
                bases = self.values_of_expression(expression, each.parent or each)
                if any(isinstance(base, ImportedObject) and base.name in names for base in bases):
                    return True
        return False

    def topmost_class_of(self, scope: Scope) -> Scope:
        """Return the topmost class of the project that a class comes from, itself where it has no base there."""
        return self._project_bases_and_first_outside(scope)[0][-1]

    # Values.

    def values_of_expression(self, node: ast.AST, scope: Scope, receiver: Scope | None = None) -> Values:
        """Return all that an expression may be; `UNKNOWN` among it says that it may be something else too."""
        key = (node, receiver)
        if key in self._values:
            return self._values[key]
        if key in self._meanwhile:
            return self._meanwhile[key]
        if key in self._active:
            self._cut += 1
            return frozenset()
        if len(self._active) > MAX_DEPTH:
            self._cut += 1
            return NOT_KNOWN
        self._active.add(key)
        cut = self._cut
        found = self._evaluate_expression(node, scope, receiver)
        if len(found) > MAX_VALUES:
            found = NOT_KNOWN
        self._active.discard(key)
        # What is found in a circle holds for the question alone that led into it.
        (self._values if cut == self._cut or not self._active else self._meanwhile)[key] = found
        if not self._active:
            self._meanwhile.clear()
        return found

    def _evaluate_expression(self, node: ast.AST, scope: Scope, receiver: Scope | None) -> Values:
        if isinstance(node, ast.Name):
            return self._values_of_name(node, scope, receiver)
        if isinstance(node, ast.Attribute):
            return self._values_of_attribute(node, scope, receiver)
        if isinstance(node, ast.Call):
            return self._values_of_call(node, scope, receiver)
        if isinstance(node, ast.Lambda):
            return frozenset({ProjectFunction(scope.module.scope_from[node], receiver)})
        if isinstance(node, ast.Constant):
            return (
                frozenset()
                if node.value is None
                else _instance_from_outside(f"builtins.{type(node.value).__name__}")
            )
        if isinstance(node, ast.IfExp):
            return self.values_of_expression(node.body, scope, receiver) | self.values_of_expression(
                node.orelse, scope, receiver
            )
        if isinstance(node, ast.BoolOp):
            return frozenset().union(
                *(self.values_of_expression(each, scope, receiver) for each in node.values)
            )
        if isinstance(node, (ast.NamedExpr, ast.Await)):
            return self.values_of_expression(node.value, scope, receiver)
        if isinstance(node, ast.Starred):
            inside = self.values_of_expression(node.value, scope, receiver)
            return (
                frozenset().union(*(self._elements_of_value(each) for each in inside))
                if inside
                else frozenset()
            )
        if isinstance(node, ast.Subscript):
            return self._values_of_subscript(node, scope, receiver)
        if isinstance(
            node, (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.GeneratorExp, ast.DictComp)
        ):
            return frozenset({_WrittenContainer(node, scope, receiver)})
        if isinstance(node, ast.JoinedStr):
            return _instance_from_outside("builtins.str")
        if isinstance(node, ast.Compare):
            return _instance_from_outside("builtins.bool")
        return NOT_KNOWN

    def _values_of_name(self, node: ast.Name, scope: Scope, receiver: Scope | None) -> Values:
        for one in scope.lookup_scopes():
            bindings = self._bindings_of_scope(one).get(node.id)
            if node.id in one.parameters:
                known = self._values_of_parameter(one, node.id, receiver)
                return (
                    known | self._values_of_bindings(bindings, node, one, scope, receiver)
                    if bindings
                    else known
                )
            if bindings:
                return _values_with_named_containers(
                    self._values_of_bindings(bindings, node, one, scope, receiver), node.id
                )
        if node.id in BUILTINS:
            return frozenset({ImportedObject(node.id)})
        return NOT_KNOWN

    def _values_of_bindings(
        self, bindings: list[_Binding], use: ast.AST, home: Scope, scope: Scope, receiver: Scope | None
    ) -> Values:
        kept = _bindings_visible_at(bindings, use if scope is home else None, home)
        if not kept:
            return NOT_KNOWN
        inner = receiver if home.owner is scope.owner else None
        return frozenset().union(*(self._values_of_binding(each, home, inner) for each in kept))

    def _values_of_binding(self, binding: _Binding, home: Scope, receiver: Scope | None) -> Values:
        what = binding.what
        if isinstance(what, Scope):
            return self._values_of_definition(what, receiver if isinstance(home.node, ast.ClassDef) else None)
        if isinstance(what, str):
            return self._values_of_import(home.module, what)
        holder = home.module.scope_of.get(strip_star(what), home)
        return self.values_of_expression(what, holder, receiver)

    def _values_of_definition(self, scope: Scope, receiver: Scope | None) -> Values:
        node = scope.node
        if isinstance(node, ast.ClassDef):
            return frozenset({_ProjectClass(scope)})
        assert isinstance(node, FunctionNode)
        own = ProjectFunction(scope, receiver)
        found: Values = frozenset({own})
        for decorator in reversed(node.decorator_list):
            made = self._functions_behind_values(self.values_of_expression(decorator, scope.parent or scope))
            inner = [each for each in made if isinstance(each, ProjectFunction)]
            if inner:  # what it returns is called, and calls the function
                found = frozenset().union(*(self._values_returned_by(each) for each in inner)) - {UNKNOWN} | (
                    found if any(_decorator_returns_function(each.scope) for each in inner) else frozenset()
                )
        return found or frozenset({own})

    def _values_of_import(self, module: Module, full_name: str) -> Values:
        path = None if self._project is None else self._project.path_of(module)
        if self._project is None or path is None:
            return (
                NOT_KNOWN
                if full_name.startswith(".")
                else frozenset({ImportedObject(public_full_name(full_name))})
            )
        found = self._project.find_file_and_name_of_definition(path, full_name)
        if found is None:
            return (
                NOT_KNOWN
                if full_name.startswith(".")
                else frozenset({ImportedObject(public_full_name(full_name))})
            )
        place, name = found
        target = None if place == path else self._project.module_of_file(place)
        if target is None:
            return NOT_KNOWN
        return self._values_of_exported_name(target, name) if name else frozenset({_ProjectModule(target)})

    def _values_of_exported_name(self, module: Module, name: str) -> Values:
        """Return what a name at the top of a module is, as other modules see it."""
        if (module, name) in self._asked:  # modules that import a name from each other
            return frozenset()
        self._asked.add((module, name))
        try:
            return self._values_of_top_name(module, name)
        finally:
            self._asked.discard((module, name))

    def _values_of_top_name(self, module: Module, name: str) -> Values:
        bindings = self._bindings_of_scope(module.top).get(name)
        stored = self._values_stored_from_outside(
            name, lambda value: isinstance(value, _ProjectModule) and value.module is module
        )
        if bindings:
            kept = _bindings_visible_at(bindings, None, module.top)
            return frozenset(stored).union(
                *(self._values_of_binding(each, module.top, None) for each in kept)
            )
        path = None if self._project is None else self._project.path_of(module)
        if self._project is not None and path is not None and path.name == "__init__.py":
            place = self._project.find_module_file(path, f".{name}")
            if place is not None and (found := self._project.module_of_file(place)) is not None:
                return frozenset({_ProjectModule(found)})
        return NOT_KNOWN

    def _values_of_parameter(self, scope: Scope, name: str, receiver: Scope | None) -> Values:
        node = scope.node
        assert not isinstance(node, (ast.Module, ast.ClassDef))
        positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        is_method = scope.parent is not None and isinstance(scope.parent.node, ast.ClassDef)
        if is_method and scope.parent is not None and not self._is_static(scope):
            if positional[:1] == [name]:
                is_class = _has_decorator(node, "classmethod")
                return self._values_of_self(scope.parent, receiver, is_class=is_class)
            positional = positional[1:]
        defaults = _defaults_of_parameters(node.args, positional)
        found: set[Value] = set()
        calls, complete = self.possible_calls_and_completeness(scope)
        is_called_unseen = not calls and scope not in self._decorated_by_function
        if not complete or is_called_unseen or isinstance(node, ast.Lambda):
            found.add(UNKNOWN)
        for call in calls:
            home = self._scopes_around_calls[call]
            value = _argument_given_for(call, positional, name)
            if value is Ellipsis:
                found.add(UNKNOWN)
            elif isinstance(value, ast.expr):
                found |= self.values_of_expression(value, home)
            elif name in defaults:
                found |= self.values_of_expression(defaults[name], scope.parent or scope)
            else:
                found.add(UNKNOWN)
        if positional[:1] == [name]:
            for each in self._decorated_by_function.get(scope, ()):
                is_class = isinstance(each.node, ast.ClassDef)
                found.add(_ProjectClass(each) if is_class else ProjectFunction(each))
        return frozenset(found)

    def _is_static(self, scope: Scope) -> bool:
        return _has_decorator(scope.node, "staticmethod")

    def _values_of_self(self, owner: Scope, receiver: Scope | None, *, is_class: bool = False) -> Values:
        make: Callable[[Scope], Value] = _ProjectClass if is_class else _ClassInstance
        if receiver is not None and owner in self._project_bases_and_first_outside(receiver)[0]:
            return frozenset({make(receiver)})
        return frozenset({make(owner), *map(make, self._subclasses_by_scope.get(owner, ()))})

    def _values_of_attribute(self, node: ast.Attribute, scope: Scope, receiver: Scope | None) -> Values:
        if isinstance(node.value, ast.Call) and dotted_name(node.value.func) == "super":
            return self._values_of_super_method(node.attr, scope, receiver)
        inside = self.values_of_expression(node.value, scope, receiver)
        if not inside:
            return NOT_KNOWN
        return _values_with_named_containers(
            frozenset().union(*(self._values_of_member(each, node.attr) for each in inside)), node.attr
        )

    def _values_of_member(self, value: Value, name: str) -> Values:
        if isinstance(value, ImportedObject):
            stored = self._values_stored_from_outside(name, lambda other: other == value)
            return frozenset(stored) | {ImportedObject(public_full_name(f"{value.name}.{name}"))}
        if isinstance(value, _ProjectModule):
            return self._values_of_exported_name(value.module, name)
        if isinstance(value, _ClassInstance) and isinstance(value.of, ImportedObject):
            return frozenset({ImportedObject(f"{value.of.name}.{name}")})
        if isinstance(value, (_ProjectClass, _ClassInstance)):
            holder = value.scope if isinstance(value, _ProjectClass) else value.of
            assert isinstance(holder, Scope)
            return self._values_of_class_attribute(holder, name)
        if isinstance(value, _WrittenContainer):
            if name in ("items", "values", "get", "pop", "copy", "keys"):
                return frozenset({replace(value, level=value.level, name=f"{value.name}:{name}")})
            return frozenset({ImportedObject(f"builtins.{name}")})
        return NOT_KNOWN

    def _values_of_super_method(self, name: str, scope: Scope, receiver: Scope | None) -> Values:
        owner = scope.owner
        if owner is None:
            return NOT_KNOWN
        order = self._project_bases_and_first_outside(receiver if receiver is not None else owner)[0]
        behind = (
            order[order.index(owner) + 1 :]
            if owner in order
            else self._project_bases_and_first_outside(owner)[0][1:]
        )
        for each in behind:
            if (bindings := self._bindings_of_scope(each).get(name)) is not None:
                kept = _bindings_visible_at(bindings, None, each)
                return frozenset().union(*(self._values_of_binding(one, each, receiver) for one in kept))
        outside = self._project_bases_and_first_outside(owner)[1]
        return frozenset({ImportedObject(f"{outside}.{name}")}) if outside else NOT_KNOWN

    def _values_of_class_attribute(self, scope: Scope, name: str) -> Values:
        """Return what an attribute of an object of a class is, by its methods and by what is assigned to it."""
        order, outside = self._project_bases_and_first_outside(scope)
        found: set[Value] = set(
            self._values_stored_from_outside(name, lambda value: _may_be_of_classes(value, order))
        )
        for each in order:
            for value in each.values.get(f"self.{name}", ()):
                home = each.module.scope_of.get(strip_star(value), each)
                found |= self.values_of_expression(value, home, scope)
        for each in order:
            if (bindings := self._bindings_of_scope(each).get(name)) is None:
                continue
            for one in _bindings_visible_at(bindings, None, each):
                if isinstance(one.what, Scope) and _is_property(one.what.node):
                    found |= self._values_returned_by(ProjectFunction(one.what, scope))
                else:
                    found |= self._values_of_binding(one, each, scope)
            return frozenset(found)
        if found:
            return frozenset(found)
        if outside == "":
            return NOT_KNOWN
        if outside is not None:
            return frozenset({ImportedObject(f"{outside}.{name}")})
        return frozenset({ImportedObject(f"object.{name}")}) if name in OF_OBJECT else NOT_KNOWN

    def _project_bases_and_first_outside(self, scope: Scope) -> tuple[list[Scope], str | None]:
        """Return a class with its bases in the project, in the order of look-ups, and the first base outside.

        That is "" where a base is unknown.
        """
        if scope not in self._orders:
            self._orders[scope] = ([scope], None)  # for a class that names itself
            order, outside = [scope], None
            for expr in getattr(scope.node, "bases", []):
                for base in self.values_of_expression(expr, scope.parent or scope):
                    if isinstance(base, _ProjectClass):
                        inner, theirs = self._project_bases_and_first_outside(base.scope)
                        order += [each for each in inner if each not in order]
                        outside = theirs if outside is None else outside
                    elif isinstance(base, ImportedObject):
                        outside = (
                            base.name
                            if outside is None and base.name not in ("object", "abc.ABC")
                            else outside
                        )
                    else:
                        outside = ""
            self._orders[scope] = (order, outside)
        return self._orders[scope]

    def _values_of_call(self, node: ast.Call, scope: Scope, receiver: Scope | None) -> Values:
        inside = self.values_of_expression(node.func, scope, receiver)
        found: set[Value] = set()
        for each in inside:
            if isinstance(each, _ProjectClass):
                found.add(_ClassInstance(each.scope))
            elif isinstance(each, ProjectFunction):
                found |= self._values_returned_by(each)
            elif isinstance(each, ImportedObject):
                found |= self._values_of_outside_call(each.name, node, scope, receiver)
            elif isinstance(each, _WrittenContainer):
                found |= self._values_of_container_call(each, node, scope, receiver)
            elif isinstance(each, _ClassInstance) and isinstance(each.of, Scope):
                for one in self._functions_behind_values(frozenset({each})):
                    found |= self._values_returned_by(one) if isinstance(one, ProjectFunction) else NOT_KNOWN
            else:
                found.add(UNKNOWN)
        return frozenset(found)

    def _values_of_outside_call(
        self, name: str, node: ast.Call, scope: Scope, receiver: Scope | None
    ) -> Values:
        first = node.args[0] if node.args and not isinstance(node.args[0], ast.Starred) else None
        if name in ("functools.partial", "functools.partialmethod") and first is not None:
            inside = self.values_of_expression(first, scope, receiver)
            return frozenset(
                replace(each, given=(*each.given, node)) if isinstance(each, ProjectFunction) else each
                for each in inside
            )
        if name in SAME and first is not None:
            return self.values_of_expression(first, scope, receiver)
        if name in LISTS and first is not None:
            return self.values_of_expression(first, scope, receiver)
        if name.rpartition(".")[2] in GIVING_BACK and isinstance(node.func, ast.Attribute):
            return self.values_of_expression(node.func.value, scope, receiver)
        if name == "apex.amp.initialize":
            models_and_optimizers = _WrittenContainer(ast.Tuple(node.args[:2]), scope, receiver)
            return frozenset({models_and_optimizers}) if node.args else NOT_KNOWN
        if name == "getattr" and len(node.args) > 1:
            return self._values_of_getattr(node, scope, receiver)
        return NOT_KNOWN if name in GIVING_ANYTHING else _instance_from_outside(name)

    def _values_of_getattr(self, node: ast.Call, scope: Scope, receiver: Scope | None) -> Values:
        """Return what `getattr(object, name)` gives, and `getattr(object, name, default)`."""
        owner, member, *default = node.args
        if not (isinstance(member, ast.Constant) and isinstance(member.value, str)):
            return NOT_KNOWN
        owners = self.values_of_expression(owner, scope, receiver)
        found = set() if owners else set(NOT_KNOWN)
        for each in owners:
            found |= self._values_of_member(each, member.value)
        if default:
            found |= self.values_of_expression(default[0], scope, receiver)
        return frozenset(found)

    def _values_of_container_call(
        self, container: _WrittenContainer, node: ast.Call, scope: Scope, receiver: Scope | None
    ) -> Values:
        """Return what a method of a container gives."""
        name, _, method = container.name.rpartition(":")
        base = replace(container, name=name)
        if method == "items":
            return frozenset({replace(base, level=base.level + 1)})
        if method in ("values", "copy"):
            return frozenset({base})
        if method in ("get", "pop"):
            key = node.args[0] if node.args else None
            default = (
                self.values_of_expression(node.args[1], scope, receiver)
                if len(node.args) > 1
                else frozenset()
            )
            return self._elements_of_value(base, key) | default
        return NOT_KNOWN

    def _values_of_subscript(self, node: ast.Subscript, scope: Scope, receiver: Scope | None) -> Values:
        inside = self.values_of_expression(node.value, scope, receiver)
        if not inside:
            return NOT_KNOWN
        return frozenset().union(*(self._elements_of_value(each, node.slice) for each in inside))

    def _elements_of_value(self, value: Value, key: ast.expr | None = None) -> Values:
        """Return the elements of a value, or the one under a key that is written out."""
        if not isinstance(value, _WrittenContainer):
            return NOT_KNOWN
        if value.level:
            return frozenset({replace(value, level=value.level - 1)})
        node, asked = value.node, key.value if isinstance(key, ast.Constant) else None
        chosen: list[ast.expr] = []
        added = self._container_additions_by_name.get(value.name, [])
        if isinstance(node, ast.Dict):
            for name, one in zip(node.keys, node.values, strict=True):
                if asked is None or not isinstance(name, ast.Constant) or name.value == asked:
                    chosen.append(one if name is not None else ast.Starred(one))
        elif isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            chosen = list(node.elts)
            if isinstance(asked, int) and not added and -len(chosen) <= asked < len(chosen):
                chosen = [chosen[asked]]
        elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            chosen = [node.elt]
        elif isinstance(node, ast.DictComp):
            chosen = [node.value]
        found: set[Value] = set()
        for one in chosen:
            home = value.scope.module.scope_of.get(strip_star(one), value.scope)
            found |= self.values_of_expression(one, home, value.receiver)
        for one, home in added:
            if not any(one is each for each in chosen):
                found |= self.values_of_expression(one, home)
        return frozenset(found) if found else NOT_KNOWN

    def _values_returned_by(self, function: ProjectFunction) -> Values:
        node, scope = function.scope.node, function.scope
        if isinstance(node, ast.Lambda):
            return self.values_of_expression(node.body, scope, function.receiver)
        assert isinstance(node, FunctionNode)
        found: set[Value] = set()
        for each in own_nodes_of_scope(scope):
            if isinstance(each, (ast.Yield, ast.YieldFrom)):
                return NOT_KNOWN
            if isinstance(each, ast.Return) and each.value is not None:
                found |= self.values_of_expression(each.value, scope, function.receiver)
        return frozenset(found)

    def _functions_behind_values(
        self, values: Iterable[Value]
    ) -> list[ProjectFunction | ImportedObject | _UnknownValue]:
        """Return the functions that run where values are called."""
        found: list[ProjectFunction | ImportedObject | _UnknownValue] = []
        for each in values:
            if isinstance(each, (ProjectFunction, ImportedObject)):
                found.append(each)
            elif isinstance(each, _ProjectClass):
                found += self._constructors_of_class(each.scope)
            elif isinstance(each, _ClassInstance) and isinstance(each.of, Scope):
                found += self._functions_behind_object_call(each.of)
            elif isinstance(each, _ClassInstance) and isinstance(each.of, ImportedObject):
                found.append(ImportedObject(f"{each.of.name}.__call__"))
            elif isinstance(each, _WrittenContainer) and ":" in each.name:
                found.append(ImportedObject(f"builtins.{each.name.rpartition(':')[2]}"))
            else:
                found.append(UNKNOWN)
        return found

    def _constructors_of_class(self, scope: Scope) -> list[ProjectFunction | ImportedObject | _UnknownValue]:
        order, outside = self._project_bases_and_first_outside(scope)
        for each in order:
            if (bindings := self._bindings_of_scope(each).get("__init__")) is not None:
                return [ProjectFunction(one.what, scope) for one in bindings if isinstance(one.what, Scope)]
        return [UNKNOWN] if outside == "" else [ImportedObject(outside or "object")]

    def _functions_behind_object_call(
        self, scope: Scope
    ) -> list[ProjectFunction | ImportedObject | _UnknownValue]:
        for name in ("__call__", "forward"):
            for each in self._project_bases_and_first_outside(scope)[0]:
                if (bindings := self._bindings_of_scope(each).get(name)) is not None:
                    return [
                        ProjectFunction(one.what, scope) for one in bindings if isinstance(one.what, Scope)
                    ] or [UNKNOWN]
        return [UNKNOWN]

    # Tables, each made once.

    def _bindings_of_scope(self, scope: Scope) -> dict[str, list[_Binding]]:
        if scope not in self._bindings:
            self._bindings |= _bindings_by_scope(scope.module)
            self._add_star_bindings(scope.module.top)
        return self._bindings[scope]

    def _add_star_bindings(self, top: Scope) -> None:
        """Add what `import *` from modules of the project binds."""
        module = top.module
        for statement, alias, full in module.imports:
            if alias.name != "*":
                continue
            path = None if self._project is None else self._project.path_of(module)
            found = (
                None
                if self._project is None or path is None
                else self._project.find_file_and_name_of_definition(path, full)
            )
            place = None if found is None else found[0]
            target = None if place is None or self._project is None else self._project.module_of_file(place)
            if target is None or target is module:
                continue
            always = _runs_always(module, statement, top)
            for name in self._public_names_of(target):
                prefix = full.removesuffix("*")
                binding = _Binding((statement.lineno, statement.col_offset), always, statement, prefix + name)
                known = self._bindings[top].setdefault(name, [])
                known.append(binding)
                known.sort(key=lambda each: each.place)

    def _public_names_of(self, module: Module) -> set[str]:
        lists = (
            each for each in module.top.values.get("__all__", []) if isinstance(each, (ast.List, ast.Tuple))
        )
        listed = {str(one.value) for each in lists for one in each.elts if isinstance(one, ast.Constant)}
        return listed or {name for name in self._bindings_of_scope(module.top) if not name.startswith("_")}

    @_project_cached_property
    def _subclasses_by_scope(self) -> dict[Scope, list[Scope]]:
        found: dict[Scope, list[Scope]] = defaultdict(list)
        for module in self.modules:
            for scope in module.scopes:
                if isinstance(scope.node, ast.ClassDef) and scope.node.bases:
                    for base in self._project_bases_and_first_outside(scope)[0][1:]:
                        found[base].append(scope)
        return found

    @_project_cached_property
    def _stores_by_attribute(self) -> dict[str, list[tuple[ast.expr, ast.expr, Scope]]]:
        """What is assigned to attributes of other objects than `self`: by name, the object and the value."""
        found: dict[str, list[tuple[ast.expr, ast.expr, Scope]]] = defaultdict(list)
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Attribute) and dotted_name(target.value) != "self":
                            found[target.attr].append((target.value, node.value, module.scope_of[node]))
                elif isinstance(node, ast.Call) and last_name(node.func) == "setattr" and len(node.args) == 3:
                    if isinstance(node.args[1], ast.Constant):
                        found[str(node.args[1].value)].append(
                            (node.args[0], node.args[2], module.scope_of[node])
                        )
        return found

    def _values_stored_from_outside(self, name: str, fits: Callable[[Value], bool]) -> set[Value]:
        """Return what is assigned to an attribute of an object from outside of it, where the object may be that one."""
        found: set[Value] = set()
        for owner, value, scope in self._stores_by_attribute.get(name, ()):
            if isinstance(value, ast.Constant):
                continue
            owners = self.values_of_expression(owner, scope)
            if any(fits(each) for each in owners):
                found |= self.values_of_expression(value, scope)
        return found

    @_project_cached_property
    def _container_additions_by_name(self) -> dict[str, list[tuple[ast.expr, Scope]]]:
        """What is added to lists and dicts, by the last part of their names."""
        found: dict[str, list[tuple[ast.expr, Scope]]] = defaultdict(list)
        for module in self.modules:
            for call, owner in module.method_calls(*ADDING):
                for value in argument_values(call):
                    found[last_name(owner)].append((value, module.scope_of[call]))
            for node in module.nodes:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                    found[last_name(node.targets[0].value)].append((node.value, module.scope_of[node]))
        found.pop("", None)
        return found

    @_project_cached_property
    def _decorated_by_function(self) -> dict[Scope, list[Scope]]:
        """The functions that each function of the project decorates, itself or by what it returns."""
        found: dict[Scope, list[Scope]] = defaultdict(list)
        for module in self.modules:
            for scope in module.scopes:
                for decorator in getattr(scope.node, "decorator_list", []):
                    for each in self._functions_behind_values(
                        self.values_of_expression(decorator, scope.parent or scope)
                    ):
                        if isinstance(each, ProjectFunction):
                            found[each.scope].append(scope)
        return found

    @_project_cached_property
    def _scopes_around_calls(self) -> dict[ast.Call, Scope]:
        """For each call of the modules, the function or module in which it stands."""
        return {call: module.scope_of[call] for module in self.modules for call in module.calls}

    @_project_cached_property
    def _calls_by_last_name_and_other_uses(self) -> tuple[dict[str, list[ast.Call]], set[str]]:
        """All calls by the last part of the name of their function, and the names that are used otherwise."""
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        passed: set[str] = set()
        for module in self.modules:
            called = {id(call.func) for call in module.calls}
            called |= {
                id(each) for scope in module.scopes for each in getattr(scope.node, "decorator_list", [])
            }
            for call in module.calls:
                calls[last_name(call.func)].append(call)
            for node in module.nodes:
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
                    if id(node) not in called and not isinstance(module.parent(node), ast.Attribute):
                        passed.add(last_name(node))
        return calls, passed

    @_project_cached_property
    def _aliases_by_name(self) -> dict[str, set[str]]:
        """What imports call a name instead."""
        found: dict[str, set[str]] = defaultdict(set)
        for module in self.modules:
            for _, alias, _ in module.imports:
                if alias.asname is not None:
                    found[alias.name].add(alias.asname)
        return found

    @_project_cached_property
    def _calls_through_variables(self) -> list[ast.Call]:
        """All calls by a name that holds a value, such as a parameter, an attribute or what a decorator made."""
        names = {""}
        for module in self.modules:
            for scope in module.scopes:
                names |= scope.parameters | {name.rpartition(".")[2] for name in scope.values}
                if getattr(scope.node, "decorator_list", ()):
                    names.add(scope.node.name)  # type: ignore[union-attr]
        names |= self._stores_by_attribute.keys()
        return [
            call
            for name in sorted(names)
            for call in self._calls_by_last_name_and_other_uses[0].get(name, ())
        ]

    @property
    def is_answering_question(self) -> bool:
        """Whether a question is being answered, so that answers to others may be incomplete."""
        return bool(self._active)

    @_project_cached_property
    def _calls_by_function(self) -> _CallsByFunction:
        return _CallsByFunction(self)

    @property
    def _functions_with_unseen_calls(self) -> _FunctionsWithUnseenCalls:
        return _FunctionsWithUnseenCalls(self)


class _CallsByFunction:
    """The calls of each function, found when they are asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: dict[Scope, list[ast.Call]] = {}
        self._called: dict[ast.Call, frozenset[Scope]] = {}
        self._meanwhile: dict[Scope, list[ast.Call]] = {}
        self._called_meanwhile: dict[ast.Call, frozenset[Scope]] = {}

    def get(self, scope: Scope, default: list[ast.Call]) -> list[ast.Call]:
        """Return the calls that name a function."""
        if scope in self._known:
            return self._known[scope] or default
        if not self._index.is_answering_question:
            self._meanwhile.clear()
            self._called_meanwhile.clear()
        if scope not in self._meanwhile:
            self._meanwhile[scope] = []  # for a function that calls itself
            self._meanwhile[scope] = self._find_calls_of(scope)
            if not self._index.is_answering_question:
                self._known[scope] = self._meanwhile[scope]
        return self._meanwhile[scope] or default

    def _find_calls_of(self, scope: Scope) -> list[ast.Call]:
        index, name = self._index, getattr(scope.node, "name", "")
        by_name, passed = index._calls_by_last_name_and_other_uses
        names = {name} | index._aliases_by_name.get(name, set())
        if name in ("__init__", "__call__", "forward") and scope.owner is not None:
            names = {
                getattr(each.node, "name", "")
                for each in (scope.owner, *index._subclasses_by_scope.get(scope.owner, ()))
            }
            names |= {name}
        calls = [call for each in names for call in by_name.get(each, ())]
        if names & passed or name in ("__call__", "forward") or not name or _has_nonbuiltin_decorator(scope):
            # it may go by the name of any variable
            calls = list(dict.fromkeys([*calls, *index._calls_through_variables]))
        return [call for call in calls if scope in self._scopes_named_by_call(call)]

    def _scopes_named_by_call(self, call: ast.Call) -> frozenset[Scope]:
        known = self._called.get(call, self._called_meanwhile.get(call))
        if known is None:
            callee = self._index.callee(call, self._index._scopes_around_calls[call])
            known = frozenset(
                each.scope for each in functions_of_callee(callee) if isinstance(each, ProjectFunction)
            )
            # What is found within a question may lack what that question is about.
            (self._called_meanwhile if self._index.is_answering_question else self._called)[call] = known
        return known


class _FunctionsWithUnseenCalls:
    """The functions that may be called where no call of the project names them."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __contains__(self, scope: Scope) -> bool:
        index, name = self._index, getattr(scope.node, "name", "")
        if not name or any(
            _may_decorator_register_function(each) for each in getattr(scope.node, "decorator_list", [])
        ):
            return True
        if name in index._calls_by_last_name_and_other_uses[1]:
            return True
        if isinstance(scope.parent, Scope) and isinstance(scope.parent.node, ast.ClassDef):
            return any(
                isinstance(index.callee(call, index._scopes_around_calls[call]), UnknownFunction)
                for call in index._calls_by_last_name_and_other_uses[0].get(name, ())
                if _may_be_call_of(call, scope)
            )
        return False


def _may_be_call_of(call: ast.Call, method: Scope) -> bool:
    """Return whether a call gives a method of its name what that needs, and is none of a loss or an optimizer."""
    node = method.node
    assert isinstance(node, FunctionNode)
    owner = last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if NO_PROJECT_CLASS.search(owner):
        return False
    if any(isinstance(each, ast.Starred) for each in call.args) or any(
        one.arg is None for one in call.keywords
    ):
        return True
    needed = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults) - 1
    most = len(node.args.posonlyargs) + len(node.args.args) - 1
    given = len(call.args) + len(call.keywords)
    return needed <= given and (given <= most or node.args.kwarg is not None or node.args.vararg is not None)


def functions_of_callee(callee: Callee) -> tuple[ProjectFunction | ImportedObject, ...]:
    """Return all that a call may name, as far as it is known."""
    if isinstance(callee, SeveralFunctions):
        return callee.choices
    return callee.candidates if isinstance(callee, UnknownFunction) else (callee,)


def own_nodes_of_scope(scope: Scope) -> Iterator[ast.AST]:
    """Yield the nodes that run when a function does, or a module: without those of functions in it."""
    node = scope.node
    waiting: list[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else list(node.body)
    for each in waiting:  # which grows meanwhile
        if isinstance(each, FunctionNode | ast.Lambda):
            continue
        yield each
        waiting += child_nodes(each)


def _callee_from_candidates(candidates: list[ProjectFunction | ImportedObject | _UnknownValue]) -> Callee:
    known = tuple(dict.fromkeys(each for each in candidates if not isinstance(each, _UnknownValue)))
    if len(known) < len(set(candidates)) or not known:
        return UnknownFunction(known)
    return known[0] if len(known) == 1 else SeveralFunctions(known)


def _instance_from_outside(name: str) -> Values:
    return frozenset({_ClassInstance(ImportedObject(name))})


def _values_with_named_containers(values: Values, name: str) -> Values:
    """Return values in which containers know the name that they are bound to."""
    if not any(isinstance(each, _WrittenContainer) and not each.name for each in values):
        return values
    return frozenset(
        replace(each, name=name) if isinstance(each, _WrittenContainer) and not each.name else each
        for each in values
    )


def _may_be_of_classes(value: Value, order: list[Scope]) -> bool:
    """Return whether a value is one of some classes, an object of one, or not known."""
    if isinstance(value, _ClassInstance):
        return value.of in order
    if isinstance(value, _ProjectClass):
        return value.scope in order
    return value is UNKNOWN


def _is_property(node: ast.AST) -> bool:
    return any(dotted_name(each) in PROPERTIES for each in getattr(node, "decorator_list", []))


def _has_decorator(node: ast.AST, name: str) -> bool:
    return any(dotted_name(each) == name for each in getattr(node, "decorator_list", []))


def _has_nonbuiltin_decorator(scope: Scope) -> bool:
    plain = {"staticmethod", "classmethod", *PROPERTIES}
    return any(dotted_name(each) not in plain for each in getattr(scope.node, "decorator_list", []))


def _may_decorator_register_function(node: ast.expr) -> bool:
    """Return whether a decorator may register the function, so that others call it."""
    name = dotted_name(node.func if isinstance(node, ast.Call) else node) or ""
    return "regist" in name.lower() or name.endswith((".command", ".main", ".connect", ".on", ".hook"))


def _decorator_returns_function(scope: Scope) -> bool:
    """Return whether a decorator gives back the function itself."""
    return any(
        isinstance(each, ast.Return)
        and isinstance(each.value, ast.Name)
        and each.value.id in scope.parameters
        for each in own_nodes_of_scope(scope)
    )


def _defaults_of_parameters(arguments: ast.arguments, positional: list[str]) -> dict[str, ast.expr]:
    """Return the defaults of parameters by their names.

    Args:
        arguments: of a function.
        positional: the names of those that are passed by their place, without the first of a method.
    """
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            defaults[each.arg] = value
    return defaults


def _argument_given_for(call: ast.Call, positional: list[str], name: str) -> ast.expr | object | None:
    """Return what a call gives for a parameter: None for nothing, an ellipsis where that cannot be seen."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    for place, value in enumerate(call.args):
        if isinstance(value, ast.Starred):
            return Ellipsis
        if place < len(positional) and positional[place] == name:
            return value
    return Ellipsis if any(one.arg is None for one in call.keywords) else None


def _bindings_visible_at(bindings: list[_Binding], use: ast.AST | None, home: Scope) -> list[_Binding]:
    """Return the bindings that a use may see: none that another one, which always runs, has replaced.

    Args:
        use: that stands in the scope of the bindings; None for one that runs later than all of them.
    """
    module = home.module
    if use is not None and hasattr(use, "lineno"):
        place = (use.lineno, use.col_offset)  # type: ignore[attr-defined]
        loops = [each for each in module.ancestors_up_to_function(use) if isinstance(each, LoopNode)]
        again = [each for each in bindings if any(_is_inside(module, each.node, loop) for loop in loops)]
        before = [each for each in bindings if each.place < place]
        kept = before[_index_of_last_sure_binding(before) :]
        return [*kept, *(each for each in again if each not in kept)] or bindings
    return bindings[_index_of_last_sure_binding(bindings) :]


def _is_inside(module: Module, node: ast.AST, outer: ast.AST) -> bool:
    return any(each is outer for each in (node, *module.ancestors(node)))


def _index_of_last_sure_binding(bindings: list[_Binding]) -> int:
    return max((place for place, each in enumerate(bindings) if each.always), default=0)


def _bindings_by_scope(module: Module) -> dict[Scope, dict[str, list[_Binding]]]:
    """Return what binds each name in each scope of a module, in the order of the source."""
    found: dict[Scope, dict[str, list[_Binding]]] = {scope: {} for scope in module.scopes}

    def add(
        scope: Scope, name: str, node: ast.AST, what: ast.expr | Scope | str, value: ast.expr | None = None
    ) -> None:
        holder = module.top if name in scope.globals else scope
        always = holder is scope and _runs_always(module, node, scope)
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        if value is not None:  # a name in the value is still what it was before
            place = (getattr(value, "end_lineno", 0), getattr(value, "end_col_offset", 0))
        found[holder].setdefault(name, []).append(_Binding(place, always, node, what))

    for statement, alias, full in module.imports:
        scope = module.scope_of[statement]
        if alias.name == "*":
            source = full.removesuffix("*").removesuffix(".")
            for name in STARS.get(source, ()):
                add(scope, name, statement, f"{source}.{name}")
        elif isinstance(statement, ast.Import) and alias.asname is None:
            head = full.partition(".")[0]
            add(scope, head, statement, head)
        else:
            add(scope, alias.asname or alias.name, statement, full)
    for node, scope in module.scope_from.items():
        if scope.parent is not None and not isinstance(node, ast.Lambda):
            add(scope.parent, node.name, node, scope)  # type: ignore[attr-defined]
    for scope in module.scopes:
        for name, values in scope.values.items():
            if "." not in name:
                for value in values:
                    inner = strip_star(value)
                    home = module.statement_around(inner) if inner in module.parents else inner
                    add(scope, name, home, _element_for_target(home, name, value), inner)
    for table in found.values():
        for bindings in table.values():
            bindings.sort(key=lambda each: each.place)
    return found


def _element_for_target(statement: ast.AST, name: str, value: ast.expr) -> ast.expr:
    """Return the element of a value that a name gets, by its place among the targets, where that is seen."""
    if (
        isinstance(value, ast.Starred)
        and not isinstance(value.value, ast.Starred)
        and isinstance(statement, ast.Assign)
    ):
        target = statement.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)) and not any(
            isinstance(one, ast.Starred) for one in target.elts
        ):
            for place, one in enumerate(target.elts):
                if isinstance(one, ast.Name) and one.id == name:
                    return ast.Subscript(value.value, ast.Constant(place), ast.Load())
    return value


def _runs_always(module: Module, node: ast.AST, scope: Scope) -> bool:
    """Return whether a statement runs whenever its scope does."""
    if node is scope.node:
        return False
    for outer in module.ancestors(node):
        if outer is scope.node:
            return True
        if not isinstance(outer, WithNode):
            return False
    return True
