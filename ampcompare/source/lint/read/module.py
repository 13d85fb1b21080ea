"""One module under examination with everything that rules ask for, the mistakes that they know, and their findings."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ampcompare.source.edits import Edit
from ampcompare.source.index import ImportedObject, Index, ProjectFunction, functions_of_callee
from ampcompare.source.lint.read.update_events import EventKind, EventTracer, TrainingEvent
from ampcompare.source.module import Module, Scope
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.project import Project
from ampcompare.source.syntax import FunctionNode, argument, dotted_name, is_literal, last_name
from ampcompare.source.versions import LATEST, Versions

Trace = list[TrainingEvent]
RULES: list[Rule] = []
AMP_KINDS = (EventKind.SCALE, EventKind.SCALER_STEP, EventKind.SCALE_LOSS, EventKind.INITIALIZE)
# What an example imports that uses these names and has no imports of its own.
IMPORTS = {"torch": "import torch", "amp": "from apex import amp"}
# Calls that end the process.
EXITS = re.compile(r"^(?:sys\.|os\._?)?(?:exit|quit|abort)$")
# A comment, or text between quotes as its group.
COMMENT_OR_TEXT = re.compile(
    r"""#[^\n]*|(\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
# Without one of these calls in it, a trace has no finding.
OF_TRAINING = re.compile(
    r"backward|scaler|clip_grad|^(?:scale|unscale_|initialize|scale_loss|binary_cross_entropy|FP16_Optimizer)$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Mistake:
    """One entry of the catalog.

    Attributes:
        code: `AMP1..` misuse of Apex, `AMP2..` of `torch.amp`, `AMP3..` removed or deprecated, `AMP4..` style; empty
            for what only a guard sees at run time.
        name: in messages of guards and in the documentation.
        mistake: what the script does.
        matters: what that does to the training.
        remedy: what to write instead.
        script: code with the mistake, on each line that ends in a comment with the code, and its harmless twin: lines
            that end in `# wrong` are of the one alone, those that end in `# right` of the other. `IMPORTS` stand above.
        fixable: whether `lint --fix` can correct it where it is sure.
        guard: the guard of `exec` that sees the same mistake at run time, if it has another name.
    """

    code: str
    name: str
    mistake: str
    matters: str
    remedy: str
    script: str = ""
    fixable: bool = False
    guard: str = ""

    @property
    def example(self) -> str:
        """The code with the mistake."""
        return self._lines_with_mark("wrong", "right")

    @property
    def harmless_code(self) -> str:
        """Code that looks like it and is right."""
        return re.sub(r"  # AMP\d{3}$", "", self._lines_with_mark("right", "wrong"), flags=re.MULTILINE)

    def _lines_with_mark(self, mark: str, other: str) -> str:
        imports = IMPORTS.items() if "import " not in self.script else ()
        head = "".join(f"\n{line}" for name, line in imports if re.search(rf"\b{name}\.", self.script))
        text = f"{head}\n{self.script}" if head else self.script
        kept = (line for line in text.split("\n") if not line.endswith(f"  # {other}"))
        return "\n".join(line.removesuffix(f"  # {mark}") for line in kept)


@dataclass(frozen=True, eq=False)
class Finding:
    """A mistake at a place.

    Attributes:
        code: of the mistake.
        line: from 1, in the text of the document.
        column: from 0, in characters.
        message: what was seen here, without the remedy.
        edits: of the fix, which belong together; none where no fix is sure.
        last_line: of the statement, whose comments may silence it.
    """

    code: str
    line: int
    column: int
    message: str
    edits: tuple[Edit, ...] = field(default=())
    last_line: int = 0


Check = Callable[["LintModule"], Iterator[Finding]]


class Rule(NamedTuple):
    """A rule of lint: the codes that it finds, the words that a text must have, and the function that yields findings.

    Attributes:
        codes: that it finds.
        mistakes: that it states.
        needs: without a word of each group, as of `WordsInText.has_all_needed`, a text has no finding of it.
        check: the function.
    """

    codes: tuple[str, ...]
    mistakes: tuple[Mistake, ...]
    needs: tuple[str, ...]
    check: Check


def register_rule(*found: Mistake | str, needs: tuple[str, ...]) -> Callable[[Check], Check]:
    """Register a function that yields findings of these mistakes; one that another rule states is given by its code."""

    def register(check: Check) -> Check:
        mistakes = tuple(each for each in found if isinstance(each, Mistake))
        codes = tuple(each.code if isinstance(each, Mistake) else each for each in found)
        RULES.append(Rule(codes, mistakes, needs, check))
        return check

    return register


class LintModule(Module):
    """A module with the traces of its functions.

    Attributes:
        index: of its calls.
        kinds: what objects are.
        versions: of the libraries that it is for.
    """

    def __init__(self, text: str, versions: Versions = LATEST, path: Path | None = None) -> None:
        super().__init__(text)
        self.versions = versions
        self._path = path
        self.index = Index(self)
        self.kinds = ObjectKinds(self, self.index)

    @functools.cached_property
    def index_of_project(self) -> Index:
        """The calls with those of the files that are imported, which are parsed when they are asked for."""
        return Index(self, Project(self._path, self), alone=True)

    def may_be_own_function(self, function: ast.expr) -> bool:
        """Return whether an expression, such as what is called, may be a function or class of this module."""
        choices = functions_of_callee(
            self.index.function_of_expression(function, self.scope_of.get(function, self.top))
        )
        # A class without `__init__` is called as `object` is.
        return any(isinstance(each, ProjectFunction) or each == ImportedObject("object") for each in choices)

    @functools.cached_property
    def traces(self) -> list[Trace]:
        """The events of each function and of the module, those that have nothing to do with training left out."""
        tracer = EventTracer(self.index, self.kinds)
        scopes = training_scopes(self)
        return [trace for scope in scopes if (trace := tracer.trace_scope(scope))]

    @functools.cached_property
    def amp_traces(self) -> list[Trace]:
        """The traces in which Apex or a GradScaler takes part."""
        return [trace for trace in self.traces if any(event.kind in AMP_KINDS for event in trace)]

    def events(self, *kinds: EventKind, with_amp: bool = False) -> Iterator[tuple[Trace, int, TrainingEvent]]:
        """Yield the events of some kinds, of all traces or of `amp_traces`, each with its trace and its place there."""
        for trace in self.amp_traces if with_amp else self.traces:
            for index, event in enumerate(trace):
                if event.kind in kinds:
                    yield trace, index, event

    @functools.cached_property
    def calls_making_scalers(self) -> list[ast.Call]:
        """All calls that build a GradScaler."""
        return [call for call in self.calls if self.kinds.is_new_object("scaler", call, self.scope_of[call])]

    @functools.cached_property
    def enters_autocast(self) -> bool:
        """Whether anything is called that is autocast, under any name; without it no event is inside of one."""
        return any(
            last_name(call.func) == "autocast" or (self.resolve(call.func) or "").endswith(".autocast")
            for call in self.calls
        )

    @functools.cached_property
    def opt_levels(self) -> set[str | None]:
        """The opt levels of all calls of `amp.initialize`; None stands for one that is not written there."""
        given = [argument(call, "opt_level") for call in self.calls_of_functions("apex.amp.initialize")]
        return {"O1" if level is None else text_of_literal(level) for level in given}

    @functools.cached_property
    def text_without_comments(self) -> str:
        """The text without comments and docstrings."""
        parts, end = [], 0
        for node in self.nodes:
            if isinstance(node, ast.Expr) and text_of_literal(node.value) is not None:
                parts.append(self.text[end : self.start_of(node)])
                end = self.end_of(node)
        return COMMENT_OR_TEXT.sub(lambda match: match[1] or "", "".join([*parts, self.text[end:]]))

    def code_mentions_pattern(self, pattern: str) -> bool:
        """Return whether the code matches a regular expression anywhere; comments and docstrings say nothing."""
        return re.search(pattern, self.text_without_comments) is not None

    def is_under_if(self, node: ast.AST) -> bool:
        """Return whether a node stands under an `if` of its function."""
        return any(isinstance(outer, ast.If) for outer in self.ancestors_up_to_function(node))

    def make_finding(self, code: str, node: ast.AST, message: str, edits: tuple[Edit, ...] = ()) -> Finding:
        """Return a finding at a node."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        statement = None if node is self.tree else self.statement_around(node)
        last = line
        if statement is not None and not hasattr(statement, "body"):
            last = statement.end_lineno or line
        elif isinstance(node, ast.expr):
            last = node.end_lineno or line
        return Finding(code, line, self.column_in_characters(line, column), message, edits, last)

    # What fixes are made of.

    def insertion_edits(self, place: int, text: str) -> tuple[Edit, ...]:
        """Return the edit that puts text in at a place."""
        return (Edit(place, place, text),)

    def replacement_edits(self, node: ast.AST, text: str) -> tuple[Edit, ...]:
        """Return the edit that replaces a node by other text."""
        return (Edit(*self.span(node), text),)


def text_of_literal(node: ast.expr | None) -> str | None:
    """Return the text of a string literal."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def events_between(
    trace: Trace, first: TrainingEvent, last: TrainingEvent, *kinds: EventKind
) -> list[TrainingEvent]:
    """Return the events of some kinds between two others that one run can meet along with both."""
    inside = trace[trace.index(first) + 1 : trace.index(last)]
    return [
        event
        for event in inside
        if event.kind in kinds and event.may_share_run_with(first) and event.may_share_run_with(last)
    ]


