"""The calls of a script that matter to an arm: those of `apex.amp` and `torch.amp`, and steps of optimizers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from ampcompare.launch.script.refusals.files import SourceFile, SourceFiles
from ampcompare.source.names import ModuleNames
from ampcompare.source.syntax import dotted

__all__ = ["Use", "Uses", "find_uses"]

NAMES = {
    "initialize": ("apex.amp.initialize", "ampcompare.apex.amp.initialize"),
    "init": ("apex.amp.init", "ampcompare.apex.amp.init"),
    "autocast": (
        *("torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"),
        "torch.amp.autocast_mode.autocast",
    ),
    "scaler": ("torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler"),
}
KINDS = {full: kind for kind, names in NAMES.items() for full in names}
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Use:
    """One call.

    Attributes:
        place: as `train.py:12`.
        enabled: the literal value of the argument of that name; None where it is missing or no literal.
    """

    place: str
    enabled: bool | None = None


@dataclass
class Uses:
    """What the files of a script do.

    Attributes:
        words: all names and words in the text, comments included: what is not among them is not used.
        calls: by kind, see `NAMES`.
        closures: steps with a closure.
        steps: whether an optimizer may be stepped without one.
    """

    words: set[str] = field(default_factory=set)
    calls: dict[str, list[Use]] = field(default_factory=lambda: {kind: [] for kind in NAMES})
    closures: list[Use] = field(default_factory=list)
    steps: bool = False


def find_uses(source: SourceFiles) -> Uses:
    """Return what all files of a script do."""
    uses = Uses()
    for file in source.files:
        uses.words.update(WORD.findall(file.text))
        names = ModuleNames(file.tree)
        for call in names.calls:
            kind = KINDS.get(names.resolve_here(call.func) or "")
            if kind is not None:
                uses.calls[kind].append(_use(file, call))
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                if _has_closure(names, call):
                    uses.closures.append(_use(file, call))
                elif "sched" not in (dotted(call.func) or "").lower():
                    uses.steps = True
    return uses


def _use(file: SourceFile, call: ast.Call) -> Use:
    given = next((one.value for one in call.keywords if one.arg == "enabled"), None)
    enabled = given.value if isinstance(given, ast.Constant) and isinstance(given.value, bool) else None
    return Use(f"{file.path}:{call.lineno}", enabled)


def _has_closure(names: ModuleNames, call: ast.Call) -> bool:
    return any(_is_function(names, call, value) for value in call.args) or any(
        one.arg == "closure" for one in call.keywords
    )


def _is_function(names: ModuleNames, call: ast.Call, value: ast.expr) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    scopes = names.scope_of[call].enclosing()
    return isinstance(value, ast.Name) and any(value.id in scope.functions for scope in scopes)
