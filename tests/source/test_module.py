"""What a module knows of its names, the order and conditions of its lines, and a parser with one kind of error."""

import ast
from textwrap import dedent

import pytest

from ampcompare.source.branches import never_run_together
from ampcompare.source.call_order import CallFollower, CallFrame
from ampcompare.source.index import Index
from ampcompare.source.module import Module, SourceText
from ampcompare.source.syntax import SourceInvalid, arguments, parse_tree


def resolved(text: str) -> list[str | None]:
    """Return the full names of the functions of all calls."""
    module = Module(dedent(text))
    return [module.resolve(call.func) for call in module.calls]


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("from apex import amp\namp.initialize()", "apex.amp.initialize"),
        ("from apex.amp import *\ninitialize()", "apex.amp.initialize"),
        ("from apex.amp.frontend import initialize\ninitialize()", "apex.amp.initialize"),
        ("import apex.amp\nused = apex.amp\nused.initialize()", "apex.amp.initialize"),
        (
            "try:\n from apex import amp\nexcept ImportError:\n from torch.cuda import amp\namp.f()",
            "apex.amp.f",
        ),
        ("def main():\n global amp\n from apex import amp\ndef train():\n amp.f()", "apex.amp.f"),
        ("def main():\n from apex import amp\n global amp\ndef train():\n amp.f()", "apex.amp.f"),
        ("def main():\n from apex import amp\ndef train():\n amp.f()", None),
        # A later import in the same block, which always runs in between; and one that may not.
        ("def f():\n from apex import amp\n if x:\n  from torch import amp\n  amp.f()", "torch.amp.f"),
        ("def f():\n from torch import amp\n from apex import amp\n amp.f()", "apex.amp.f"),
        ("from apex import amp\nif x:\n from torch import amp\namp.f()", "apex.amp.f"),
        ("from apex import amp\ndef f():\n amp.f()\nfrom torch import amp", "torch.amp.f"),
        ("from apex import amp\namp.f()\nfrom torch import amp", "apex.amp.f"),
        ("from apex import amp\ndef train(amp):\n amp.f()", None),
        ("from apex import amp\ndef train(a, b):\n b.f()\ntrain(0, amp)", "apex.amp.f"),
        ("from apex import amp\ndef train(a, b=None):\n b.f()\ntrain(0, b=amp)\nx.train(0)", None),
        ("from apex import amp\ndef fit(a):\n a.f()\n fit(a)\nfit(amp)", None),
        ("from apex import amp\ndef train():\n (x, (amp, y)) = z\n amp.f()", None),
    ],
)
def test_full_names(text: str, full: str | None) -> None:
    """Imports count in their scope, those of Apex before others, and through what stands for them."""
    assert resolved(text)[0] == full


@pytest.mark.parametrize(
    ("one", "other", "never"),
    [
        ("fp16", "not fp16", True),
        ("fp16", "fp16 is None", True),
        ("mode == 'apex'", "mode == 'torch'", True),
        ("mode == Mode.APEX", "mode == Mode.TORCH", True),
        ("mode == first", "mode == second", False),
        ("fp16 and apex", "not apex", True),
        ("fp16", "apex", False),
    ],
)
def test_places_that_never_run_together(one: str, other: str, never: bool) -> None:
    """Tests that cannot both hold are known, whatever their form."""
    module = Module(f"if {one}:\n    f()\nif {other}:\n    g()\n")
    first, second = module.calls
    assert never_run_together(module, first, second) is never


class _Names(CallFollower):
    """Notes the functions that are called and not in the module, with the number of conditions."""

    def __init__(self, module: Module) -> None:
        super().__init__(Index(module))
        self.found: list[tuple[str, int]] = []

    def handle_node(self, node: ast.AST, statement: ast.stmt, frame: CallFrame) -> None:
        assert isinstance(node, ast.Call)
        if not self.follow_named_function(node.func, frame, node):
            self.found.append((ast.unparse(node.func), len(frame.facts)))


