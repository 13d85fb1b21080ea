"""Which functions calls name, over the scopes, classes and files of a project."""

import ast
from pathlib import Path
from textwrap import dedent

import pytest

from ampcompare.source.index import (
    Answer,
    ImportedObject,
    Index,
    ProjectFunction,
    SeveralFunctions,
    SoughtEvent,
    UnknownFunction,
    functions_of_callee,
)
from ampcompare.source.module import Module
from ampcompare.source.project import Project


def callee(text: str, **files: str) -> str:
    """Return which function the call of `asked` names, each by the line of its definition."""
    return _callee(Path("train.py"), text, None)


def _callee(path: Path, text: str, project: Project | None) -> str:
    module = Module(dedent(text))
    index = Index(module, project)
    call = next(each for each in module.calls if ast.unparse(each.func).endswith(("asked", "asked]")))
    return _words(index.callee(call, module.scope_of[call]))


def _words(answer: object) -> str:
    names = [
        each.name if isinstance(each, ImportedObject) else _lines(each)
        for each in functions_of_callee(answer)
    ]  # type: ignore[arg-type]
    return " or ".join(sorted(names)) + ("?" if isinstance(answer, UnknownFunction) else "")


def _lines(function: ProjectFunction) -> str:
    return str(function.scope.node.body[0].value.value)  # type: ignore[union-attr]


ONE = "'one'"
KNOWN = {
    "the last definition": ("def asked(): 'one'\ndef asked(): 'two'\nasked()", "two"),
    "one in a branch may be": ("def asked(): 'one'\nif x:\n    def asked(): 'two'\nasked()", "one or two"),
    "a nested function hides that of the module": (
        "def asked(): 'one'\ndef f():\n    def asked(): 'two'\n    asked()",
        "two",
    ),
    "the function of another function is not seen": (
        "def f():\n    def asked(): 'one'\ndef g():\n    asked()",
        "?",
    ),
    "a method of its own class": (
        "class A:\n    def asked(self): 'one'\nclass B:\n    def asked(self): 'two'\n    def f(self): self.asked()",
        "two",
    ),
    "a method of a base": (
        "class A:\n    def asked(self): 'one'\nclass B(A):\n    def f(self): self.asked()",
        "one",
    ),
    "what a subclass puts in its place": (
        "class A:\n    def asked(self): 'one'\n    def f(self): self.asked()\nclass B(A):\n    def asked(self): 'two'",
        "one or two",
    ),
    "super": (
        "class A:\n    def asked(self): 'one'\nclass B(A):\n"
        "    def asked(self):\n        'two'\n        super().asked()",
        "one",
    ),
    "an object that is built": ("class A:\n    def asked(self): 'one'\na = A()\na.asked()", "one"),
    "an object that is passed": ("class A:\n    def asked(self): 'one'\ndef f(a): a.asked()\nf(A())", "one"),
    "an object of any class": ("def f(a): a.asked()", "?"),
    "an attribute that holds a function": (
        "def g(): 'one'\nclass A:\n    def __init__(self, h): self.asked = h\n    def f(self): self.asked()\nA(g)",
        "one",
    ),
    "one that is set from outside": (
        "def g(): 'two'\nclass A:\n    def asked(self): 'one'\na = A()\na.asked = g\na.asked()",
        "one or two",
    ),
    "partial": ("import functools\ndef g(x): 'one'\nasked = functools.partial(g, 1)\nasked()", "one"),
    "partial of a library": (
        "import functools\nimport torch\n"
        "asked = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=1)\nasked()",
        "torch.nn.utils.clip_grad_norm_",
    ),
    "a dict of functions": (
        "def g(): 'one'\ndef h(): 'two'\nd = {'a': g, 'b': h}\nasked = d['b']\nasked()",
        "two",
    ),
    "any of a dict": (
        "def g(): 'one'\ndef h(): 'two'\nd = {'a': g, 'b': h}\nasked = d[x]\nasked()",
        "one or two",
    ),
    "a list of callbacks": (
        "def g(): 'one'\nhooks = [g]\ndef h(): 'two'\nhooks.append(h)\nfor asked in hooks:\n    asked()",
        "one or two",
    ),
    "a property": (
        "def g(): 'one'\nclass A:\n    @property\n    def asked(self): return g\n    def f(self): self.asked()",
        "one",
    ),
    "what a decorator puts in its place": (
        "def wrap(f):\n    def inner(*a):\n        'inner'\n        return f(*a)\n    return inner\n"
        "@wrap\ndef asked(): 'one'\nasked()",
        "inner",
    ),
    "a decorator of a library": ("import torch\n@torch.no_grad()\ndef asked(): 'one'\nasked()", "one"),
    "a choice": ("def g(): 'one'\ndef h(): 'two'\nasked = g if x else h\nasked()", "one or two"),
    "what a function returns": ("def g(): 'one'\ndef make(): return g\nasked = make()\nasked()", "one"),
    "getattr": ("class A:\n    def go(self): 'one'\nasked = getattr(A(), 'go')\nasked()", "one"),
    "getattr by a name that a run has": (
        "class A:\n    def go(self): 'one'\nasked = getattr(A(), n)\nasked()",
        "?",
    ),
    "a module that calls itself": (
        "def asked(f):\n    'one'\n    f(f)\n    asked(asked)\nasked(asked)",
        "one",
    ),
}


