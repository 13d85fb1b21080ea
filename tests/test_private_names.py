"""The names of torch with an underscore that the package uses: the installed torch has each of them."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

import ampcompare
from tests.modules import parsed

PACKAGE = Path(ampcompare.__file__).parent
REPLACED = ("torch._six",)  # which a legacy script asks for, and no torch has
# What libraries on torch use everywhere, and torch keeps for them; any other name is used in one module.
COMMON = (
    *("torch._C", "torch._foreach_", "torch._amp_", "torch._fused_", "torch.nn.modules.batchnorm._BatchNorm"),
    *("torch.utils._pytree", "torch.utils._python_dispatch"),
)


def _private_names() -> Iterator[tuple[str, str]]:
    """Yield each dotted name of torch that has an underscore, and the module that uses it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            for name in names:
                parts = name.split(".")
                private = any(re.match("_(?!_)", part) for part in parts)
                if parts[0] == "torch" and private and all(part.isidentifier() for part in parts):
                    yield name, str(path.relative_to(PACKAGE))


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
        if not name.startswith(COMMON):
            modules.setdefault(name, set()).add(module)
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}
