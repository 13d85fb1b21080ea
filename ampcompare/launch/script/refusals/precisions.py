"""Precisions of libraries that no arm can replace, where the source or the arguments of a script name them.

Only a literal counts, in a call that no branch leaves out: the rest is refused by the cell, when the trainer is made.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampcompare.launch.script.refusals.files import SourceFiles
from ampcompare.source.names import ModuleNames
from ampcompare.source.syntax import dotted

__all__ = ["foreign_precision"]

LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning")
LIGHTNING_PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric"}
CONSTRUCTORS = {
    **{f"{package}.Trainer": "lightning" for package in LIGHTNING},
    **{f"{package}.Fabric": "lightning" for package in ("lightning", "lightning.fabric", "lightning_fabric")},
    "accelerate.Accelerator": "accelerate",
    "transformers.TrainingArguments": "transformers",
    "transformers.Seq2SeqTrainingArguments": "transformers",
    "deepspeed.initialize": "deepspeed",
}
# What a keyword begins with, by library; "" stands for anything but nothing, such as a plugin.
MIXED = 'take precision="16-mixed" or "bf16-mixed"'
KEYWORDS = {
    "lightning": {
        "strategy": {"deepspeed": 'take strategy="ddp"', "fsdp": 'take strategy="ddp"', "xla": 'take strategy="ddp"'},
        "precision": {"64": MIXED, "transformer-engine": MIXED},
    },
    "accelerate": {
        "mixed_precision": {"fp8": 'take mixed_precision="bf16"'},
        "deepspeed_plugin": {"": "leave it out"},
        "fsdp_plugin": {"": "leave it out"},
        "megatron_lm_plugin": {"": "leave it out"},
    },
    "transformers": {"deepspeed": {"": "leave it out"}, "fsdp": {"": "leave it out"}},
    "deepspeed": {},
}
STRATEGIES = {"DeepSpeedStrategy": "deepspeed", "FSDPStrategy": "fsdp", "XLAStrategy": "xla"}
# Arguments of a script that mean the same wherever they are known, with what their values begin with; "" is any value.
ARGUMENTS = {
    "deepspeed": {"": "leave it out"},
    "deepspeed_config": {"": "leave it out"},
    "use_deepspeed": {"": "leave it out"},
    "use_fsdp": {"": "leave it out"},
    "use_megatron_lm": {"": "leave it out"},
    "fsdp": dict.fromkeys(("full_shard", "shard_grad_op", "hybrid_shard"), "leave it out"),
    "mixed_precision": {"fp8": "leave it out"},
}
# Those of LightningCLI and Hydra, such as `--trainer.strategy=fsdp`; without `trainer.` for a script of Lightning only.
TRAINER_ARGUMENTS = KEYWORDS["lightning"]
BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.BoolOp, ast.ExceptHandler)


def foreign_precision(source: SourceFiles, arguments: Sequence[str]) -> str:
    """Return why no arm but `script` can train a script, with the place; "" where that is not certain."""
    is_lightning = any(head in LIGHTNING_PACKAGES for file in source.files for head in _imported(file.tree))
    for number, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        key = name.lstrip("-+").replace("-", "_")
        known = ARGUMENTS.get(key, {}) if name.startswith("--") else {}
        if key.startswith("trainer.") or (is_lightning and name.startswith("--")):
            known = TRAINER_ARGUMENTS.get(key.removeprefix("trainer.").removesuffix(".class_path"), known)
        given = value if has_value else next(iter(arguments[number + 1 : number + 2]), "")
        given = given.strip("'\"")
        for begins, advice in known.items():
            if STRATEGIES.get(given.rpartition(".")[2], given).startswith(begins):
                shown = f"{name} {given}" if begins else name
                return _refusal(f"the argument {shown}", advice)
    found = [(place, what) for file in source.files for place, what in _constructed(file.tree, str(file.path))]
    if found and all(what for _, what in found):
        return f"{found[0][0]}: {found[0][1]}"
    return ""


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the first parts of the names that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def _refusal(what: str, advice: str) -> str:
    return f"{what} has its own precision and steps, which this arm cannot replace; {advice}, or compare script only"


def _constructed(tree: ast.Module, path: str) -> Iterator[tuple[str, str]]:
    """Yield the place of each trainer that a file makes, and why it is refused; "" where it may train."""
    names = ModuleNames(tree)
    for call in names.calls:
        library = CONSTRUCTORS.get(names.resolve_here(call.func) or "")
        if library is not None:
            what = "" if _is_in_branch(names, call) else _why(library, call)
            yield f"{path}:{call.lineno}", what


def _why(library: str, call: ast.Call) -> str:
    if library == "deepspeed":
        return _refusal("DeepSpeed", "let the script train without it")
    for keyword in call.keywords:
        begins = KEYWORDS[library].get(keyword.arg or "")
        value = None if begins is None else _literal(keyword.value)
        if begins is None or value is None:
            continue
        for begin, advice in begins.items():
            if value.startswith(begin):
                return _refusal(f"{keyword.arg}={ast.unparse(keyword.value)} of {library}", advice)
    return ""


def _literal(value: ast.expr) -> str | None:
    """Return what a keyword is given; None where that is not certain, or nothing."""
    if isinstance(value, ast.Constant):
        return str(value.value) if value.value else None
    if isinstance(value, ast.Call):
        name = (dotted(value.func) or "").rpartition(".")[2]
        return STRATEGIES.get(name, name if name.endswith("Plugin") else None)
    return "a dictionary" if isinstance(value, ast.Dict) and value.keys else None


def _is_in_branch(names: ModuleNames, call: ast.Call) -> bool:
    node = names.parents.get(call)
    while node is not None:
        if isinstance(node, BRANCHES) and not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)):
            return True
        node = names.parents.get(node)
    return False