def events_before(trace: Trace, event: TrainingEvent, *kinds: EventKind) -> list[TrainingEvent]:
    """Return the events of some kinds before another one that one run can meet with it."""
    return [
        other
        for other in trace[: trace.index(event)]
        if other.kind in kinds and other.may_share_run_with(event)
    ]


def events_after(trace: Trace, event: TrainingEvent, *kinds: EventKind) -> list[TrainingEvent]:
    """Return the events of some kinds behind another one that one run can meet with it."""
    return [
        other
        for other in trace[trace.index(event) + 1 :]
        if other.kind in kinds and other.may_share_run_with(event)
    ]


def last_event_before(trace: Trace, event: TrainingEvent, *kinds: EventKind) -> TrainingEvent | None:
    """Return the last event of some kinds before another one, of those that one run can meet with it."""
    return next(reversed(events_before(trace, event, *kinds)), None)


def first_event_after(trace: Trace, event: TrainingEvent, *kinds: EventKind) -> TrainingEvent | None:
    """Return the first event of some kinds behind another one, of those that one run can meet with it."""
    return next(iter(events_after(trace, event, *kinds)), None)


def is_disabled_by_literal(call: ast.Call) -> bool:
    """Return whether a scaler or autocast is switched off by a literal."""
    return is_literal(argument(call, "enabled"), False)


