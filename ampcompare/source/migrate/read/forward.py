"""Find the forward pass of each scaled loss by data flow, so that it can be put under autocast."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from ampcompare.source.branches import never_run_together
from ampcompare.source.index import Answer, Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.order import BACKWARD, BLOCK
from ampcompare.source.migrate.read.sites import BackwardPass, Sites, keys_of_initialized_models
from ampcompare.source.module import Block
from ampcompare.source.syntax import (
    DefinitionNode,
    FunctionNode,
    ImportNode,
    arguments,
    calls_in,
    dotted_name,
    last_name,
    last_part,
    names_bound_in,
    walk,
)
from ampcompare.source.torch_methods import ADDING, WRITING, receiver_of

BARRIERS = ("backward", "step", "zero_grad")
# Calls that compute nothing of which the type would matter.
TRIVIAL = {
    "Variable", "append", "contiguous", "cuda", "detach", "dict", "enumerate", "eval", "float", "format",
    "get", "half", "int", "item", "items", "iter", "keys", "len", "list", "long", "max", "mean", "min",
    "next", "numpy", "perf_counter", "print", "range", "record", "reshape", "size", "start", "sum", "time",
    "to", "tolist", "train", "tuple", "type", "update", "values", "view", "zip",
}  # fmt: skip
MAX_DEPTH = 4


@dataclass
class ForwardPasses:
    """The statements that compute the losses and go under autocast, and the backward passes for which there are none.

    Attributes:
        regions: first and last statement of each run to put under autocast.
        inline: backward passes whose loss expression holds the forward pass.
        missing: backward passes whose forward pass is not in this module.
        apart: calls that get a model and run a backward pass of their own, which is not scaled.
    """

    regions: list[tuple[ast.stmt, ast.stmt]] = field(default_factory=list)
    inline: list[BackwardPass] = field(default_factory=list)
    missing: list[BackwardPass] = field(default_factory=list)
    apart: list[ast.Call] = field(default_factory=list)


def find_forward_passes(index: Index, names: ModuleImports, sites: Sites) -> ForwardPasses:
    """Return where the forward passes of the backward passes are."""
    return _ForwardFinder(index, names, sites).find_forward_passes()


class _ForwardFinder:
    """Marks the statements that a loss comes from, block by block."""

    def __init__(self, index: Index, names: ModuleImports, sites: Sites) -> None:
        self._index = index
        module = self._module = index.module
        self._names = names
        self._sites = sites
        self._models = keys_of_initialized_models(module, sites)
        self._tails = {key.rpartition(".")[2] for key in self._models}
        self._barriers = self._barrier_nodes()
        self._initializing = {each.statement for each in sites.initializes} | {
            outer for each in sites.initializes for outer in module.ancestors(each.statement)
        }
        self._marks: dict[int, tuple[Block, set[ast.stmt]]] = {}
        self._done: set[tuple[int, frozenset[str]]] = set()

    def find_forward_passes(self) -> ForwardPasses:
        found = ForwardPasses()
        for backward in self._sites.backwards:
            if self._may_call_model(backward.loss):
                found.inline.append(backward)
            elif not self._trace_loss(backward) and backward.block:
                found.missing.append(backward)
        for block, marked in self._marks.values():
            runs = list(self._runs_between_barriers(block, marked))
            calls = [
                any(self._calls_model(each) for each in block if _spans_statement(run, each)) for run in runs
            ]
            found.regions += runs[calls.index(True) :] if True in calls else runs  # not what makes the inputs
        found.apart = [
            call
            for call in self._calls_with_backward()
            if self._calls_model(call) and not self._reaches_rewritten_backward(call)
        ]
        return found

    def _reaches_rewritten_backward(self, call: ast.Call) -> bool:
        """Return whether one of the functions that a call names has or reaches a backward pass that is rewritten."""
        functions = {each.function for each in self._sites.backwards}
        named = functions_of_callee(self._index.callee(call, self._module.scope_of[call]))
        return any(
            each.scope.node in functions or self._index.reaches_event(each, BLOCK) is Answer.YES
            for each in named
            if isinstance(each, ProjectFunction)
        )

    def _barrier_nodes(self) -> set[ast.AST]:
        """Return the nodes that hold a backward pass, a step or the like: no forward pass reaches across one."""
        found: set[ast.AST] = {call for call, _ in self._module.method_calls(*BARRIERS)}
        found |= {each.statement for each in self._sites.backwards}
        found |= set(self._calls_with_backward())
        return found | {outer for node in found for outer in self._module.ancestors(node)}

    def _calls_with_backward(self) -> Iterator[ast.Call]:
        """Yield the calls of functions that surely run a backward pass themselves, such as attacks on inputs."""
        for call in self._module.calls:
            choices = functions_of_callee(self._index.callee(call, self._module.scope_of[call]))
            functions = [each for each in choices if isinstance(each, ProjectFunction)]
            if any(self._index.reaches_event(each, BACKWARD) is Answer.YES for each in functions):
                yield call

    def _trace_loss(self, backward: BackwardPass) -> bool:
        """Trace a loss; one that is a parameter of the function was computed by its callers, at least in part."""
        needed = _dotted_names_read_but_not_called_in(backward.loss)
        found = self._trace_needed_names(backward.statement, needed, 0)
        if found and not self._tails and backward.function is not None:
            given = {each.arg for each in backward.function.args.args} & needed
            if given:
                self._trace_into_callers(backward.function, given, 0)
        return found

    def _trace_needed_names(self, statement: ast.stmt, needed_names: set[str], depth: int) -> bool:
        """Mark the statements before one that the needed names come from; return whether one computes.

        The search ends where a model is called. Where none is, what is marked beyond the first statement that
        computes, such as the call of a criterion, is forgotten.
        """
        visit = (id(statement), frozenset(needed_names))
        if depth > MAX_DEPTH or visit in self._done:
            return depth <= MAX_DEPTH
        self._done.add(visit)
        needed_names = set(needed_names)
        current = statement
        before: dict[int, tuple[Block, set[ast.stmt]]] | None = None
        while True:
            marked = self._mark_defining_statements(*self._module.block_and_place(current), needed_names)
            if any(self._calls_model(each) for each in marked):
                return True
            if before is None and any(self._may_call_model(each) for each in marked):
                if not self._tails:
                    return True
                before = {key: (block, set(each)) for key, (block, each) in self._marks.items()}
            outer = self._module.parent_statement(current)
            if isinstance(outer, FunctionNode):
                if before is None:
                    return self._trace_into_callers(outer, needed_names, depth)
                if self._finds_model_in_callers(outer, needed_names, depth):
                    return True
                break
            if outer is None or isinstance(outer, ast.ClassDef):
                break
            # one of several losses
            if isinstance(outer, ast.For) and names_bound_in(outer.target) & visit[1]:
                needed_names |= _dotted_names_read_but_not_called_in(outer.iter)
            current = outer
        if before is not None:
            self._marks = before
        return before is not None

    def _mark_defining_statements(self, block: Block, place: int, needed_names: set[str]) -> set[ast.stmt]:
        """Mark the statements of a block above a place that define needed names, and need what they read.

        Of one with a barrier inside, those that its blocks hold.
        """
        marked: set[ast.stmt] = set()
        below: set[ast.stmt] = set()
        for each in reversed(block[:place]):
            if each in self._initializing:
                break
            if not _defines_needed_name(each, needed_names):
                continue
            if each in self._barriers:
                for inner in self._module.child_blocks(each):
                    below |= self._mark_defining_statements(inner, len(inner), needed_names)
                continue
            marked.add(each)
            needed_names |= _dotted_names_read_but_not_called_in(each)
        if marked:
            self._marks.setdefault(id(block), (block, set()))[1].update(marked)
        return marked | below

    def _trace_into_callers(self, function: FunctionNode, needed_names: set[str], depth: int) -> bool:
        """Follow parameters to the callers."""
        module = self._module
        found = False
        given = module.positional_parameters_without_self(function)
        for node in self._index.possible_calls_and_completeness(module.scope_from[function])[0]:
            if node not in module.scope_of or module.function_around(node) is function:
                continue
            values = [value for name, value in arguments(node, given).items() if name in needed_names]
            if values and not any(self._may_call_model(value) for value in values):
                keys = set().union(*(_dotted_names_read_but_not_called_in(value) for value in values))
                found = self._trace_needed_names(module.statement_around(node), keys, depth + 1) or found
        return found

    def _finds_model_in_callers(self, function: FunctionNode, needed_names: set[str], depth: int) -> bool:
        """Follow parameters to the callers, and return whether a model is called there; what is marked stays if so."""
        kept = {key: set(each) for key, (_, each) in self._marks.items()}
        self._trace_into_callers(function, needed_names & self._module.scope_from[function].parameters, depth)
        new = (each for key, (_, marked) in self._marks.items() for each in marked - kept.get(key, set()))
        return any(self._calls_model(each) for each in new)

    def _may_call_model(self, node: ast.AST) -> bool:
        """Return whether a statement or expression calls a model, or else something that may call one."""
        return any(self._may_call_compute(each) for each in calls_in(node))

    def _calls_model(self, node: ast.AST) -> bool:
        for call in calls_in(node):
            given = {last_part(dotted_name(each) or "") for each in call.args}
            if self._tails & {*(dotted_name(call.func) or "").split("."), *given}:
                return True
        return False

    def _may_call_compute(self, call: ast.Call) -> bool:
        name = last_name(call.func)
        return name not in TRIVIAL and not (
            name[:1].isupper() and isinstance(call.func, ast.Name) and not call.args
        )

    def _uses_marked_model_outputs(self, statement: ast.stmt) -> bool:
        """Return whether a statement reads what a marked one above it in its function got from a model."""
        function = self._module.function_around(statement)
        above = [
            each
            for _, marked in self._marks.values()
            for each in marked
            if each.lineno < statement.lineno
            and self._module.function_around(each) is function
            and not never_run_together(self._module, each, statement)
        ]
        outputs: set[str] = set()
        for each in sorted(above, key=lambda one: one.lineno):
            if (
                self._calls_model(each)
                or _owners_of_dotted_names(_dotted_names_read_but_not_called_in(each)) & outputs
            ):
                outputs |= _owners_of_dotted_names(names_bound_in(each))
        return bool(_owners_of_dotted_names(_dotted_names_read_but_not_called_in(statement)) & outputs)

    def _runs_between_barriers(
        self, block: Block, marked_statements: set[ast.stmt]
    ) -> Iterator[tuple[ast.stmt, ast.stmt]]:
        run: list[ast.stmt] = []
        for each in [*block, None]:
            if (
                each is None
                or each in self._barriers
                or each in self._initializing
                or isinstance(each, DefinitionNode)
            ):
                yield from self._forward_spans_in_run(run, marked_statements)
                run = []
            else:
                run.append(each)

    def _forward_spans_in_run(
        self, run: list[ast.stmt], marked_statements: set[ast.stmt]
    ) -> Iterator[tuple[ast.stmt, ast.stmt]]:
        chosen = [index for index, each in enumerate(run) if each in marked_statements]
        computing = [index for index in chosen if self._may_call_model(run[index])]
        starts = [
            index
            for index in computing
            if self._calls_model(run[index]) or self._uses_marked_model_outputs(run[index])
        ] or computing
        if starts:
            yield run[starts[0]], run[chosen[-1]]


def _spans_statement(run: tuple[ast.stmt, ast.stmt], statement: ast.stmt) -> bool:
    return run[0].lineno <= statement.lineno <= run[1].lineno


def _dotted_names_read_but_not_called_in(node: ast.AST) -> set[str]:
    """Return the keys that an expression or statement reads, except the functions that it calls."""
    called = {id(each.func) for each in calls_in(node)}
    loaded = [each for each in walk(node) if isinstance(getattr(each, "ctx", None), ast.Load)]
    keys = {dotted_name(each) for each in loaded if id(each) not in called}
    return {key for key in keys if key is not None and key != "self"}


def _owners_of_dotted_names(dotted_names: set[str]) -> set[str]:
    """Return the names of the objects that keys are, or are attributes of; an attribute of `self` is one."""
    return {".".join(key.split(".")[: 2 if key.startswith("self.") else 1]) for key in dotted_names}


def _defines_needed_name(statement: ast.stmt, needed_names: set[str]) -> bool:
    """Return whether a statement, or one in it, binds or changes a needed name."""
    if isinstance(statement, DefinitionNode | ImportNode):
        return False
    for node in walk(statement):
        changed: ast.AST | None = None
        if isinstance(getattr(node, "ctx", None), ast.Store):
            changed = node.value if isinstance(node, ast.Subscript) else node
        elif isinstance(node, ast.Expr):
            changed = receiver_of(node.value, ADDING | WRITING)
        if dotted_name(changed) in needed_names:
            return True
    return False
