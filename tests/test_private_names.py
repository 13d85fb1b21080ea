"""The names of torch with an underscore that the package uses: the installed torch has each of them."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import ampcompare
from tests.modules import parsed

PACKAGE = Path(ampcompare.__file__).parent
REPLACED = ("torch._six",)  # which a legacy script asks for, and no torch has
ALONE = "script/replay/one_step.py"  # a program that other environments run too, without this package
# What libraries on torch use everywhere, and torch keeps for them; any other name is used in one module.
COMMON = (
    *("torch._C", "torch._foreach_", "torch._amp_", "torch._fused_", "torch.nn.modules.batchnorm._BatchNorm"),
    *("torch.utils._pytree", "torch.utils._python_dispatch"),
)
# In one process of pytest with test_architecture.py, which reads all files too.
pytestmark = pytest.mark.xdist_group("architecture")
PRIVATE = re.compile(r"torch(\.\w+)*\._[^_\W]|from torch[\w.]* import .*\b_[^_\W]|from torch[\w.]*\._")


def _dotted(node: ast.expr) -> str:
    """Return the name that a chain of attributes spells, such as "torch.nn.Module"; "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@cache
def _private_names() -> frozenset[tuple[str, str]]:
    """Return each dotted name of torch that has an underscore, with the modules that use it."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(parsed(text)) if PRIVATE.search(text) else ():
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [_dotted(node)]
            for name in names:
                if name.startswith("torch.") and re.search(r"\._(?!_)", name):
                    found.add((name, str(path.relative_to(PACKAGE))))
    return frozenset(found)


def _has(name: str) -> bool:
    value: object = torch
    seen = "torch"
    for part in name.split(".")[1:]:
        seen += f".{part}"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(seen)
            except ImportError:
                return False
        else:
            value = getattr(value, part)
    return True


def test_this_torch_has_every_private_name() -> None:
    """The missing one is named, with the module that uses it."""
    used = {(name, module) for name, module in _private_names() if not name.startswith(REPLACED)}
    assert len(used) > 40
    assert {one for one in used if not _has(one[0])} == set()


def test_a_private_name_is_used_in_one_module() -> None:
    """So that one place changes where torch drops it."""
    modules: dict[str, set[str]] = {}
    for name, module in _private_names():
        if module != ALONE and not name.startswith(COMMON):
            modules.setdefault(name, set()).add(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
