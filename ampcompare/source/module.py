"""One module as source: its tree with parents and scopes, what its names mean, and the text of each node.

`ast` rather than a concrete syntax tree: it is several times faster, and edits at exact positions keep comments and
formatting by themselves.
"""

from __future__ import annotations

import ast
import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ampcompare.source.amp_names import APEX, STARS, public_full_name
from ampcompare.source.syntax import (
    NEWLINE,
    DefinitionNode,
    ForNode,
    FunctionNode,
    ImportNode,
    arguments,
    child_nodes,
    dotted_name,
    is_literal,
    last_name,
    parameter_names_without_stars,
    parse_tree,
)

Block: TypeAlias = list[ast.stmt]
BLOCKS = ("body", "orelse", "finalbody")
MAX_ALIASES = 8


class SourceText:
    """A text by lines and columns, as `ast` counts them: lines from 1, columns in bytes of UTF-8.

    Attributes:
        text: the source.
        starts: where each line begins in it; the last one is empty where the text ends with a newline.
        newline: the first one of the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]
        first = NEWLINE.search(text)
        self.newline = first.group() if first else "\n"
        self._is_ascii = text.isascii()

    def line_start(self, line: int) -> int:
        """Return where a line begins; behind the last line, the end of the text."""
        return self.starts[line - 1] if line <= len(self.starts) else len(self.text)

    def line_text(self, line: int) -> str:
        """Return a line with its end."""
        return self.text[self.line_start(line) : self.line_start(line + 1)]

    def line_at(self, offset: int) -> int:
        """Return the line of a character."""
        return bisect_right(self.starts, offset)

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a position."""
        start = self.line_start(line)
        if self._is_ascii:
            return start + column
        return start + len(self.line_text(line).encode("utf-8")[:column].decode("utf-8", "ignore"))

    def column_in_characters(self, line: int, column: int) -> int:
        """Return a column in characters."""
        return self.offset(line, column) - self.line_start(line)

    def first_line(self, node: ast.AST) -> int:
        """Return the line where a node begins, decorators included."""
        decorators = getattr(node, "decorator_list", [])
        return decorators[0].lineno if decorators else node.lineno  # type: ignore[attr-defined,no-any-return]

    def start_of(self, node: ast.AST) -> int:
        """Return where a node begins; decorators are a part of what they decorate."""
        decorators = getattr(node, "decorator_list", [])
        if decorators:
            return self.offset(decorators[0].lineno, decorators[0].col_offset - 1)
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end_of(self, node: ast.AST) -> int:
        """Return where a node ends."""
        return self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.start_of(node), self.end_of(node)

    def source(self, node: ast.AST) -> str:
        """Return the text of a node as it is written."""
        return self.text[self.start_of(node) : self.end_of(node)]

    def indent(self, node: ast.AST) -> str:
        """Return the white space at the begin of the line of a node."""
        return self.line_indent(self.first_line(node))

    def line_indent(self, line: int) -> str:
        """Return the white space at the begin of a line."""
        text = self.line_text(line)
        return text[: len(text) - len(text.lstrip(" \t\f"))]

    def begins_line(self, node: ast.AST) -> bool:
        """Return whether nothing else stands before a node on its line."""
        return not self.text[self.line_start(self.first_line(node)) : self.start_of(node)].strip()

    def ends_line(self, node: ast.AST) -> bool:
        """Return whether nothing but a comment stands behind a node on its last line."""
        tail = self.text[self.end_of(node) : self.line_start(node.end_lineno + 1)].strip()  # type: ignore[attr-defined]
        return not tail or tail.startswith("#")

    def is_elif(self, node: ast.AST) -> bool:
        """Return whether a statement is the `elif` of another one."""
        return self.text.startswith("elif", self.start_of(node))

    def is_alone_on_lines(self, statement: ast.stmt) -> bool:
        """Return whether a statement shares its lines with no other; a comment may follow it."""
        return self.begins_line(statement) and self.ends_line(statement)


