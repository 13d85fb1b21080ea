"""Names in LibCST trees, through every form of import."""

from __future__ import annotations

from textwrap import dedent

import pytest

pytest.importorskip("libcst")

import libcst as cst
from libcst import metadata

from ampcompare.source.cst import NameResolver, SourceInvalid, dotted, parse_module

SCRIPT = """
    try:
        from apex import amp
        from apex.parallel import DistributedDataParallel as DDP
    except ImportError:
        amp = None
    import apex, torch.cuda.amp
    from apex.fp16_utils import *

    def hidden(amp):
        amp.initialize("hidden")

    def lazy():
        from apex import amp as mixed
        mixed.scale_loss("lazy")
        amp.initialize("guarded")
        apex.amp.initialize("module")
        DDP("renamed")
        to_python_float("star")
        torch.cuda.amp.GradScaler("dotted")
        unknown.initialize("unknown")
"""


def names(script: str, stars: dict[str, list[str]]) -> dict[str, str | None]:
    """Full name of each call, by its argument."""
    wrapper = metadata.MetadataWrapper(parse_module(dedent(script)))
    resolver = NameResolver(wrapper, stars)
    found: dict[str, str | None] = {}

    class Calls(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:
            literal = node.args[0].value
            assert isinstance(literal, cst.SimpleString)
            found[str(literal.evaluated_value)] = resolver.name_of(node.func)

    wrapper.visit(Calls())
    return found


def test_names_follow_imports() -> None:
    """Guarded, lazy, renamed, dotted and star imports are followed; parameters hide them."""
    assert names(SCRIPT, {"apex.fp16_utils": ["to_python_float"]}) == {
        "hidden": None,
        "lazy": "apex.amp.scale_loss",
        "guarded": "apex.amp.initialize",
        "module": "apex.amp.initialize",
        "renamed": "apex.parallel.DistributedDataParallel",
        "star": "apex.fp16_utils.to_python_float",
        "dotted": "torch.cuda.amp.GradScaler",
        "unknown": None,
    }


def test_star_imports_bring_only_known_names() -> None:
    """Without a list of its names a star import brings none."""
    assert names(SCRIPT, {})["star"] is None


@pytest.mark.parametrize(("text", "expected"), [("a.b.c", "a.b.c"), ("a.b(1).c", "a.b.c"), ("a[0].b", None)])
def test_dotted(text: str, expected: str | None) -> None:
    """Attributes are joined by dots, calls without their arguments."""
    assert dotted(cst.parse_expression(text)) == expected


@pytest.mark.parametrize("text", ["print 'x'\n", "x = (\n", "(" * 3000])
def test_what_is_not_python(text: str) -> None:
    """A text that does not parse is one fault with its line."""
    with pytest.raises(SourceInvalid):
        parse_module(text)
