"""What a training script does, in the order in which its lines run: the events that rules compare."""

from __future__ import annotations

import ast
import enum
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ampcompare.source.names import Scope

__all__ = ["FINITE", "Context", "Event", "Facts", "Kind", "conditions", "contradict", "narrowed", "plain"]

Facts = Mapping[str, object]
# Conditions that ask whether numbers are finite.
FINITE = re.compile(r"finite|isnan|isinf|\bnan\b|\binf\b", re.IGNORECASE)


class Kind(enum.Enum):
    """What an event is."""

    BACKWARD = "backward"
    FOREIGN_BACKWARD = "backward of a library"
    UNSCALE = "unscale_"
    CLIP = "clip"
    SCALER_STEP = "scaler.step"
    STEP = "optimizer.step"
    UPDATE = "scaler.update"
    ZERO_GRAD = "zero_grad"
    SCHEDULE = "scheduler.step"
    SCALE = "scaler.scale"
    INITIALIZE = "amp.initialize"
    FP16_OPTIMIZER = "FP16_Optimizer"
    SCALE_LOSS = "scale_loss"
    WRAP = "wrap"
    SYNC_BATCH_NORM = "sync batch norm"
    HALF = "half"
    CUDA = "cuda"
    LOAD = "load_state_dict"
    NEW_SCALER = "GradScaler"
    SAVE = "torch.save"
    NEW_OPTIMIZER = "optimizer"
    GRADIENT = "read or change of a gradient"
    CROSS_ENTROPY = "binary_cross_entropy"
    OPAQUE = "call of something else"


@dataclass(frozen=True, eq=False)
class Context:
    """A `with` block around events.

    Attributes:
        kind: `scale_loss`, `autocast` or `other`.
        node: the statement.
        name: canonical name of what `as` binds.
        call: of `scale_loss` or of autocast, if it is written there.
        enabled: False for an autocast that is switched off by a literal.
    """

    kind: str
    node: ast.With | ast.AsyncWith
    name: str = ""
    call: ast.Call | None = None
    enabled: bool = True


@dataclass(eq=False)
class Event:
    """One call of interest.

    Attributes:
        kind: what it is.
        call: the call itself.
        statement: the statement that contains it.
        subject: canonical name of the object: the loss, scaler, optimizer, scheduler or model.
        target: the optimizer of a scaler's call, or what the result is bound to.
        scaler: that has scaled the loss of a backward pass.
        facts: conditions under which it runs.
        loops: around it, the outermost first.
        contexts: around it, the outermost first.
        scope: in which it stands.
    """

    kind: Kind
    call: ast.Call
    statement: ast.stmt
    subject: str
    facts: Facts
    loops: tuple[ast.AST, ...]
    contexts: tuple[Context, ...]
    scope: Scope
    target: str = ""
    scaler: str = ""

    @property
    def shown(self) -> str:
        """The subject as it is named in the source."""
        return plain(self.subject)

    def may_follow(self, other: Event) -> bool:
        """Return whether one run of the code can meet both events."""
        return not contradict(self.facts, other.facts)

    def apex_block(self) -> Context | None:
        """Return the innermost `scale_loss` block around it."""
        return next((context for context in reversed(self.contexts) if context.kind == "scale_loss"), None)

    def autocast(self) -> Context | None:
        """Return the innermost autocast block around it, unless that is switched off."""
        found = next((context for context in reversed(self.contexts) if context.kind == "autocast"), None)
        return found if found is not None and found.enabled else None


def plain(name: str) -> str:
    """Return a canonical name as it stands in the source."""
    return name.rpartition(":")[2]


def contradict(one: Facts, other: Facts) -> bool:
    """Return whether two sets of conditions cannot both hold."""
    return any(key in other and other[key] != value for key, value in one.items())


def conditions(test: ast.expr, holds: bool) -> dict[str, object]:
    """Return what is known where a test holds, or where it does not.

    `x is not None` counts as `x`; `a == "b"` contradicts `a == "c"`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) == holds:
            return _joined(conditions(value, holds) for value in test.values) | {ast.unparse(test): holds}
        return {ast.unparse(test): holds}
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        operator, right = test.ops[0], test.comparators[0]
        is_equal = isinstance(operator, (ast.Eq, ast.Is))
        if is_equal or isinstance(operator, (ast.NotEq, ast.IsNot)):
            holds = holds == is_equal
            left = ast.unparse(test.left)
            if isinstance(right, ast.Constant):
                if right.value is None or isinstance(right.value, bool):
                    return {left: holds == bool(right.value)}
                known: dict[str, object] = {f"{left} == {right.value!r}": holds}
                if holds:
                    known[f"{left} =="] = right.value
                return known
            return {f"{left} == {ast.unparse(right)}": holds}
    return {ast.unparse(test): holds}


def narrowed(facts: Facts, test: ast.expr, holds: bool) -> Facts:
    """Return facts together with what a test adds to them.

    Where `a and b` does not hold but `b` does, `a` does not; where `a or b` holds but `b` does not, `a` does.
    """
    known = {**facts, **conditions(test, holds)}
    while True:
        found = _last_of_joint(known)
        if not found:
            return known
        known |= found


def _last_of_joint(known: Facts) -> dict[str, object]:
    """Return what follows for the only undecided part of a joint condition."""
    for text, value in known.items():
        test = _joint(text) if isinstance(value, bool) else None
        if test is None or isinstance(test.op, ast.And) == value:
            continue
        undecided = [each for each in test.values if not _is_known(known, each, not value)]
        if len(undecided) == 1:
            found = conditions(undecided[0], bool(value))
            if any(key not in known for key in found):
                return {key: one for key, one in found.items() if key not in known}
    return {}


def _is_known(known: Facts, test: ast.expr, holds: bool) -> bool:
    return all(key in known and known[key] == value for key, value in conditions(test, holds).items())


@functools.cache
def _joint(text: str) -> ast.BoolOp | None:
    if " and " not in text and " or " not in text:
        return None
    try:
        test = ast.parse(text, mode="eval").body
    except SyntaxError:  # a key that stands for no expression, such as that of a `try`
        return None
    return test if isinstance(test, ast.BoolOp) else None


def _joined(parts: Iterable[dict[str, object]]) -> dict[str, object]:
    return {key: value for part in parts for key, value in part.items()}
