"""Which loss scalers a migrated module has, and how each of its functions reaches them."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ampcompare.source.migrate.read.sites import Backward, Sites
from ampcompare.source.module import Function, Module
from ampcompare.source.syntax import dotted

__all__ = ["Scalers", "plan_scalers"]

# Attributes of an optimizer, where initialize and scale_loss stand in two files, by the plain name of a variable.
CARRIED = {"scaler": "grad_scaler", "precision": "precision"}


@dataclass(frozen=True)
class Scalers:
    """The scalers of a module.

    Attributes:
        names: of the variables, in the order of their first loss.
        home: "local" (a variable), "module" (a global one), "self" (an attribute of the object), "optimizer" (an
            attribute of the optimizer, which another file may set).
        by_optimizer: the name for each optimizer.
        attribute: by which an optimizer carries its scaler to another file.
    """

    names: tuple[str, ...]
    home: str
    by_optimizer: dict[str, str]
    attribute: str

    def name(self, optimizer: str | None) -> str:
        """Return the variable of the scaler of an optimizer; by default the first."""
        if optimizer is None:
            return self.names[0]
        if optimizer in self.by_optimizer:
            return self.by_optimizer[optimizer]
        tail = optimizer.rpartition(".")[2]
        return next((name for key, name in self.by_optimizer.items() if key.rpartition(".")[2] == tail), self.names[0])

    def reference(self, optimizer: str | None) -> str:
        """Return the expression for the scaler of an optimizer."""
        if self.home == "optimizer":
            if optimizer is None:
                raise LookupError("no optimizer in scope")
            return f"{optimizer}.{self.attribute}"
        name = self.name(optimizer)
        return f"self.{name}" if self.home == "self" else name


def plan_scalers(module: Module, sites: Sites, word: str, *, across: bool = False) -> Scalers:
    """Return the scalers that the uses of a module need.

    Args:
        word: the plain name, such as "scaler".
        across: whether another module initializes for functions of this one, so that no variable of this one serves.

    Raises:
        Unsure: the scalers cannot reach every use.
    """
    home = _home(module, sites)
    if across and home == "module":
        home = "optimizer"
    groups = _groups(sites)
    name = _free_name(module, word, attribute=home == "self")
    if len(groups) <= 1:
        keys = groups[0] if groups else ()
        return Scalers((name,), home, dict.fromkeys(keys, name), CARRIED[word])
    by_optimizer = {}
    names: list[str] = []
    for keys in groups:
        own = f"{name}_{_suffix(keys[0], len(names))}"
        names.append(own)
        by_optimizer.update(dict.fromkeys(keys, own))
    return Scalers(tuple(names), home, by_optimizer, CARRIED[word])


def _groups(sites: Sites) -> list[tuple[str, ...]]:
    """Return the optimizers that share a scaler: all, unless different `loss_id` go to different optimizers."""
    blocks = [each for each in sites.backwards if each.scales]
    identifiers = {id(each): _constant(each) for each in blocks}
    if len(set(identifiers.values())) <= 1 or None in identifiers.values():
        return [sites.optimizers] if sites.optimizers else []
    members: list[tuple[set[int], list[str]]] = []
    for each in blocks:
        number = identifiers[id(each)]
        assert number is not None
        touched = [group for group in members if number in group[0] or set(group[1]) & set(each.optimizers)]
        merged: tuple[set[int], list[str]] = ({number}, [])
        for group in touched:
            merged[0].update(group[0])
            merged[1].extend(group[1])
            members.remove(group)
        merged[1].extend(key for key in each.optimizers if key not in merged[1])
        members.append(merged)
    return [tuple(keys) for _, keys in members]


def _constant(backward: Backward) -> int | None:
    if backward.loss_id is None:
        return 0
    value = backward.loss_id
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, int) else None


def _suffix(key: str, number: int) -> str:
    tail = key.rpartition(".")[2]
    for word in ("optimizer", "optim", "opt"):
        if tail.lower().startswith(word):
            tail = tail[len(word) :]
            break
    return "".join(each if each.isalnum() or each == "_" else "_" for each in tail).strip("_") or str(number)


def _free_name(module: Module, word: str, *, attribute: bool) -> str:
    used = {node.attr for node in module.nodes if isinstance(node, ast.Attribute) and dotted(node.value) == "self"}
    if not attribute:
        used = {node.id for node in module.nodes if isinstance(node, ast.Name)}
        used |= {node.arg for node in module.nodes if isinstance(node, ast.arg)}
    names = (word, f"grad_{word}", f"amp_{word}", f"{word}_of_amp")
    return next((name for name in names if name not in used), f"{word}_for_amp")


def _home(module: Module, sites: Sites) -> str:
    created = {each.function for each in sites.initializes}
    others = [*sites.masters, *sites.saves, *sites.loads]
    used: set[Function | None] = {each.function for each in sites.backwards}
    used |= {each.function for each in sites.steps} | {each.function for each in sites.reads}
    used |= {module.function(each) for each in others}
    if not created:
        return "optimizer"
    if len(created) == 1:
        (function,) = created
        if function is None:
            # A class body at the top of the module is no scope for the functions in it.
            return "module"
        if all(each is not None and function in (each, *module.functions_around(each)) for each in used):
            return "local"
    owners = {module.class_of(_outermost(module, each)) for each in created | used}
    if len(owners) == 1 and None not in owners:
        return "self" if all(_has_self(_outermost(module, each)) for each in created | used) else "module"
    return "module"


def _outermost(module: Module, function: Function | None) -> Function | None:
    return None if function is None else [function, *module.functions_around(function)][-1]


def _has_self(function: Function | None) -> bool:
    return function is not None and [each.arg for each in function.args.args[:1]] == ["self"]
