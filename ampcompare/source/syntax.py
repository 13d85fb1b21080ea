"""Parse source with Python's own parser, which says what is wrong and where; walk trees; names and calls in them."""

import ast
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeAlias

# Kinds of nodes that mean one thing, for annotations and for `isinstance`.
FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ForNode: TypeAlias = ast.For | ast.AsyncFor
LoopNode: TypeAlias = ast.For | ast.AsyncFor | ast.While
WithNode: TypeAlias = ast.With | ast.AsyncWith
ImportNode: TypeAlias = ast.Import | ast.ImportFrom

# The classes of an error that a handler names where it catches a failed import.
IMPORT_ERRORS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})

# What Python's parser says of statements that Python 2 had.
PYTHON_2 = (
    "Missing parentheses in call to",
    "inconsistent use of tabs",
    "leading zeros in decimal integer literals",
    "multiple exception types must be parenthesized",
)
NEWLINE = re.compile(r"\r\n|\r|\n")
# Fields that hold text, numbers, or one of the objects that all nodes share, such as `ast.Load()`.
PLAIN = {
    "arg", "asname", "attr", "conversion", "ctx", "id", "is_async", "kind", "level", "module", "name", "op", "ops",
    "rest", "simple", "tag", "type_comment",
}  # fmt: skip
# The fields of each class of nodes that hold nodes.
FIELDS = {
    kind: tuple(name for name in kind._fields if name not in PLAIN)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
FIELDS |= {ast.Constant: (), ast.MatchSingleton: ()}  # whose value is no node

HIDDEN = {"*", "**"}  # of what has no name where it is given


class SourceInvalid(ValueError):
    """A text that is not Python 3, in one line.

    Args:
        message: of the parser, in one line.

    Attributes:
        line: from 1, where the parser stopped; 0 where it does not say.
        kind: "not Python 3, but Python 2", or that this version of Python cannot parse it: its syntax may be newer.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.kind = "not Python 3, but Python 2" if message.startswith(PYTHON_2) else f"not Python {version}"


def parse_tree(text: str) -> ast.Module:
    """Return the syntax tree of a module.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\d"
            return ast.parse(text)
    except SyntaxError as error:
        raise SourceInvalid(" ".join(error.msg.split()), error.lineno or 0) from None
    except (RecursionError, MemoryError):
        raise SourceInvalid("nested too deeply") from None
    except ValueError as error:  # such as a null byte
        raise SourceInvalid(str(error)) from None


def dotted_name(node: ast.AST | None) -> str | None:
    """Return `a.b.c` as text for a name or a chain of attributes; None for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


def elements(node: ast.expr) -> list[ast.expr]:
    """Return the elements of a list or tuple that is written out; any other expression is its only one."""
    return list(node.elts) if isinstance(node, (ast.List, ast.Tuple)) else [node]


def child_nodes(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node; `ast.iter_child_nodes` does the same in several times the time.

    Contexts and operators are left out.
    """
    found: list[ast.AST] = []
    for name in FIELDS[node.__class__]:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [each for each in value if isinstance(each, ast.AST)]
        elif value is not None:
            found.append(value)
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, as `ast.walk` does in twice the time, without contexts and operators."""
    waiting = [node]
    for each in waiting:  # which grows meanwhile
        yield each
        waiting += child_nodes(each)


def names_bound_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that a node binds, or nodes below it."""
    stored = (each for each in walk(node) if isinstance(getattr(each, "ctx", None), ast.Store))
    return {key for each in stored if (key := dotted_name(each))}


def argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """Return the value of an argument, by keyword or by position; None where it is not given, or behind a `*`."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    if position is not None and len(call.args) > position:
        value = call.args[position]
        return None if isinstance(value, ast.Starred) else value
    return None


def arguments(call: ast.Call, names: Sequence[str] = ()) -> dict[str, ast.expr]:
    """Return the arguments of a call by name; what stands behind `*` or `**` is under one of `HIDDEN`.

    Args:
        names: of the positional parameters.
    """
    found: dict[str, ast.expr] = {}
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        found[name] = value
    if any(isinstance(value, ast.Starred) for value in call.args):
        found["*"] = next(value for value in call.args if isinstance(value, ast.Starred))
    return found | {one.arg or "**": one.value for one in call.keywords}


def argument_values(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of a call."""
    return [*call.args, *(one.value for one in call.keywords)]


def parameter_names_without_stars(
    function: FunctionNode | ast.Lambda, *, positional: bool = False
) -> list[str]:
    """Return the names of the parameters of a function, without those with a star.

    Args:
        positional: only those that can be given by position.
    """
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *(() if positional else given.kwonlyargs))]


def last_name(node: ast.AST) -> str:
    """Return the last part of the name of a function or object, such as `step`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def root_name(node: ast.AST) -> str:
    """Return the name with which a chain of attributes begins, such as `a` of `a.b.c`; empty for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def calls_in(node: ast.AST) -> list[ast.Call]:
    """Return the calls in a node, itself among them."""
    return [each for each in walk(node) if isinstance(each, ast.Call)]


def catches_missing_module(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches that a module is not there, whatever it does then."""
    return handler.type is None or any(last_name(each) in IMPORT_ERRORS for each in elements(handler.type))


def last_part(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def is_literal(node: ast.expr | None, value: object) -> bool:
    """Return whether an expression is a literal of a value: `None`, `True`, `False`, a number or text."""
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def strip_star(value: ast.expr) -> ast.expr:
    """Return the expression behind the stars of `*values`; the expression itself where it has none."""
    while isinstance(value, ast.Starred):
        value = value.value
    return value