@pytest.mark.parametrize(("text", "expected"), KNOWN.values(), ids=KNOWN)
def test_the_function_of_a_call(text: str, expected: str) -> None:
    """One, several or none: no name is taken for another one, and what only may be is not said to be."""
    assert callee(text) == expected


def test_a_function_that_calls_the_parameter_of_a_decorator() -> None:
    text = "def wrap(f):\n    def inner():\n        f()\n    return inner\n@wrap\ndef g(): 'one'\n"
    module = Module(text)
    (call,) = [each for each in module.calls if ast.unparse(each) == "f()"]
    assert _words(Index(module).callee(call, module.scope_of[call])) == "one"


FILES = {
    "steps": "def step(): 'steps'\ndef other(): 'other'\n_hidden = step\n",
    "pack__init": "from .inner import step as run\nfrom . import inner\n",
    "pack__inner": "def step(): 'inner'\n",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from steps import step as asked\nasked()", "steps"),
        ("import steps\nsteps.step.__name__\nasked = steps.step\nasked()", "steps"),
        ("def step(): 'own'\nfrom steps import *\nasked = step\nasked()", "steps"),
        ("from steps import *\ndef step(): 'own'\nasked = step\nasked()", "own"),
        ("from pack import run as asked\nasked()", "inner"),
        ("from pack import inner\nasked = inner.step\nasked()", "inner"),
        ("import pack.inner as p\nasked = p.step\nasked()", "inner"),
        ("from steps import nothing as asked\nasked()", "?"),
        ("from .gone import asked\nasked()", "?"),
        ("from elsewhere import asked\nasked()", "elsewhere.asked"),
    ],
)
def test_the_function_of_a_call_in_another_file(tmp_path: Path, text: str, expected: str) -> None:
    for name, content in FILES.items():
        path = tmp_path / f"{name.replace('__init', '/__init__').replace('__inner', '/inner')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    path = tmp_path / "train.py"
    path.write_text(text)
    module = Module(text)
    index = Index(module, Project(path, module))
    call = [each for each in module.calls if ast.unparse(each.func) == "asked"][-1]
    assert _words(index.callee(call, module.scope_of[call])) == expected


def test_the_callers_of_a_function_in_other_files(tmp_path: Path) -> None:
    """All of them, unless the function is passed on, so that others may call it."""
    (tmp_path / "README.md").touch()
    (tmp_path / "train.py").write_text("from steps import step\nstep()\n")
    (tmp_path / "other.py").write_text("import steps\ndef f():\n    steps.step()\n")
    path = tmp_path / "steps.py"
    for text, complete in (("def step(): 1\n", True), ("def step(): 1\nregister(step)\n", False)):
        path.write_text(text)
        module = Module(text)
        index = Index(module, Project(path, module))
        calls, known = index.possible_calls_and_completeness(module.scope_from[module.tree.body[0]])
        assert sorted(map(ast.unparse, calls)) == ["step()", "steps.step()"]
        assert known is complete


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x.grad", Answer.YES),
        ("helper()", Answer.YES),
        ("print(1)", Answer.NO),
        ("someone.does(1)", Answer.UNKNOWN),
        ("f()", Answer.NO),
    ],
)
def test_what_a_function_reaches(body: str, expected: Answer) -> None:
    """Through what it calls; what nobody knows may do anything."""
    module = Module(f"def helper():\n    y.grad\ndef f():\n    {body}\n")
    reads = SoughtEvent("grad", lambda module, node: isinstance(node, ast.Attribute) and node.attr == "grad")
    function = ProjectFunction(module.scope_from[module.tree.body[1]])
    assert Index(module).reaches_event(function, reads) is expected


def test_several_and_unknown_are_apart() -> None:
    module = Module("def g(): 1\ndef h(): 2\nf = g if x else h\nf()\nf = g if x else unknown\nf()\n")
    first, second = module.calls
    index = Index(module)
    assert isinstance(index.callee(first, module.top), SeveralFunctions)
    found = index.callee(second, module.top)
    assert isinstance(found, UnknownFunction)
    assert len(found.candidates) == 1


def test_a_decorated_class_is_no_function() -> None:
    """What a decorator gets and calls is the class, which has no value to return of its own."""
    text = "def register(item):\n    made = item()\n    return item\n\n\n@register\nclass Hook:\n    pass\n"
    module = Module(text)
    index = Index(module)
    call = next(each for each in module.calls if getattr(each.func, "id", "") == "item")
    assert isinstance(index.callee(call, module.scope_of[call]), ImportedObject | UnknownFunction)
    index.values_of_expression(module.scopes[1].node.body[0].value, module.scopes[1])  # type: ignore[union-attr]
