"""Rules about mixed precision in the trainers of Lightning and transformers."""

import ast
from collections.abc import Iterator
from itertools import pairwise

from ampcompare.source.amp_names import OPT_LEVELS
from ampcompare.source.lint.read.module import Finding, LintModule, Mistake, register_rule, text_of_literal

PACKAGES = ("pytorch_lightning.", "lightning.pytorch.", "lightning.")
OF_APEX = ("amp_backend", "amp_level")
# Modules that import one of these may set options of its Trainer, or start a script that has it.
SETS_OPTIONS = {"transformers", "trl", "adapters", "sentence_transformers", "subprocess"}
APEX_OPTIONS = {
    "half_precision_backend": ("apex",),
    "fp16_backend": ("apex",),
    "fp16_opt_level": OPT_LEVELS,
}


@register_rule(
    Mistake(
        "AMP310",
        "lightning-apex",
        "arguments that selected Apex in the Trainer of Lightning 1",
        "removed in Lightning 2: a TypeError",
        'write `precision="16-mixed"` or `precision="bf16-mixed"`',
        """
import lightning.pytorch as pl

trainer = pl.Trainer(precision=16, amp_backend="apex")  # AMP310  # wrong
trainer = pl.Trainer(precision="16-mixed")  # right
""",
    ),
    needs=("amp_backend|amp_level", "ightning"),
)
def apex_arguments_of_lightning(module: LintModule) -> Iterator[Finding]:
    """Arguments with which a Trainer of Lightning 1 chose Apex."""
    for call, name in module.resolved_calls:
        if name.startswith(PACKAGES) and name.endswith(".Trainer"):
            wrong = [one for one in call.keywords if one.arg in OF_APEX]
            if wrong:
                yield module.make_finding(
                    "AMP310", wrong[0].value, f"Lightning's Trainer has no argument `{wrong[0].arg}`"
                )


@register_rule(
    Mistake(
        "AMP311",
        "transformers-apex",
        "options that selected Apex in the Trainer of transformers",
        "an ImportError with any later Apex; with transformers 5, which has no other backend, a TypeError",
        "leave them out: `fp16=True` or `bf16=True` uses torch.amp",
        """
from transformers import TrainingArguments

arguments = TrainingArguments("out", fp16=True, half_precision_backend="apex")  # AMP311  # wrong
arguments = TrainingArguments("out", fp16=True)  # right
""",
    ),
    needs=("half_precision_backend|fp16_backend|fp16_opt_level",),
)
def apex_options_of_transformers(module: LintModule) -> Iterator[Finding]:
    """Options with which the Trainer of transformers chose Apex: as arguments, in a dict, or on a command line."""
    if {name.partition(".")[0] for _, _, name in module.imports} & SETS_OPTIONS:
        for node in module.nodes:
            for place, option, value in _options_set_by_node(module, node):
                if text_of_literal(value) in APEX_OPTIONS.get(option, ()):
                    yield module.make_finding("AMP311", place, f"`{option}` is an option of Apex")


def _options_set_by_node(module: LintModule, node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Yield what a node sets by a name: where, the name, and the value."""
    if isinstance(node, ast.Call) and not module.may_be_own_function(node.func):
        yield from ((one.value, one.arg or "", one.value) for one in node.keywords)
    elif isinstance(node, ast.Dict):
        yield from (
            (value, text_of_literal(key) or "", value)
            for key, value in zip(node.keys, node.values, strict=True)
        )
    elif isinstance(node, ast.Assign):
        yield from ((node, one.attr, node.value) for one in node.targets if isinstance(one, ast.Attribute))
    elif isinstance(node, (ast.List, ast.Tuple)):
        for word, value in pairwise(node.elts):
            yield word, (text_of_literal(word) or "").removeprefix("--"), value
        for one in node.elts:  # --option=value
            option, _, text = (text_of_literal(one) or "").removeprefix("--").partition("=")
            yield one, option, ast.Constant(text)