def dotted_text_of(node: ast.AST) -> str:
    """Return the dotted text of a node, or an empty text."""
    return dotted_name(node) or ""


def training_scopes(module: LintModule) -> list[Scope]:
    """Return the functions, and the module, that make a call of training, or call a function that may do so."""
    scopes = [scope for scope in module.scopes if not isinstance(scope.node, (ast.ClassDef, ast.Lambda))]
    if re.search(r"\bBCELoss\b", module.text):  # an object that is called by any name
        return scopes
    reached = {module.scope_of[call] for call in module.calls if _is_training_call(call, module)}
    steppers = _stepping_scopes_by_closure(module)
    waiting = list(reached)
    while waiting:
        scope = waiting.pop()
        if isinstance(scope.node, FunctionNode):
            calls, _ = module.index.possible_calls_and_completeness(scope)
            callers = {module.scope_of[call] for call in calls} | steppers.get(scope, set())
            waiting += callers - reached
            reached |= callers
    return [scope for scope in scopes if scope in reached]


def _stepping_scopes_by_closure(module: LintModule) -> dict[Scope, set[Scope]]:
    """Return the functions that are passed to a `step`, which calls them, each with the scopes of these calls."""
    found: dict[Scope, set[Scope]] = {}
    for call, _ in module.method_calls("step"):
        scope = module.scope_of[call]
        for value in call.args:
            for choice in functions_of_callee(module.index.function_of_expression(value, scope)):
                if isinstance(choice, ProjectFunction):
                    found.setdefault(choice.scope, set()).add(scope)
    return found


def _is_training_call(call: ast.Call, module: LintModule) -> bool:
    function = call.func
    if isinstance(function, ast.Attribute):
        return (
            OF_TRAINING.search(function.attr) is not None or "scaler" in (dotted_name(function) or "").lower()
        )
    full = module.resolve(function) or last_name(function)
    return OF_TRAINING.search(full.rpartition(".")[2]) is not None
