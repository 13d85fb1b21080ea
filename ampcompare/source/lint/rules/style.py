"""Rules about what works, and reads or ages badly."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.lint.read.module import Finding, LintModule, Mistake, register_rule, text_of_literal
from ampcompare.source.syntax import argument

PRECISION = re.compile(r"(?i)\bamp\b|fp16|float16|half|mixed|bf16|apex|autocast")


@register_rule(
    Mistake(
        "AMP401",
        "private-state",
        "the script reads or changes `_amp_state` or `_amp_stash`",
        "these are private: other versions and other engines may not have them",
        "pass `loss_scale`, `min_loss_scale` and `max_loss_scale` to `amp.initialize`, or set a GradScaler's arguments",
        """
amp._amp_state.loss_scalers[0]._loss_scale = 2**20  # AMP401  # wrong
model, optimizer = amp.initialize(model, optimizer, max_loss_scale=2**20)  # right
""",
    ),
    needs=("_amp_sta",),
)
def private_state_of_apex(module: LintModule) -> Iterator[Finding]:
    """`_amp_state` and `_amp_stash` of Apex."""
    if not module.code_mentions_pattern("_amp_sta"):
        return
    lines = set()
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("_amp_state", "_amp_stash"):
            name = node.attr
        elif isinstance(node, ast.Name) and node.id == "_amp_state":
            name = node.id
        else:
            continue
        if node.lineno not in lines:
            lines.add(node.lineno)
            yield module.make_finding("AMP401", node, f"`{name}` is private to Apex")


@register_rule(
    Mistake(
        "AMP403",
        "boolean-flag",
        "an option of mixed precision has `type=bool`",
        'any non-empty string is true: `--fp16 False` switches fp16 on, as `bool("False")` is True',
        'write `action="store_true"`, or `action=argparse.BooleanOptionalAction`',
        """
parser.add_argument("--fp16", type=bool, default=False)  # AMP403  # wrong
parser.add_argument("--fp16", action="store_true")  # right
parser.add_argument("--shuffle", type=bool, default=False)  # right
""",
    ),
    needs=("add_argument", "type=bool"),
)
def argparse_options_of_type_bool(module: LintModule) -> Iterator[Finding]:
    """Options of mixed precision with `type=bool`."""
    for call, _ in module.method_calls("add_argument"):
        kind = argument(call, "type")
        flags = [text_of_literal(one) or "" for one in call.args]
        if isinstance(kind, ast.Name) and kind.id == "bool" and argument(call, "action") is None:
            flag = next(
                (flag for flag in flags if PRECISION.search(flag.replace("_", " ").replace("-", " "))), ""
            )
            if flag:
                yield module.make_finding("AMP403", call, f"`{flag} False` is true")
