"""Where a module asks a library for Apex by a word, as `TrainingArguments(half_precision_backend="apex")`.

The library imports the installed Apex then, which no import of the project says. Sources: transformers' guide to 5.0,
and the documentation of Lightning 1.8, ignite 0.4, mmengine 0.10 and catalyst 21.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from ampcompare.source.migrate.read.finding import BY_HAND, Finding
from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name, is_literal, last_part

ASKED = "{0} takes the installed Apex by {1}{2}"


class _Library(NamedTuple):
    """A library that uses Apex where an option has a certain value, and what to write instead.

    Attributes:
        name: as it is called.
        packages: that the module must import, or name.
        instead: what to write, behind a semicolon.
    """

    name: str
    packages: tuple[str, ...]
    instead: str


_TRANSFORMERS = _Library(
    "transformers",
    ("transformers",),
    "; leave it out: with fp16=True it takes torch.amp, which is all that it knows from 5.0 on",
)
_LIGHTNING = _Library(
    "Lightning",
    ("pytorch_lightning", "lightning"),
    '; write precision="16-mixed" (16 before Lightning 2.0, which no longer knows Apex), and leave amp_level out',
)
_IGNITE = _Library("ignite", ("ignite",), '; write amp_mode="amp", scaler=True')
_CATALYST = _Library("catalyst", ("catalyst",), "; take its AMPEngine, or fp16=dict(amp=True) up to 20.12")
_DEEPSPEED = _Library("DeepSpeed", ("deepspeed",), '; write "fp16": {"enabled": True}')
OPTIONS = {
    "half_precision_backend": _TRANSFORMERS,
    "fp16_backend": _TRANSFORMERS,
    "amp_backend": _LIGHTNING,
    "amp_mode": _IGNITE,
}
NAMES = {
    "ApexMixedPrecisionPlugin": _LIGHTNING,
    "supervised_training_step_apex": _IGNITE._replace(instead="; take supervised_training_step_amp"),
    "ApexOptimWrapper": _Library("mmengine", ("mmengine",), "; take AmpOptimWrapper"),
    "APEXEngine": _CATALYST,
    "DataParallelAPEXEngine": _CATALYST,
    "DistributedDataParallelAPEXEngine": _CATALYST,
}
# Options whose value is a dict with an opt level, which is Apex's.
TABLES = {"amp": _DEEPSPEED, "fp16": _CATALYST}
WORD = re.compile(r"\b(?:" + "|".join(NAMES) + r"|opt_level)\b")


def findings_of_library_requests(module: Module) -> list[Finding]:
    """Return a finding for each place at which a module asks a library for Apex by a word."""
    roots = {full.partition(".")[0] for _, _, full in module.imports}
    found = []
    for node in module.nodes:
        for library, shown in _requests_with_words(module, node):
            # a configuration of mmengine, which imports nothing, names the class in a text
            is_configuration = isinstance(node, ast.Constant) and node.value in NAMES
            if is_configuration or roots & {*library.packages}:
                message = ASKED.format(library.name, shown, library.instead)
                found.append(Finding.of_node(node, BY_HAND, message))
    return sorted(set(found))


def _requests_with_words(module: Module, node: ast.AST) -> Iterator[tuple[_Library, str]]:
    """Yield the library that a node may ask for Apex, with the words by which it does."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        full = module.resolve(node, follow=False) or ""
        library = NAMES.get(last_part(full))
        if library is not None and full.startswith(library.packages):
            yield library, f"`{last_part(full)}`"
    elif (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and _option_of(module, node) == "type"
    ):
        if (library := NAMES.get(node.value)) is not None:
            yield library, f'`type="{node.value}"`'
    elif isinstance(node, ast.expr):
        option = _option_of(module, node)
        if is_literal(node, "apex") and option in OPTIONS:
            yield OPTIONS[option], f'`{option}="apex"`'
        elif option in TABLES and "opt_level" in _keys_of_dict(node):
            yield TABLES[option], f"`opt_level` in `{option}`"


def _option_of(module: Module, value: ast.expr) -> str:
    """Return the keyword, key, name or attribute that gets a value; "" for none."""
    outer = module.parent(value)
    if isinstance(outer, ast.keyword):
        return outer.arg or ""
    if isinstance(outer, ast.Dict) and value in outer.values:
        key = outer.keys[outer.values.index(value)]
        return str(key.value) if isinstance(key, ast.Constant) else ""
    if isinstance(outer, ast.Assign):
        target = outer.targets[0]
        if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
            return str(target.slice.value)
        return last_part(dotted_name(target) or "")
    return ""


def _keys_of_dict(node: ast.expr) -> set[object]:
    """Return the constant keys of a dict that is written as one, or by a call of `dict`."""
    if isinstance(node, ast.Dict):
        return {each.value for each in node.keys if isinstance(each, ast.Constant)}
    if isinstance(node, ast.Call) and dotted_name(node.func) == "dict":
        return {each.arg for each in node.keywords}
    return set()
