"""What of other packages calls the installed Apex in a training that the project initializes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ampcompare.source.amp_names import AUTOCASTS
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex
from ampcompare.source.syntax import argument, argument_values, dotted_name, is_literal, last_name

# Functions and classes that scale a loss by the Apex that is installed (timm 0.x and 1.0, torch_lr_finder 0.2.0 and
# 0.2.1), with the first part of their full names, and what to do.
SCALING = {
    "ApexScaler": ("timm", "; take timm's NativeScaler, and autocast"),
    "LRFinder": ("torch_lr_finder", ""),
}
# Classes whose methods initialize, step, save and load by it (classy_vision 0.4 to 0.7).
CALLING_BASES = {"ClassificationTask": "classy_vision", "FineTuningTask": "classy_vision"}
OF_CPU = {"torch.cpu.amp.autocast"}
KNOWN = frozenset({"torch", "torchvision", "apex", "amp_C", "apex_C"})


class ApexCaller(NamedTuple):
    """A use of what calls the installed Apex.

    Attributes:
        node: of the use.
        does: what it does by Apex, in words before that name.
        instead: what to do, in words behind.
        full: the full name of what is used; "" where nothing says.
    """

    node: ast.AST
    does: str
    instead: str
    full: str

    def message_naming_apex(self, apex: str) -> str:
        """Return what it does by Apex, which is called so, and what to do."""
        return f"{self.does} {apex}{self.instead}"


def find_apex_callers(module: Module) -> Iterator[ApexCaller]:
    """Yield the calls of what scales losses by the installed Apex, and classes whose bases call it."""
    for call in module.calls:
        name = last_name(call.func)
        package, instead = SCALING.get(name, ("", ""))
        if package and _may_be_of_package(module, call.func, package):
            full = module.resolve(call.func) or ""
            yield ApexCaller(call, f"{name} of {package} scales the loss by", instead, full)
    for node in module.nodes:
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            package = CALLING_BASES.get(last_name(base), "")
            full = module.resolve(base) or ""
            if package and full.startswith(f"{package}."):
                yield ApexCaller(base, f"{last_name(base)} of {package} steps, saves and loads by", "", full)


def find_apex_callers_of_file(path: Path, module: Module, imports: ImportIndex) -> list[ApexCaller]:
    """Return what of other packages than the project itself calls the installed Apex in a file.

    Args:
        path: of the file.
        module: of the file.
        imports: of the project.
    """
    return [
        each
        for each in find_apex_callers(module)
        if not each.full or imports.find_file_and_name_of_definition(path, each.full) is None
    ]


def may_call_apex_through_package(module: Module) -> bool:
    """Return whether a module calls what calls the installed Apex, be it of the project."""
    return any(True for _ in find_apex_callers(module))


def find_own_autocast(module: Module) -> ast.AST | None:
    """Return the first block or decorator of a module that switches torch's autocast on; None without one."""
    for node in module.nodes if "autocast" in module.text else ():
        if not isinstance(node, (ast.Name, ast.Attribute)) or module.resolve(node) not in AUTOCASTS - OF_CPU:
            continue
        outer = module.parent(node)
        if isinstance(outer, ast.Call) and outer.func is node:
            enabled, device = argument(outer, "enabled"), outer.args[0] if outer.args else None
            if is_literal(enabled, False) or is_literal(device, False) or is_literal(device, "cpu"):
                continue
            return outer
        if node in getattr(outer, "decorator_list", ()):
            return node
    return None


def opens_own_autocast(module: Module) -> bool:
    """Return whether a module switches torch's autocast on."""
    return find_own_autocast(module) is not None


def _may_be_of_package(module: Module, function: ast.expr, package: str) -> bool:
    """Return whether a function is of a package, or nothing says of which one."""
    full = module.resolve(function)
    return full is None or full.startswith(f"{package}.")


def outside_calls_with_model_and_optimizer(names: ModuleImports) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls of other modules that get a model and an optimizer of an `amp.initialize`, with full names.

    Modules of the project are among them.
    """
    module = names.module
    pairs = set(_initialized_pairs(names))
    for call in module.calls if pairs else ():
        full = module.resolve(call.func)
        if full is None or full.partition(".")[0] in KNOWN:
            continue
        given = {dotted_name(each) for each in argument_values(call)}
        if any(model in given and optimizer in given for model, optimizer in pairs):
            yield call, full


def _initialized_pairs(names: ModuleImports) -> Iterator[tuple[str, str]]:
    """Yield the names of the model and the optimizer that each `amp.initialize` is assigned to."""
    module = names.module
    for node, full in names.uses:
        call = module.parent(node)
        if full != "apex.amp.initialize" or not isinstance(call, ast.Call) or call.func is not node:
            continue
        statement = module.parent(call)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            model, optimizer = map(dotted_name, target.elts)
            if model and optimizer:
                yield model, optimizer
