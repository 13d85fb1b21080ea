"""Rewrite the core of `apex.amp` for `torch.amp`: initialize, scale_loss, steps, gradients that are read, state."""

from __future__ import annotations

import ast

from ampcompare.migrate.core.autocast import note_handed_on, note_missing_forward, wrap_forward
from ampcompare.migrate.core.carried_scaler import name_carried
from ampcompare.migrate.core.context import Core
from ampcompare.migrate.core.evaluation import cast_evaluation
from ampcompare.migrate.core.for_precision import rewrite_for_precision
from ampcompare.migrate.core.given_optimizers import find_helped
from ampcompare.migrate.core.initialize import create_scalers
from ampcompare.migrate.core.native_branches import check_native
from ampcompare.migrate.core.scale_loss import rewrite_backwards
from ampcompare.migrate.core.scalers import plan_scalers
from ampcompare.migrate.core.state_dict import rewrite_state
from ampcompare.migrate.core.steps import note_steps_apart, rewrite_steps
from ampcompare.migrate.core.timm_scaler import rewrite_timm, uses_timm_scaler
from ampcompare.migrate.core.unscale import place_unscale
from ampcompare.migrate.edits import Edits
from ampcompare.migrate.finding import Finding
from ampcompare.migrate.read.forward import find_forward
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.neighbours import Around
from ampcompare.migrate.read.order import find_order
from ampcompare.migrate.read.passed_amp import drop_passed
from ampcompare.migrate.read.sites import Initialize, Sites, Unsure, collect_sites
from ampcompare.migrate.read.tree import Tree
from ampcompare.source.syntax import dotted

__all__ = ["rewrite_core"]


def rewrite_core(tree: Tree, names: Names, edits: Edits, torch: str, target: str, around: Around) -> list[Finding]:
    """Rewrite the core of a module, all of it.

    Args:
        around: what other modules have to do with it.

    Raises:
        Unsure: something cannot be rewritten surely; the edits are incomplete then and must not be used.
    """
    sites = collect_sites(tree, names)
    if not (sites.initializes or sites.backwards or sites.masters or sites.saves or sites.loads):
        return []
    _refuse(tree, names, sites)
    helped = find_helped(tree, sites, around)
    native = check_native(tree, names, sites)
    scalers = plan_scalers(tree, sites, "scaler" if target == "torch" else "precision", across=around.across or helped)
    order = find_order(tree, sites, scalers.name)
    core = Core(tree, names, edits, torch, target, sites, scalers, order, find_forward(tree, names, sites))
    core.native = native
    core.across, core.helped = around.across or helped, helped
    if target == "torch" and uses_timm_scaler(tree, sites):
        rewrite_timm(core)
        return core.findings
    create_scalers(core)
    name_carried(core)
    if scalers.home == "optimizer" and not sites.initializes and sites.backwards and not around.is_given(tree.text):
        what = "scaler" if target == "torch" else "precision"
        core.note(
            sites.backwards[0].statement,
            f"the optimizer carries the {what} here, as {scalers.attribute}; no file that initializes was found that "
            "imports this one, so set that attribute where it is made",
        )
    if target == "precision":
        if names.parameters:
            raise Unsure(names.parameters[0][1], "apex.amp is passed as a value; what is called on it cannot be seen")
        rewrite_for_precision(core)
        return core.findings
    note_missing_forward(core)
    note_handed_on(core)
    wrap_forward(core)
    cast_evaluation(core)
    place_unscale(core)
    rewrite_backwards(core)
    rewrite_steps(core)
    note_steps_apart(core)
    rewrite_state(core)
    drop_passed(tree, edits, names.parameters)
    return core.findings


def _refuse(tree: Tree, names: Names, sites: Sites) -> None:
    for initialize in sites.initializes if not sites.backwards else []:
        _refuse_library(tree, initialize)
    for use, name in names.uses:
        if name in ("apex", "apex.amp") and id(use) not in names.passed and _is_passed_on(tree, use):
            raise Unsure(use, f"{name} is passed as a value; what is called on it cannot be seen")
    for node in tree.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("scale_loss", "master_params"):
            if names.meaning(node) is None and isinstance(tree.parent(node), ast.Call):
                raise Unsure(node, f"{node.attr} is called on something that may be apex.amp or not")


def _refuse_library(tree: Tree, initialize: Initialize) -> None:
    """Refuse a trainer that inherits its backward pass from the one of transformers, which calls Apex itself."""
    holder = tree.class_of(initialize.function)
    bases = {dotted(base) for base in holder.bases} if holder is not None else set()
    for node in tree.nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers" and not node.level:
            if any(alias.name == "Trainer" and (alias.asname or alias.name) in bases for alias in node.names):
                raise Unsure(
                    initialize.call,
                    "the backward pass is in transformers.Trainer, which is not migrated; let it use torch.amp, by the "
                    "arguments of the Trainer, and remove this branch by hand",
                )


def _is_passed_on(tree: Tree, node: ast.AST) -> bool:
    """Return whether a name of a module is used as a value, other than in a test for `None`."""
    parent = tree.parent(node)
    if isinstance(getattr(node, "ctx", None), ast.Store) or isinstance(parent, (ast.Compare, ast.Global)):
        return False
    return not (isinstance(parent, (ast.If, ast.BoolOp, ast.IfExp, ast.UnaryOp)))
