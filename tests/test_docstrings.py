"""What the docstrings of functions say that other rooms import: arguments, and the errors that are raised."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.modules import modules_of_package, parsed, statements

# One process of pytest reads all files, instead of each.
pytestmark = pytest.mark.xdist_group("architecture")
BASE_ERRORS = {
    "AmpCompareError",
    "Exception",
    "ImportError",
    "OSError",
    "RuntimeError",
    "TypeError",
    "ValueError",
}

EXPLAINED = re.compile(
    r"^ *((?:\w+, )*\w+): ", re.MULTILINE
)  # `name: what it is`, or `one, other: what they are`

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


def _unexplained_arguments(node: Definition, owner: str = "") -> set[str]:
    """Return the arguments that a docstring does not name, if there are two or more.

    Those of a class stand there or in `__init__`.

    Args:
        owner: the docstring of the class, for a method.
    """
    function: ast.AST | None = node
    docstring = f"{owner}\n{ast.get_docstring(node) or ''}"
    if isinstance(node, ast.ClassDef):
        function = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
    if not isinstance(function, ast.FunctionDef):
        return set()
    docstring += f"\n{ast.get_docstring(function) or ''}"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = {one.arg for one in arguments if one.arg not in ("self", "cls")}
    explained = {name for line in EXPLAINED.findall(docstring) for name in line.split(", ")}
    in_text = set(re.findall(r"`(\w+)`", docstring))
    return names - explained - in_text if len(names) > 1 else set()


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


@cache
def _errors_of_package() -> set[str]:
    """Return the names of the exceptions that modules define."""
    trees = [parsed(path.read_text(encoding="utf-8")) for path in modules_of_package().values()]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while True:
        known = BASE_ERRORS | found
        more = {node.name for node in classes if known & {_name_of_base(each) for each in node.bases}} - found
        if not more:
            return found
        found |= more


def _unsaid_errors(node: Definition) -> set[str]:
    """Return the errors of the package that a function raises itself, and that its `Raises` does not name."""
    if not isinstance(node, ast.FunctionDef):
        return set()
    raised = [one.exc for one in _own_nodes(node) if isinstance(one, ast.Raise) and one.exc is not None]
    names = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in raised}
    said = (ast.get_docstring(node) or "").partition("Raises:")[2]
    return {name for name in names & _errors_of_package() if name not in said}


@cache
def _package() -> dict[str, Definition]:
    return dict(
        definitions({name: path.read_text(encoding="utf-8") for name, path in modules_of_package().items()})
    )


@cache
def _methods() -> dict[str, tuple[ast.FunctionDef, str]]:
    """Return the public methods of these classes, with what their class says, but those that replace one of a base."""
    trees = [parsed(path.read_text(encoding="utf-8")) for path in modules_of_package().values()]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def is_inherited(node: ast.ClassDef, name: str) -> bool:
        bases = [classes[base] for each in node.bases if (base := _name_of_base(each)) in classes]
        return any(
            any(getattr(one, "name", "") == name for one in base.body) or is_inherited(base, name)
            for base in bases
            if base is not node
        )

    return {
        f"{name}.{method.name}": (method, ast.get_docstring(node) or "")
        for name, node in _package().items()
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and not method.name.startswith("_")
        and not is_inherited(node, method.name)
    }


def _name_of_base(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_arguments_of_what_other_rooms_call_are_explained() -> None:
    """Each of them: a section that leaves one out leaves it to the reader."""
    assert not {name: left for name, node in _package().items() if (left := _unexplained_arguments(node))}


def test_arguments_of_methods_of_classes_of_other_rooms_are_explained() -> None:
    """A method that replaces one of a base is explained there."""
    assert not {
        name: left
        for name, (node, owner) in _methods().items()
        if (left := _unexplained_arguments(node, owner))
    }


def test_errors_of_what_other_rooms_call_are_named() -> None:
    whole = {**_package(), **{name: node for name, (node, _) in _methods().items()}}
    assert not {name: unsaid for name, node in whole.items() if (unsaid := _unsaid_errors(node))}


def test_what_is_looked_for_is_found() -> None:
    """A function of another room without a reference fails both tests; one of the same room, or with one, does not."""
    bare = "def f(a, b):\n    raise ConfigError('no')\n"
    args = "    Args:\n        a, b: one.\n\n"
    raises = "    Raises:\n        ConfigError: no.\n"
    whole = f'def g(a, b):\n    """Do it.\n\n{args}{raises}    """\n'
    texts = {
        "p.low.file": f"{bare}\n{whole}    raise ConfigError('no')\n",
        "p.low.neighbor": "from p.low.file import f",
        "p.high.file": "from p.low.file import f, g",
    }
    found = dict(definitions(texts))
    assert list(found) == ["p.low.file.f", "p.low.file.g"]
    assert [_unexplained_arguments(node) for node in found.values()] == [{"a", "b"}, set()]
    assert [_unsaid_errors(node) for node in found.values()] == [{"ConfigError"}, set()]
    assert not list(definitions({name: text for name, text in texts.items() if name != "p.high.file"}))
