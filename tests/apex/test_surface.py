"""Every name, parameter and default of Apex 25.05 is here, or in the list of what is left out, with its reason.

`apex-25.05-surface.json` has the names, parameters and defaults in the sources of Apex 25.05, as `ast` reads them.
"""

import ast
import contextlib
import importlib
import inspect
import json
import os
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.optimizer import required

HERE = Path(__file__).resolve().parent
SURFACE: dict[str, Any] = json.loads((HERE / "apex-25.05-surface.json").read_text())
OMISSIONS: dict[str, dict[str, list[str]]] = json.loads((HERE / "apex-25.05-omissions.json").read_text())
ABSENT = [name for names in OMISSIONS["modules"].values() for name in names]


def is_absent(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in ABSENT)


def load(name: str) -> ModuleType:
    # Of two things of one name, a module and an attribute of its package, the module.
    return importlib.import_module(f"ampcompare.{name}")


def own_attributes(cls: type) -> set[str]:
    """Return the names that a class and its bases assign on `self`, or have."""
    return set(dir(cls)).union(*map(_assigned, inspect.getmro(cls)))


@cache
def _assigned(cls: type) -> set[str]:
    names = set(inspect.get_annotations(cls))
    # a class of C, or one that a function has made, has no source
    with contextlib.suppress(OSError, TypeError):
        tree = ast.parse(
            textwrap.dedent(inspect.getsource(cls) if cls.__module__.startswith("ampcompare.") else "")
        )
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return names


def default_of(text: str) -> Any:
    return eval(text, {"torch": torch, "required": required})


def misfit(theirs: list[list[str]], ours: Any) -> str | None:
    """Return the differences of the parameters; additional ones must come last and be optional."""
    params = list(inspect.signature(ours).parameters.values())
    if inspect.isclass(ours):
        return None
    wanted = [row for row in theirs if row[0] != "*"]
    names = [
        ("**" if p.kind is p.VAR_KEYWORD else "*" if p.kind is p.VAR_POSITIONAL else "") + p.name
        for p in params
    ]
    if names[: len(wanted)] != [row[0] for row in wanted]:
        return f"takes ({', '.join(names)}), Apex ({', '.join(row[0] for row in wanted)})"
    for row, param in zip(wanted, params, strict=False):
        if len(row) == 2 and (param.default is param.empty or param.default != default_of(row[1])):
            return f"has {param}, Apex {'='.join(row)}"
    needed = [
        p.name
        for p in params[len(wanted) :]
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return f"needs {', '.join(needed)} as well" if needed else None


def differences() -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the kind of each difference from Apex."""
    for module_name, surface in SURFACE.items():
        if is_absent(module_name):
            continue
        module = load(module_name)
        for kind in ("functions", "classes", "values", "imports"):
            for name in surface.get(kind, ()):
                if name != "*" and name != "__all__" and not hasattr(module, name):
                    yield f"{module_name}.{name}", "is missing"
        for name, rows in surface.get("functions", {}).items():
            problem = misfit(rows, getattr(module, name)) if hasattr(module, name) else None
            if problem:
                yield f"{module_name}.{name}", problem
        for name, members in surface.get("classes", {}).items():
            if hasattr(module, name):
                yield from differences_of_class(f"{module_name}.{name}", members, getattr(module, name))


def differences_of_class(name: str, members: dict[str, Any], cls: type) -> Iterator[tuple[str, str]]:
    for method, rows in members["methods"].items():
        if not hasattr(cls, method):
            yield f"{name}.{method}", "is missing"
            continue
        ours = inspect.getattr_static(cls, method)
        function = ours.__func__ if isinstance(ours, (staticmethod, classmethod)) else getattr(cls, method)
        problem = misfit(rows, function)
        if problem:
            yield f"{name}.{method}", problem
    attributes = own_attributes(cls)
    for value in members["values"]:
        if value not in attributes:
            yield f"{name}.{value}", "is missing"


def test_every_name_and_signature_is_here_or_listed() -> None:
    """Modules that are not omitted have Apex's names with its parameters and defaults, except those listed."""
    current = dict(differences())
    listed = {name for names in OMISSIONS["names"].values() for name in names}
    assert {name: how for name, how in current.items() if name not in listed} == {}
    assert sorted(listed - current.keys()) == [], "listed, but no longer different"


def test_what_is_left_out_cannot_be_imported() -> None:
    """A module that is listed as omitted cannot be found, so that scripts that import it get an error."""
    assert set(ABSENT) <= set(SURFACE)
    for name in ABSENT:
        with pytest.raises(ImportError):
            load(name)


LOADED_WITH_APEX = (
    "amp",
    "contrib.optimizers",
    "fp16_utils",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
)


def test_what_import_apex_makes_reachable(forked_python: Any, tmp_path: Path) -> None:
    """After `import apex` alone, the submodules that Apex loads with it are found as attributes, and by alias."""
    names = [
        name
        for name in SURFACE
        if name.startswith(tuple(f"apex.{room}" for room in (*LOADED_WITH_APEX, "parallel")))
        and not is_absent(name)
    ]
    names = [
        name
        for name in names
        if not name.endswith((".__version__", ".multiproc", ".contrib.optimizers.fused_sgd"))
    ]
    code = f"""
from ampcompare import apex
apex.install()
del apex
import apex, functools, sys
for name in {names!r}:
    functools.reduce(getattr, name.split(".")[1:], apex)
assert apex.parallel.LARC.LARC.__name__ == "LARC"
import apex_C, fused_layer_norm_cuda, amp_C
from apex.optimizers import FP16_Optimizer
from apex.amp._initialize import applier
"""
    main = tmp_path / "main.py"
    main.write_text(code, encoding="utf-8")
    done = forked_python.run(["-W", "ignore", str(main)], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
