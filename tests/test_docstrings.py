"""What the docstrings of functions say that other rooms import: arguments, and the errors that are raised."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from ampcompare.base import errors
from tests.modules import modules_of_package, parsed, statements

# One process of pytest reads all files, instead of each.
pytestmark = pytest.mark.xdist_group("architecture")
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}

Definition = ast.FunctionDef | ast.ClassDef


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def definitions(texts: dict[str, str]) -> Iterator[tuple[str, Definition]]:
    """Yield the functions and classes of modules that modules of other rooms import, with their names.

    Args:
        texts: of all modules, by their names.
    """
    trees = {name: parsed(text) for name, text in texts.items()}
    imported = {
        (node.module, alias.name)
        for name, tree in trees.items()
        for node in statements(tree.body)
        if isinstance(node, ast.ImportFrom) and node.module in trees and _room(node.module) != _room(name)
        for alias in node.names
    }
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, Definition) and (name, node.name) in imported:
                yield f"{name}.{node.name}", node


def _lacks_arguments(node: Definition) -> bool:
    """Return whether two or more arguments are not explained: those of a class stand there or in `__init__`."""
    function: ast.AST | None = node
    docstring = ast.get_docstring(node) or ""
    if isinstance(node, ast.ClassDef):
        function = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
    if not isinstance(function, ast.FunctionDef):
        return False
    docstring += ast.get_docstring(function) or ""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    explained = "Args:" in docstring or (isinstance(node, ast.ClassDef) and "Attributes:" in docstring)
    return not explained and len([one for one in arguments if one.arg not in ("self", "cls")]) > 1


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _unsaid_errors(node: Definition) -> set[str]:
    """Return the errors for users that a function raises itself, and that its `Raises` does not name."""
    if not isinstance(node, ast.FunctionDef):
        return set()
    raised = [one.exc for one in _own_nodes(node) if isinstance(one, ast.Raise) and one.exc is not None]
    names = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in raised}
    said = (ast.get_docstring(node) or "").partition("Raises:")[2]
    return {name for name in names & ERRORS if name not in said}


@cache
def _package() -> dict[str, Definition]:
    return dict(
        definitions({name: path.read_text(encoding="utf-8") for name, path in modules_of_package().items()})
    )


def test_arguments_of_what_other_rooms_call_are_explained() -> None:
    assert not [name for name, node in _package().items() if _lacks_arguments(node)]


def test_errors_of_what_other_rooms_call_are_named() -> None:
    assert not {name: unsaid for name, node in _package().items() if (unsaid := _unsaid_errors(node))}


def test_what_is_looked_for_is_found() -> None:
    """A function of another room without a reference fails both tests; one of the same room, or with one, does not."""
    bare = "def f(a, b):\n    raise ConfigError('no')\n"
    args = "    Args:\n        a: one.\n\n"
    raises = "    Raises:\n        ConfigError: no.\n"
    whole = f'def g(a, b):\n    """Do it.\n\n{args}{raises}    """\n'
    texts = {
        "p.low.file": f"{bare}\n{whole}    raise ConfigError('no')\n",
        "p.low.neighbor": "from p.low.file import f",
        "p.high.file": "from p.low.file import f, g",
    }
    found = dict(definitions(texts))
    assert list(found) == ["p.low.file.f", "p.low.file.g"]
    assert [_lacks_arguments(node) for node in found.values()] == [True, False]
    assert [_unsaid_errors(node) for node in found.values()] == [{"ConfigError"}, set()]
    assert not list(definitions({name: text for name, text in texts.items() if name != "p.high.file"}))
