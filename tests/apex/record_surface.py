"""Write the names and signatures of an Apex source tree as JSON: `python record_surface.py APEX_FOLDER > FILE`.

The tree is parsed, not imported, so that neither CUDA nor a build is needed. Only facts are written: for each module
its functions and classes with their parameters and defaults, its other names, and for a package what it imports from
Apex.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["surface_of_module", "surface_of_tree"]

NOT_SURFACE = ("test", "tests", "testing", "examples", "csrc", "permutation_tests")


def surface_of_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the surface of each module below `folder`, which is the package `apex` itself."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if any(part in NOT_SURFACE for part in parts):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        package = name if parts[-1] == "__init__" else name.rpartition(".")[0]
        surface = surface_of_module(path.read_text(encoding="utf-8"), package)
        if name != package:
            # Only a package's imports are an interface; those of a module are its own affair.
            surface.pop("imports", None)
        modules[name] = surface
    return modules


def surface_of_module(source: str, package: str) -> dict[str, Any]:
    """Return `functions`, `classes`, `values` and `imports` that a module binds at its top level."""
    surface: dict[str, Any] = {"functions": {}, "classes": {}, "values": [], "imports": {}}
    for node in _top_level(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            surface["functions"][node.name] = signature(node)
        elif isinstance(node, ast.ClassDef):
            surface["classes"][node.name] = _class(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            surface["values"] += [name for name in _targets(node) if name not in surface["values"]]
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, package)
            if origin.partition(".")[0] == "apex":
                surface["imports"].update({alias.asname or alias.name: origin for alias in node.names})
    return {kind: value for kind, value in surface.items() if value}


def signature(node: ast.FunctionDef) -> list[list[str]]:
    """Return the parameters as [name] or [name, default]; `*` and `**` lead the names that collect."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [_parameter(one.arg, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        rows.append(["*" + arguments.vararg.arg])
    elif arguments.kwonlyargs:
        rows.append(["*"])
    rows += [
        _parameter(one.arg, default) for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        rows.append(["**" + arguments.kwarg.arg])
    return rows


def _parameter(name: str, default: ast.expr | None) -> list[str]:
    return [name] if default is None else [name, ast.unparse(default)]


def _class(node: ast.ClassDef) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    values: list[str] = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            decorators = {ast.unparse(one) for one in child.decorator_list}
            if "property" in decorators or any(one.endswith(".setter") for one in decorators):
                values.append(child.name)
            else:
                methods[child.name] = signature(child)
        elif isinstance(child, ast.Assign):
            values += _targets(child)
    return {"methods": methods, "values": sorted(set(values) | _attributes(node))}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that methods assign on `self`."""
    return {
        target.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Assign | ast.AugAssign)
        for target in (child.targets if isinstance(child, ast.Assign) else [child.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level([*node.body, *node.orelse, *getattr(node, "finalbody", [])])
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _origin(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in surface_of_tree(Path(sys.argv[1])).items()]
    print("{", ",\n".join(rows), "}", sep="\n")
