"""Rules about what works, and reads or ages badly."""

import ast
import re
from collections.abc import Iterator

from ampcompare.source.lint.module import Finding, LintModule, Mistake, is_off, literal, name_of, rule
from ampcompare.source.syntax import argument

PRECISION = re.compile(r"(?i)\bamp\b|fp16|float16|half|mixed|bf16|apex|autocast")


@rule(
    Mistake(
        "AMP401",
        "private-state",
        "the script reads or changes `_amp_state` or `_amp_stash`",
        "these are private: other versions and other engines may not have them",
        "pass `loss_scale`, `min_loss_scale` and `max_loss_scale` to `amp.initialize`, or set a GradScaler's arguments",
        """
from apex import amp

amp._amp_state.loss_scalers[0]._loss_scale = 2**20  # AMP401  # wrong
model, optimizer = amp.initialize(model, optimizer, max_loss_scale=2**20)  # right
""",
    )
)
def private_state(module: LintModule) -> Iterator[Finding]:
    """`_amp_state` and `_amp_stash` of Apex."""
    if not module.mentions("_amp_sta"):
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
            yield module.finding("AMP401", node, f"`{name}` is private to Apex")


@rule(
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
    )
)
def boolean_flag(module: LintModule) -> Iterator[Finding]:
    """Options of mixed precision with `type=bool`."""
    for call, _ in module.methods("add_argument"):
        kind = argument(call, "type")
        flags = [literal(one) or "" for one in call.args]
        if isinstance(kind, ast.Name) and kind.id == "bool" and argument(call, "action") is None:
            flag = next((flag for flag in flags if PRECISION.search(flag.replace("_", " ").replace("-", " "))), "")
            if flag:
                yield module.finding("AMP403", call, f"`{flag} False` is true")


@rule(
    Mistake(
        "AMP409",
        "scaler-of-main",
        "a function reads a global GradScaler that is None or off until the function that runs the script sets it",
        "a script that imports the function silently trains in fp32, whatever its options say",
        "pass the scaler as an argument",
        """
import argparse
import torch

scaler = None  # wrong


def train(model, batch, optimizer):  # wrong
def train(model, batch, optimizer, scaler=None):  # right
    if scaler is None:
        model(batch).backward()
        optimizer.step()
    else:
        scaler.scale(model(batch)).backward()  # AMP409
        scaler.step(optimizer)
        scaler.update()


def main():
    global scaler  # wrong
    args = argparse.ArgumentParser().parse_args()
    scaler = torch.amp.GradScaler("cuda")
""",
    )
)
def scaler_of_main(module: LintModule) -> Iterator[Finding]:
    """Functions that read a global scaler which is None or off until the function that runs the script sets it."""
    for name, values in module.top.values.items():
        if not values or not all(_is_none_or_off(module, value) for value in values):
            continue
        setters = [
            scope
            for scope in module.top.functions.values()
            if any(isinstance(node, ast.Global) and name in node.names for node in ast.walk(scope.node))
        ]
        if not setters or not all(_runs_as_script(module, scope.node) for scope in setters):
            continue
        if not any(module.kinds.is_new_scaler(value, one) for one in setters for value in one.values.get(name, ())):
            continue
        for scope in module.top.functions.values():
            if scope in setters or name in scope.parameters or name in scope.values:
                continue
            uses = [
                call
                for call in module.calls
                if module.scope_of[call] is scope and name_of(call.func) in (f"{name}.scale", f"{name}.step")
            ]
            if uses:
                setter = setters[0].node
                assert isinstance(setter, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield module.finding("AMP409", uses[0], f"only `{setter.name}` turns the global `{name}` on")
                break


def _is_none_or_off(module: LintModule, value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is None
    return isinstance(value, ast.Call) and is_off(value) and module.kinds.is_new_scaler(value, module.top)


def _runs_as_script(module: LintModule, node: ast.AST) -> bool:
    """Return whether a function reads the command line, or is called only under `if __name__ == "__main__"`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        if any(isinstance(part, ast.Attribute) and part.attr == "parse_args" for part in ast.walk(node)):
            return True
        calls = [call for call in module.calls if name_of(call.func) == node.name]
        return bool(calls) and all(_under_main(module, call) for call in calls)
    return False


def _under_main(module: LintModule, node: ast.AST) -> bool:
    return any(isinstance(outer, ast.If) and "__name__" in ast.unparse(outer.test) for outer in module.ancestors(node))