def test_calls_are_followed_in_the_order_in_which_they_run() -> None:
    """Arguments come before their call, functions of the module where they are called, and each once in a circle."""
    module = Module(
        dedent("""
            class Trainer:
                def fit(self):
                    self.update(loss())
                    if late:
                        return done()
                    end()
                def update(self, loss):
                    first(second())
                    self.fit()
        """)
    )
    names = _Names(module)
    names.follow_scope(module.scope_from[module.tree.body[0].body[0]])
    found = [("loss", 0), ("second", 0), ("first", 0), ("self.fit", 0), ("done", 1), ("end", 1)]
    assert names.found == found


def test_arguments_that_have_no_name_here_are_known_as_such() -> None:
    call = Module("f(1, *rest, key=2, **more)").calls[0]
    assert {name: ast.unparse(value) for name, value in arguments(call, ("a", "b", "c")).items()} == {
        "a": "1",
        "*": "*rest",
        "key": "2",
        "**": "more",
    }


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("word", ["plain", "höher", "日本語", "😀"])
def test_positions_of_nodes(newline: str, word: str) -> None:
    """A node lies where `ast` says that it does, in bytes, on every line."""
    text = newline.join([f"first = '{word}'; second = 1", "", f"third = ['{word}', fourth]", ""])
    lines = SourceText(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            start = lines.offset(node.lineno, node.col_offset)
            assert text[start : start + len(node.id)] == node.id


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\nprint 'x'\n", 2),
        ("x = (\n", 1),
        ("(" * 3000, 1),
        ("x = " + "not " * 100_000 + "y", 0),
        ("x = 1\0", 0),
    ],
)
def test_what_is_not_python(text: str, line: int) -> None:
    """Other languages, Python 2 and endless nesting are faults with their line."""
    with pytest.raises(SourceInvalid) as caught:
        parse_tree(text)
    assert caught.value.line == line or line == 1
    assert "\n" not in str(caught.value)


def test_doubtful_escapes_warn_nobody() -> None:
    """A warning of the parser is not for the user of a linter; under pytest it would be an error."""
    parse_tree("x = '\\d'\n")


OWN = "def read(value):\n    return round(float(value))\n"
THEIRS = "from apex.fp16_utils import to_python_float as read\n"
APEX = "apex.fp16_utils.to_python_float"


@pytest.mark.parametrize(
    ("text", "full"),
    [
        (THEIRS, APEX),
        (f"{THEIRS}{OWN}", None),
        (f"{OWN}{THEIRS}", APEX),
        (f"{THEIRS}from own import read\n", "own.read"),
        (f"from own import read\n{THEIRS}", APEX),
        (f"{THEIRS}read = float\n", None),
        (f"{THEIRS}read = wrap(read)\n", APEX),
        # which of two is there, a run decides
        (f"try:\n    {THEIRS}except ImportError:\n    from own import read\n", APEX),
        (f"try:\n    {THEIRS}except ImportError:\n    read = None\n", APEX),
        (f"read = None\nif fp16:\n    {THEIRS}", APEX),
        (f"{THEIRS}if own:\n    from own import read\n", APEX),
        (f"try:\n    {THEIRS}except ImportError:\n    raise\nfrom own import read\n", "own.read"),
        (f"try:\n    {THEIRS}    from own import read\nexcept ImportError:\n    raise\n", "own.read"),
    ],
)
def test_what_a_module_binds_last_is_what_its_functions_find(text: str, full: str | None) -> None:
    module = Module(f"{text}def show(loss):\n    print(read(loss))\nprint(read(loss))\n")
    inside, below = (call.func for call in module.calls if ast.unparse(call) == "read(loss)")
    assert module.resolve(inside, follow=False) == full
    assert module.resolve(below, follow=False) == full


def test_what_stands_above_a_binding_has_the_one_before() -> None:
    module = Module(
        "from apex.optimizers import FusedAdam\nmade = FusedAdam()\n"
        "class FusedAdam(FusedAdam):\n    pass\nlater = FusedAdam()\n"
    )
    first, later = (call.func for call in module.calls)
    (base,) = (each for node in module.nodes if isinstance(node, ast.ClassDef) for each in node.bases)
    names = [module.resolve(each, follow=False) for each in (first, base, later)]
    assert names == ["apex.optimizers.FusedAdam", "apex.optimizers.FusedAdam", None]
