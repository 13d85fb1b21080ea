"""The page of Python: functions made by `takes` get the parameters and texts of their options, as at run time."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from typing import Any

import griffe

TAKES = re.compile(r"takes\((\w+)\)")


class TakenParameters(griffe.Extension):
    """Gives each function below `@takes(Options)` the parameters of `Options`, and what its docstring says of them."""

    def on_package(self, *, pkg: griffe.Module, **others: Any) -> None:
        """Complete the functions of the interface, once all modules are read."""
        for module in pkg["api"].modules.values():
            for function in module.functions.values():
                for decorator in function.decorators:
                    if found := TAKES.fullmatch(str(decorator.value)):
                        _complete(function, module[found[1]].final_target)
                _show_defaults(function, module)


def _complete(function: griffe.Function, options: griffe.Class) -> None:
    constructor = options["__init__"]
    assert isinstance(constructor, griffe.Function)
    assert function.docstring is not None
    assert options.docstring is not None
    function.parameters = griffe.Parameters(*list(constructor.parameters)[1:])
    head, _, rest = function.docstring.value.partition("\n\n")
    _, _, texts = options.docstring.value.partition("Args:\n")
    texts = re.split(r"\n(?=\S)", texts)[0].rstrip()
    function.docstring.value = f"{head}\n\nArgs:\n{texts}\n\n{rest}"


def _show_defaults(function: griffe.Function, module: griffe.Module) -> None:
    """Show the value of a default that is not written as one, such as `DiagnoseOptions.steps`."""
    for parameter in function.parameters:
        try:
            ast.literal_eval(str(parameter.default))
        except ValueError:
            made = getattr(import_module(module.path), function.name)
            parameter.default = repr(inspect.signature(made).parameters[parameter.name].default)
