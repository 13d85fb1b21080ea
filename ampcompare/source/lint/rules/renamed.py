"""Rules about names that newer versions of torch and transformers have replaced."""

import ast
from collections.abc import Iterator

from ampcompare.source.edits import Edits
from ampcompare.source.lint.read.module import Finding, LintModule, Mistake, register_rule, text_of_literal
from ampcompare.source.lint.rules.removed import OLD_TF32, TF32_NAMES, is_only_fallback
from ampcompare.source.syntax import last_name

MATMUL, ON_CPU = "torch.backends.cuda.matmul", "torch.backends.mkldnn.matmul"
# The new switches in the place of an old one.
SWITCHES = {
    "torch.backends.cuda.matmul.allow_tf32": (MATMUL,),
    "torch.backends.cudnn.allow_tf32": ("torch.backends.cudnn.conv", "torch.backends.cudnn.rnn"),
}
PRECISIONS = {"highest": "ieee", "high": "tf32"}
FIRST_TORCH, FIRST_TRANSFORMERS = (2, 9), (4, 56)


@register_rule(
    Mistake(
        "AMP313",
        "old-tf32-switch",
        "TF32 is switched by `allow_tf32` or `set_float32_matmul_precision`, which torch 2.9 has replaced",
        "deprecated; once any library sets a new switch, reading an old one raises a RuntimeError",
        'set `fp32_precision` to "tf32" or "ieee"',
        """
torch.backends.cuda.matmul.allow_tf32 = True  # AMP313  # wrong
torch.backends.cuda.matmul.fp32_precision = "tf32"  # right
""",
        fixable=True,
    ),
    needs=("allow_tf32|float32_matmul_precision",),
)
def old_tf32_switch(module: LintModule) -> Iterator[Finding]:
    """Old switches of TF32; they are fixed together or not at all, since both kinds do not mix."""
    if module.versions.torch < FIRST_TORCH:
        return
    uses: list[tuple[ast.expr, str]] = []
    for node in module.nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in TF32_NAMES:
            full = module.resolve(node) or ""
            if full.endswith(".fp32_precision"):
                return  # AMP312 says so where both are set
            if (
                full in OLD_TF32
                and full != "torch.backends.cudnn.flags"
                and not is_only_fallback(module, node)
            ):
                uses.append((node, full))
    edits, lines = Edits(module), [_find_new_switch_statement(module, node, full) for node, full in uses]
    for (node, _), line in zip(uses, lines, strict=True):
        if line is not None:
            edits.replace_statement(module.statement_around(node), [line])
    for node, full in uses:
        yield module.make_finding(
            "AMP313", node, f"`{full}` is of torch before 2.9", edits.sorted_edits() if all(lines) else ()
        )


def _find_new_switch_statement(module: LintModule, node: ast.expr, full_name: str) -> str | None:
    """Return the statement that does the same as the one around an old switch.

    None for any but a plain setting, and where the module knows torch by no name.
    """
    statement, call = module.statement_around(node), module.parent(node)
    torch = _find_name_of_torch(module, node)
    if torch is None:
        return None
    if isinstance(statement, ast.Assign) and statement.targets == [node] and full_name in SWITCHES:
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, bool):
            return _tf32_setting_text(
                torch, SWITCHES[full_name], '"tf32"' if statement.value.value else '"ieee"'
            )
        test = module.source(statement.value)
        return (
            _tf32_setting_text(torch, SWITCHES[full_name], f'"tf32" if {test} else "ieee"')
            if "\n" not in test
            else None
        )
    if (
        isinstance(statement, ast.Expr)
        and isinstance(call, ast.Call)
        and statement.value is call
        and len(call.args) == 1
    ):
        precision = PRECISIONS.get(text_of_literal(call.args[0]) or "")
        return None if precision is None else _tf32_setting_text(torch, (MATMUL, ON_CPU), f'"{precision}"')
    return None


def _find_name_of_torch(module: LintModule, node: ast.expr) -> str | None:
    """Return the name by which the line of a node knows torch, as `pt` of `import torch as pt`; None without one."""
    scopes = module.scope_of[node].lookup_scopes()
    return next((name for each in scopes for name, full in each.imports.items() if full == ["torch"]), None)


def _tf32_setting_text(torch: str, switches: tuple[str, ...], value: str) -> str:
    names = (f"{torch}{each.removeprefix('torch')}.fp32_precision" for each in switches)
    return " = ".join([*names, value])


@register_rule(
    Mistake(
        "AMP314",
        "torch-dtype",
        "a model of transformers is loaded with `torch_dtype`, which `dtype` has replaced in 4.56",
        "deprecated, with a warning at each load",
        "write `dtype`",
        """
from transformers import AutoModel  # wrong
from diffusers import UNet2DModel  # right

model = AutoModel.from_pretrained("gpt2", torch_dtype="auto")  # AMP314  # wrong
model = UNet2DModel.from_pretrained("unet", torch_dtype="auto")  # right
""",
        fixable=True,
    ),
    needs=("torch_dtype", "transformers"),
)
def deprecated_torch_dtype_arguments(module: LintModule) -> Iterator[Finding]:
    """`torch_dtype` of functions and classes of transformers."""
    if module.versions.transformers < FIRST_TRANSFORMERS:
        return
    for call, name in module.resolved_calls:
        given = {each.arg: each for each in call.keywords}
        if name.startswith("transformers.") and "torch_dtype" in given and "dtype" not in given:
            keyword = given["torch_dtype"]
            edits = module.replacement_edits(keyword, f"dtype={module.source(keyword.value)}")
            yield module.make_finding(
                "AMP314", call, "`torch_dtype` is `dtype` since transformers 4.56", edits
            )