@dataclass(eq=False)
class Scope:
    """One module, class or function.

    Attributes:
        node: what it belongs to.
        module: in which it is.
        parent: the scope around it; None for the module.
        function: the innermost `def` that it is, or is in; None at the top of the module or of a class.
        owner: the class whose method this is.
        imports: every full name that imports bind to a local name, as of `try` and `except`, in their order.
        parameters: of the function.
        values: what is assigned to a name, or in methods to an attribute such as `self.scaler`, by its dotted text.
        functions: that are defined in it.
        globals: names that it declares to be those of the module.
    """

    node: ast.Module | ast.ClassDef | FunctionNode | ast.Lambda
    module: Module
    parent: Scope | None
    function: FunctionNode | None = None
    owner: Scope | None = None
    imports: dict[str, list[str]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    values: dict[str, list[ast.expr]] = field(default_factory=dict)
    functions: dict[str, Scope] = field(default_factory=dict)
    globals: set[str] = field(default_factory=set)

    def bind_name(self, name: str, full_name: str) -> None:
        """Let a name mean something of another module."""
        known = self.imports.setdefault(name, [])
        if full_name not in known:
            known.append(full_name)

    def lookup_scopes(self) -> Iterator[Scope]:
        """Yield the scopes in which a name of this one is looked up."""
        scope: Scope | None = self
        while scope is not None:
            if scope is self or not isinstance(scope.node, ast.ClassDef):
                yield scope
            scope = scope.parent


class ImportedName(NamedTuple):
    """One name of an import.

    Attributes:
        statement: that imports it.
        alias: how.
        full: its full name, `apex.*` for all of a module; it begins with dots for what is next to this module.
    """

    statement: ImportNode
    alias: ast.alias
    full: str


class Module(SourceText):
    """A module that was parsed.

    Attributes:
        tree: its root.
        nodes: parents before what they hold, in the order of the source; without contexts and operators.
        parents: the node around each node.
        scope_of: the scope in which each node is evaluated.
        top: the outermost scope.
        scopes: all scopes, the outer ones first.
        scope_from: the scope that a class, function or lambda makes.
        calls: all calls, in the order of the source.
        imports: all imports, in the order of the source.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tree = parse_tree(text)
        self.top = Scope(self.tree, self, None)
        self.scopes = [self.top]
        self.scope_from: dict[ast.AST, Scope] = {self.tree: self.top}
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scope_of: dict[ast.AST, Scope] = {self.tree: self.top}
        self.calls: list[ast.Call] = []
        self.imports: list[ImportedName] = []
        self._bindings = defaultdict[tuple[Scope, str], list[tuple[ast.stmt, str]]](list)
        self._bound: dict[tuple[Scope, str], list[tuple[ast.stmt, str | None]]] = {}
        self._known: dict[tuple[Scope, str], str | None] = {}
        self._resolved: dict[tuple[ast.AST, Scope, bool], str | None] = {}
        self._passing = 0
        self._read_tree()
        self.calls.sort(key=lambda call: (call.lineno, call.col_offset))

    # The tree.

    def _read_tree(self) -> None:
        waiting: list[ast.AST] = [self.tree]
        parents = self.parents
        scope_of = self.scope_of
        nodes = self.nodes
        while waiting:
            node = waiting.pop()
            nodes.append(node)
            inside = child_nodes(node)
            scope = scope_of[node]
            read = READERS.get(node.__class__)
            if read is not None:
                scope = read(self, node, scope)
            if inside:
                parents.update(dict.fromkeys(inside, node))
                scope_of.update(dict.fromkeys(inside, scope))
                inside.reverse()
                waiting += inside

    def parent(self, node: ast.AST) -> ast.AST:
        """Return the node that holds another; the module holds itself."""
        return self.parents.get(node, self.tree)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first, the module last."""
        while node is not self.tree:
            node = self.parent(node)
            yield node

    def outermost_statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement of the module itself that a node is in."""
        return next(each for each in self.tree.body if self.is_in_statements(node, [each]))

    def is_in_statements(self, node: ast.AST, block: Block) -> bool:
        """Return whether a node is one of some statements, or in one of them."""
        around = [node, *self.ancestors(node)]
        return any(each in around for each in block)

    def ancestors_up_to_function(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node up to its function, or up to the module where it is in none."""
        for outer in self.ancestors(node) if not isinstance(node, FunctionNode) else ():
            yield outer
            if isinstance(outer, FunctionNode):
                break

    def statement_around(self, node: ast.AST) -> ast.stmt:
        """Return the smallest statement around an expression, or the statement itself."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block_of(self, statement: ast.stmt) -> Block:
        """Return the list of statements that a statement stands in."""
        for block in self.child_blocks(self.parent(statement)):
            if any(each is statement for each in block):
                return block
        raise LookupError(ast.dump(statement))

    def block_and_place(self, statement: ast.stmt) -> tuple[Block, int]:
        """Return the block in which a statement stands, and its place there."""
        block = self.block_of(statement)
        return block, block.index(statement)

    def parent_statement(self, statement: ast.stmt) -> ast.stmt | None:
        """Return the statement that holds another one; None for a statement of the module itself."""
        return next((each for each in self.ancestors(statement) if isinstance(each, ast.stmt)), None)

    @staticmethod
    def child_blocks(node: ast.AST) -> Iterator[Block]:
        """Yield the lists of statements directly below a node."""
        for name in BLOCKS:
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block
        for handler in getattr(node, "handlers", []):
            yield handler.body
        for case in getattr(node, "cases", []):
            yield case.body

    def function_around(self, node: ast.AST) -> FunctionNode | None:
        """Return the innermost function around a node; None at the top of the module or of a class."""
        scope = self.scope_of.get(node)
        return None if scope is None else scope.function

    def class_of(self, function: FunctionNode | None) -> ast.ClassDef | None:
        """Return the class whose method a function is."""
        holder = None if function is None else self.scope_of[function].node
        return holder if isinstance(holder, ast.ClassDef) else None

    def functions_around(self, node: ast.AST) -> Iterator[FunctionNode]:
        """Yield the functions around a node, the innermost first."""
        while (function := self.function_around(node)) is not None:
            yield function
            node = function

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield the calls of methods of some names, with the object of each."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call, call.func.value

    def positional_parameters_without_self(self, function: FunctionNode) -> list[str]:
        """Return the parameters that a call gives by position: without `self` or `cls` of a method."""
        names = parameter_names_without_stars(function, positional=True)
        return (
            names[1:] if self.class_of(function) is not None and names[:1] in (["self"], ["cls"]) else names
        )

    @functools.cached_property
    def indentation_unit(self) -> str:
        """The unit of indentation."""
        for node in self.nodes:
            if isinstance(node, ast.stmt) and node.col_offset and isinstance(self.parent(node), ast.stmt):
                outer, inner = self.indent(self.parent(node)), self.indent(node)
                if inner.startswith(outer) and len(inner) > len(outer):
                    return inner[len(outer) :]
        return "    "

    # What the tree binds.

    def _open_scope(self, node: FunctionNode | ast.Lambda | ast.ClassDef, scope: Scope) -> Scope:
        inner = Scope(node, self, scope, scope.function)
        if isinstance(scope.node, ast.ClassDef):
            inner.owner = scope
        elif not isinstance(node, ast.ClassDef):
            inner.owner = scope.owner  # a function inside a method sees its `self`
        if not isinstance(node, ast.ClassDef):
            given = node.args
            named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            inner.parameters = {argument.arg for argument in named if argument is not None}
        if not isinstance(node, ast.Lambda):
            scope.functions[node.name] = inner
            if not isinstance(node, ast.ClassDef):
                inner.function = node
        self.scope_from[node] = inner
        self.scopes.append(inner)
        return inner

    def _read_call(self, node: ast.Call, scope: Scope) -> Scope:
        self.calls.append(node)
        return scope

    def _read_global(self, node: ast.Global, scope: Scope) -> Scope:
        scope.globals.update(node.names)
        for name in node.names:  # an import may stand above
            for full in scope.imports.pop(name, []):
                self.top.bind_name(name, full)
        return scope

    def _read_import(self, node: ast.Import, scope: Scope) -> Scope:
        for alias in node.names:
            self.imports.append(ImportedName(node, alias, alias.name))
            head = alias.name.partition(".")[0]
            self._bind_imported(node, scope, alias.asname or head, alias.name if alias.asname else head)
        return scope

    def _read_import_from(self, node: ast.ImportFrom, scope: Scope) -> Scope:
        module = "." * node.level + (node.module or "")
        prefix = f"{module}." if node.module else module
        for alias in node.names:
            self.imports.append(ImportedName(node, alias, prefix + alias.name))
            names = {name: name for name in STARS.get(module, ())}
            for name, theirs in (
                names if alias.name == "*" else {alias.asname or alias.name: alias.name}
            ).items():
                self._bind_imported(node, scope, name, prefix + theirs)
        return scope

    def _bind_imported(self, statement: ast.stmt, scope: Scope, name: str, full_name: str) -> None:
        holder = self.top if name in scope.globals else scope
        holder.bind_name(name, full_name)
        self._bindings[holder, name].append((statement, full_name))

    def _read_assignment(self, node: ast.AST, scope: Scope) -> Scope:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ForNode | ast.comprehension):
            pairs = [(node.target, ast.Starred(node.iter))]  # an element, whatever it is
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            pairs = [(node.optional_vars, ast.Starred(node.context_expr))]
        while pairs:
            target, value = pairs.pop(0)
            if isinstance(target, (ast.Tuple, ast.List)):
                values: list[ast.expr] = [ast.Starred(value) for _ in target.elts]
                if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                    values = value.elts
                pairs += zip(target.elts, values, strict=True)
            elif (text := dotted_name(target)) is not None:
                holder = scope.owner if text.startswith("self.") and scope.owner is not None else scope
                holder.values.setdefault(text, []).append(value)
        return scope

    # What names mean.

    def values_of(self, text: str, scope: Scope) -> list[ast.expr] | None:
        """Return what the scopes around assign to a name or attribute; None where nothing says, as for a parameter."""
        if "." in text:
            if text.startswith("self.") and scope.owner is not None:
                found = scope.owner.values.get(text)
                return None if found is None else flatten_conditional_values(found)
        head = text.partition(".")[0]
        for one in scope.lookup_scopes():
            if text in one.values:
                return flatten_conditional_values(one.values[text])
            if head in one.parameters:
                return None
        return None

    def resolve(
        self, node: ast.AST, scope: Scope | None = None, *, follow: bool = True, depth: int = 0
    ) -> str | None:
        """Return the full name of an expression by imports, such as `apex.amp.initialize`, or None.

        Where several imports bind a name, and none surely follows the others, that of Apex counts, else the last. What
        the module binds itself below them takes their place. A parameter is what all calls of its function in this
        module pass for it.

        Args:
            scope: in which it is looked up; by default that in which it stands.
            follow: whether to look at what is assigned to a name, if that is no more than another name.
        """
        scope = scope or self.scope_of.get(node, self.top)
        if depth or self._passing:  # within a question, whose answer may be incomplete
            return self._resolve(node, scope, follow, depth)
        key = (node, scope, follow)
        if key not in self._resolved:
            self._resolved[key] = self._resolve(node, scope, follow, depth)
        return self._resolved[key]

    def _resolve(self, node: ast.AST, scope: Scope, follow: bool, depth: int) -> str | None:
        text = dotted_name(node)
        if text is None or depth > MAX_ALIASES:
            return None
        head, _, rest = text.partition(".")
        for one in scope.lookup_scopes():
            if head in one.imports:
                full = self._imported_name_at(node, one, head)
                if full is not None:
                    return _public_full_name(full, rest)
                if head in one.functions:
                    return None  # its own, which stands below the imports
            values = None if head in one.globals else one.values.get(head)
            if values is not None and not (len(values) == 1 and dotted_name(values[0]) == head):
                return self._resolve_through_value(values, one, rest, depth) if follow else None
            if head in one.parameters and head != "self" and follow:
                base = self._name_passed_for(one, head)
                return None if base is None else _public_full_name(base, rest)
            if head in one.parameters or head in one.functions:
                break
        if follow and head == "self" and scope.owner is not None and rest:
            name, _, beyond = rest.partition(".")
            inside = next(iter(scope.owner.functions.values()), scope)
            return self._resolve_through_value(
                scope.owner.values.get(f"self.{name}", []), inside, beyond, depth
            )
        return None

    def _imported_name_at(self, node: ast.AST, scope: Scope, name: str) -> str | None:
        """Return the full name that the imports of a scope bind to a name, where a node stands.

        None where what the scope binds itself, below all of them, surely takes their place.
        """
        names = scope.imports[name]
        if len(names) == 1 and name not in scope.functions and name not in scope.values:
            return names[0]
        is_there = isinstance(node, ast.expr) and self._runs_where_it_stands(node, scope)
        end = (node.lineno, node.col_offset) if is_there and isinstance(node, ast.expr) else None
        bindings = self._bindings_not_surely_replaced(scope, name, end)
        if is_there and len(names) > 1 and bindings:
            statement, full = bindings[-1]
            if full is not None and self._is_block_around_later_node(statement, node):
                return full
        found = [full for _, full in bindings if full is not None]
        if bindings and not found:
            return None
        found = found or names
        return next((full for full in found if full.partition(".")[0] in APEX), found[-1])

    def _runs_where_it_stands(self, node: ast.expr, scope: Scope) -> bool:
        """Return whether an expression of a scope is evaluated with the statement around it, not in a later call."""
        below: ast.AST = node
        for outer in self.ancestors(node):
            if outer is scope.node:
                return True
            if isinstance(outer, ast.Lambda) or (isinstance(outer, FunctionNode) and below in outer.body):
                return False
            below = outer
        return False

    def _bindings_not_surely_replaced(
        self, scope: Scope, name: str, end: tuple[int, int] | None
    ) -> list[tuple[ast.stmt, str | None]]:
        """Return the statements that bind a name in a scope, each with the full name that an import has for it.

        One behind which another one surely follows is left out.

        Args:
            end: the place that they stand above; None for all of the scope, as what a function finds.
        """
        if (scope, name) not in self._bound:
            both = [*self._bindings[scope, name], *self._own_bindings(scope, name)]
            self._bound[scope, name] = sorted(both, key=lambda each: _end_of_statement(each[0]))
        found = self._bound[scope, name]
        if end is not None:
            found = [each for each in found if _end_of_statement(each[0]) < end]
        return [
            each for each in found if not any(self._surely_runs_after(other, each[0]) for other, _ in found)
        ]

    def _own_bindings(self, scope: Scope, name: str) -> Iterator[tuple[ast.stmt, None]]:
        """Yield the functions, classes and assignments of a scope that bind a name, without those of what it has."""
        for node in self.nodes:
            if self.scope_of[node] is not scope:
                continue
            if isinstance(node, DefinitionNode):
                if node.name == name:
                    yield node, None
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(each, ast.Name) and each.id == name for each in targets) and not any(
                    isinstance(each, ast.Name) and each.id == name for each in ast.walk(node.value)
                ):
                    yield node, None

    def _surely_runs_after(self, later: ast.stmt, earlier: ast.stmt) -> bool:
        """Return whether a statement runs behind another one of its scope whenever that runs, and stands below it."""
        return (
            _end_of_statement(earlier) < _end_of_statement(later)
            and self.scope_of[later] is self.scope_of[earlier]
            and self._is_block_around_later_node(later, earlier)
        )

    def _is_block_around_later_node(self, statement: ast.stmt, node: ast.AST) -> bool:
        """Return whether a statement stands in a block that holds a node below it."""
        block = self.block_of(statement)
        return any(each in block for each in (self.statement_around(node), *self.ancestors(node)))

    def _resolve_through_value(
        self, values: list[ast.expr], scope: Scope, rest: str, depth: int
    ) -> str | None:
        """Return the full name of an attribute of the only value but None, if that is no more than a name."""
        named = [one for one in flatten_conditional_values(values) if not is_literal(one, None)]
        base = self.resolve(named[0], scope, depth=depth + 1) if len(named) == 1 else None
        return None if base is None else _public_full_name(base, rest)

    def _name_passed_for(self, scope: Scope, parameter: str) -> str | None:
        """Return the full name of what all calls of a function in this module pass for a parameter."""
        if (scope, parameter) not in self._known:
            self._known[scope, parameter] = None  # for a function that calls itself
            function = scope.node
            found: set[str | None] = set()
            if isinstance(function, FunctionNode):
                names = self.positional_parameters_without_self(function)
                given = (arguments(call, names).get(parameter) for call in self._calls_by_name[function.name])
                self._passing += 1
                found = {None if value is None else self.resolve(value) for value in given}
                self._passing -= 1
            self._known[scope, parameter] = found.pop() if len(found) == 1 else None
        return self._known[scope, parameter]

    @functools.cached_property
    def _calls_by_name(self) -> defaultdict[str, list[ast.Call]]:
        """All calls by the last part of the names of their functions."""
        found: defaultdict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            found[last_name(call.func)].append(call)
        return found

    @functools.cached_property
    def resolved_calls(self) -> list[tuple[ast.Call, str]]:
        """All calls whose functions have a full name."""
        pairs = ((call, self.resolve(call.func)) for call in self.calls)
        return [(call, name) for call, name in pairs if name is not None]

    def calls_of_functions(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions by full name."""
        for call, name in self.resolved_calls:
            if name in names:
                yield call

    def has_alternative_bindings(self, node: ast.expr) -> bool:
        """Return whether imports, or an import and an assignment, bind the head of an expression differently."""
        head = (dotted_name(node) or "").partition(".")[0]
        return any(
            len(one.imports.get(head, ())) > 1 or (head in one.imports and head in one.values)
            for one in self.scope_of[node].lookup_scopes()
        )


def _end_of_statement(statement: ast.stmt) -> tuple[int, int]:
    return statement.end_lineno or 0, statement.end_col_offset or 0


def _public_full_name(name: str, rest: str) -> str:
    return public_full_name(f"{name}.{rest}" if rest else name)


# How each kind of node that opens a scope or binds a name is read; returns the scope of what is below it.
READERS: dict[type[ast.AST], Callable[[Module, Any, Scope], Scope]] = {
    ast.Call: Module._read_call,
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef), Module._open_scope),
    ast.Global: Module._read_global,
    ast.Import: Module._read_import,
    ast.ImportFrom: Module._read_import_from,
    **dict.fromkeys(
        (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.AsyncFor, ast.comprehension, ast.withitem),
        Module._read_assignment,
    ),
}


def flatten_conditional_values(values: list[ast.expr]) -> list[ast.expr]:
    """Return values with those of conditional expressions one by one."""
    found: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.IfExp):
            found += flatten_conditional_values([value.body, value.orelse])
        else:
            found.append(value)
    return found
