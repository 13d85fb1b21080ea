"""What is computed outside of autocast from what was computed under it: O1 cast there too, so it gets autocast."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ampcompare.source.index import (
    Answer,
    ImportedObject,
    ProjectFunction,
    functions_of_callee,
    own_nodes_of_scope,
)
from ampcompare.source.migrate.core.context import last_name_before_index
from ampcompare.source.migrate.core.coverage import AutocastCoverage, scope_around, strongest_answer
from ampcompare.source.migrate.core.holders import (
    BindingsOfScope,
    Path,
    access_path_of,
    items_bound_below,
    returns_values_and_indices,
)
from ampcompare.source.migrate.core.model_casts import puts_autocast_in_forward
from ampcompare.source.migrate.read.finding import UnsureRewrite
from ampcompare.source.module import Module, Scope
from ampcompare.source.syntax import (
    argument_values,
    arguments,
    child_nodes,
    dotted_name,
    is_literal,
    last_name,
    last_part,
    walk,
)

if TYPE_CHECKING:
    from ampcompare.source.migrate.core.context import ApexCore

# What O1 casts to fp32 or fp16, in torch, torch.nn.functional and as methods; a test compares them with the engine's.
CASTS = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc", "linear",
    "prelu", "addmm", "addmv", "addr", "matmul", "mm", "mv", "addbmm", "baddbmm", "bmm",
    "interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax", "gelu", "layer_norm", "group_norm",
    "local_response_norm", "normalize", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss", "nll_loss",
    "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss", "triplet_margin_loss", "ctc_loss",
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "reciprocal", "rsqrt", "sinh", "tan",
    "pow", "cumprod", "cumsum", "dist", "norm", "prod", "std", "sum", "var", "renorm",
    "addcdiv", "addcmul", "atan2", "cross", "bilinear", "dot",
})  # fmt: skip
# Methods and functions whose result is no 16-bit tensor: numbers, integers, truth values, fp32.
ENDS = frozenset({
    "item", "tolist", "numpy", "cpu", "argmax", "argmin", "argsort", "size", "dim", "numel", "float", "double", "long",
    "int", "bool", "eq", "ne", "ge", "gt", "le", "lt", "nonzero", "isnan", "isinf", "state_dict", "backward", "len",
    "str", "repr", "format", "print", "isinstance", "id", "range", "get_device", "all", "any",
})  # fmt: skip
NO_TENSORS = frozenset({"shape", "device", "ndim", "grad_fn", "requires_grad", "is_cuda"})
# Methods of containers, and of what shows a value, as they are named.
KEPT = frozenset({
    "append", "extend", "insert", "add", "setdefault", "put", "index", "count",
    "info", "debug", "warning", "error", "write", "log", "log_metrics", "add_scalar", "add_scalars", "add_image",
    "add_images", "add_histogram", "set_postfix", "set_description", "save", "dump", "display",
})  # fmt: skip
# Methods of tensors that get others, and compute in the types that these have, under O1 and without it.
PLAIN = frozenset({
    "expand_as", "view_as", "reshape_as", "type_as", "type", "to", "copy_", "add_", "sub_", "mul_", "div_", "sub",
    "mul", "div", "where", "gather", "scatter", "scatter_", "scatter_add_", "index_select", "masked_fill",
    "masked_fill_", "masked_select", "masked_scatter_", "clamp", "max", "min", "maximum", "minimum", "topk", "lerp",
})  # fmt: skip
# What gives numbers or arrays, whatever it gets.
NUMBERS = frozenset({"numpy", "math"})
DISPLAYS = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
POWERS = (ast.Pow, ast.MatMult)
MAX_DEPTH = 4
IN_CONDITION = (
    "this computes on what came from autocast, and has no statement of its own to put under it: O1 cast here too; the "
    "adapter casts it"
)
RETURNED = (
    "what this returns may come from autocast, in fp16; {0} gets it, and computes on it outside of autocast, where O1 "
    "cast too: write .float() on it, or take the adapter"
)
NO_SCALER = (
    "what came from autocast goes on into `{0}`, outside of it, where O1 cast too; the adapter casts it"
)
NOT_KNOWN = (
    "what gets a tensor here that may come from autocast, in fp16, is not in sight; if it computes with torch, O1 cast "
    "there too, so put it under autocast by hand: {0}"
)


def add_autocast_to_uses_of_outputs(core: ApexCore) -> None:
    """Add regions of autocast for the statements that compute on what came from it, where O1 cast to another type.

    Raises:
        UnsureRewrite: one of them cannot be put under autocast.
    """
    follower = AutocastOutputs(core)
    found, unknown = follower.statements_on_outputs()
    updates = {each.statement for each in core.sites.backwards} | {
        each.statement for each in core.sites.steps
    }
    for each in found:
        if each in updates:
            raise UnsureRewrite(each, IN_CONDITION)
        if not core.reaches_scaler(each) or any(
            isinstance(node, (ast.Yield, ast.YieldFrom)) for node in walk(each)
        ):
            raise UnsureRewrite(each, NO_SCALER.format(ast.unparse(each).splitlines()[0]))
        _add_to_autocast_regions(core, each)
    if unknown:
        first = next(iter(unknown.values()))
        core.add_note(
            first, NOT_KNOWN.format(", ".join(f"{name}() (line {at.lineno})" for name, at in unknown.items()))
        )
    for function, file in follower.functions_returning_elsewhere():
        core.add_note(function, RETURNED.format(file))


def _add_to_autocast_regions(core: ApexCore, statement: ast.stmt) -> None:
    """Add a statement to the region that ends right above it, or as one of its own."""
    block, place = core.module.block_and_place(statement)
    for number, (first, last) in enumerate(core.forward.regions):
        if place and block[place - 1] is last and core.module.block_of(first) is block:
            core.forward.regions[number] = (first, statement)
            return
    core.forward.regions.append((statement, statement))


class _NamesOfOutputs:
    """The names of one function, or of a module, that hold what came from autocast."""

    def __init__(
        self, follower: AutocastOutputs, module: Module, scope: Scope, seeds: frozenset[Path], depth: int
    ) -> None:
        self._follower = follower
        self.module = module
        self.scope = scope
        self._depth = depth
        self.nodes = list(own_nodes_of_scope(scope))
        self._holders = BindingsOfScope(module, self.nodes, seeds)
        self._returned = [
            each.value
            for each in self.nodes
            if isinstance(each, (ast.Return, ast.Yield)) and each.value is not None
        ]
        self.returns = False

    def follow_assignments_once(self) -> bool:
        """Follow the assignments once; return whether more names hold something."""
        changed = False
        for each in self._holders.bindings:
            if not each.holds and any(map(self.holds_output, each.values)):
                changed = each.holds = True
                if each.path[0] == "self":
                    self._follower.shared.add(each.path)
        if not self.returns and any(map(self.holds_output, self._returned)):
            changed = self.returns = True
        return changed

    def holds_output(self, node: ast.AST) -> bool:
        """Return whether the value of an expression may be, or hold, a tensor that came from autocast."""
        if isinstance(node, (ast.Constant, ast.Compare, ast.Lambda, ast.JoinedStr)):
            return False
        if isinstance(node, ast.Attribute) and node.attr in NO_TENSORS | {"indices"}:
            return False
        if (
            isinstance(node, ast.Subscript)
            and is_literal(node.slice, 1)
            and returns_values_and_indices(node.value)
        ):
            return False
        if access_path_of(node):
            return bool(self.held_item_paths(node))
        if isinstance(node, ast.Call):
            return self._call_gives_output(node)
        return any(map(self.holds_output, child_nodes(node)))

    def held_item_paths(self, node: ast.AST) -> set[Path]:
        """Return which items of a name, an attribute or an item hold something; `()` stands for the whole of it."""
        path = access_path_of(node)
        shared = {items_bound_below(path, each) for each in self._follower.shared} - {None}
        return self._holders.items_held_at(path, node) | {each for each in shared if each is not None}

    def _call_gives_output(self, call: ast.Call) -> bool:
        own = self._follower.core.index.project_functions_of(call, self.module.scope_of[call])
        by_name = not own and last_name(call.func) in ENDS
        if by_name or (self.module.resolve(call.func) or "").partition(".")[0] in NUMBERS:
            return False
        if self._follower.call_makes_output(self.module, call):
            return True
        functions = [each for each in self.functions_named_by(call) if isinstance(each, ProjectFunction)]
        if any(self._follower.returns_output(each) for each in functions):
            return True
        given = [*argument_values(call), *([call.func.value] if isinstance(call.func, ast.Attribute) else [])]
        return any(map(self.holds_output, given))

    def functions_named_by(self, call: ast.Call) -> tuple[ProjectFunction | ImportedObject, ...]:
        """Return what a call may name."""
        return functions_of_callee(self._follower.core.index.callee(call, self.module.scope_of[call]))

    def computes_on_outputs(self, node: ast.AST) -> Answer:
        """Return whether a node computes on what came from autocast, in a type that O1's lists decide."""
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, POWERS):
            return Answer.YES if any(map(self.holds_output, child_nodes(node))) else Answer.NO
        if not isinstance(node, ast.Call):
            return Answer.NO
        name, full = last_name(node.func), self.module.resolve(node.func) or ""
        held = [each for each in argument_values(node) if self.holds_output(each)]
        is_method = isinstance(node.func, ast.Attribute) and not full and self.holds_output(node.func.value)
        if is_method and name in CASTS:
            return Answer.YES
        if not (held or is_method):
            return Answer.NO
        own = self._follower.core.index.project_functions_of(node, self.module.scope_of[node])
        if not own and name in ENDS | KEPT | PLAIN:
            return Answer.NO
        if not own and isinstance(node.func, ast.Name) and not full and hasattr(builtins, name):
            return Answer.YES if name == "pow" else Answer.NO
        return self._call_casts_outputs(node, full, held)

    def _call_casts_outputs(self, call: ast.Call, full_name: str, held_arguments: list[ast.expr]) -> Answer:
        """Return whether one of the functions that a call may name computes on arguments that came from autocast."""
        answers = []
        for each in self.functions_named_by(call) or (ImportedObject(full_name),):
            if isinstance(each, ProjectFunction):
                answers.append(self._project_function_casts(call, each))
            else:
                answers.append(self._outside_function_casts(each.name, held_arguments))
        answer = strongest_answer(answers)
        is_of_model = answer is Answer.UNKNOWN and self._follower.is_model_call(self.module, call)
        return Answer.YES if is_of_model else answer

    def _outside_function_casts(self, full_name: str, held_arguments: list[ast.expr]) -> Answer:
        """Return whether what is no function of the project computes, by its full name, if it has one."""
        package, _, rest = full_name.partition(".")
        if package in ("torch", "apex"):
            is_module = rest.startswith("nn.") and full_name.endswith(".__call__")
            return (
                Answer.YES if held_arguments and (is_module or last_part(full_name) in CASTS) else Answer.NO
            )
        if package in NUMBERS | sys.stdlib_module_names:
            return Answer.NO
        is_direct = any(
            not isinstance(each, DISPLAYS) and not self._follower.is_loss(each) for each in held_arguments
        )
        return Answer.UNKNOWN if is_direct else Answer.NO

    def _project_function_casts(self, call: ast.Call, function: ProjectFunction) -> Answer:
        node = function.scope.node
        if self._depth >= MAX_DEPTH or isinstance(node, (ast.Module, ast.ClassDef)):
            return Answer.UNKNOWN
        return self._follower.function_computes_on_parameters(
            function, self.held_parameters_of(call, function), self._depth + 1
        )

    def held_parameters_of(self, call: ast.Call, function: ProjectFunction) -> frozenset[Path]:
        """Return which parameters of a function hold something in a call of it."""
        node, found = function.scope.node, set[Path]()
        if isinstance(node, (ast.Module, ast.ClassDef)):
            return frozenset()
        named = (
            [each.arg for each in node.args.args]
            if isinstance(node, ast.Lambda)
            else function.module.positional_parameters_without_self(node)
        )
        for key, value in arguments(call, named).items():
            if access_path_of(value):
                found |= {(key, *parts) for parts in self.held_item_paths(value)}
            elif self.holds_output(value):
                found.add((key,))
        return frozenset(found)


class AutocastOutputs:
    """Follows what comes from autocast through the assignments, returns and attributes of a module."""

    def __init__(self, core: ApexCore) -> None:
        self.core = core
        self.shared: set[Path] = set()
        self._losses = {dotted_name(each.loss) for each in core.sites.backwards} - {None}
        self._answers: dict[tuple[Scope, frozenset[Path]], Answer] = {}
        self.coverage = AutocastCoverage(core)
        functions = [scope for scope in core.module.scopes if scope.function is scope.node and scope.function]
        self._names = {
            scope: _NamesOfOutputs(self, core.module, scope, frozenset(), 0)
            for scope in [*functions, core.module.top]
        }
        for _ in range(8):
            changed = [each.follow_assignments_once() for each in self._names.values()]
            if not any(changed):
                break

    def may_hold_output(self, node: ast.expr) -> bool:
        """Return whether the value of an expression of the file may be, or hold, a tensor that came from autocast."""
        return self._names[scope_around(self.core.module, node)].holds_output(node)

    def method_calls_elsewhere(self, method: str) -> Iterator[tuple[Module, ast.Call]]:
        """Yield the calls of a method of what came from autocast, in functions of other files that get it."""
        waiting = [(each, 0) for each in self._names.values()]
        seen: set[tuple[Scope, frozenset[Path]]] = set()
        for names, depth in waiting:  # which grows meanwhile
            for call in (each for each in names.nodes if isinstance(each, ast.Call)):
                if (
                    isinstance(call.func, ast.Attribute)
                    and call.func.attr == method
                    and names.holds_output(call.func.value)
                ):
                    if names.module is not self.core.module:
                        yield names.module, call
                for each in names.functions_named_by(call) if depth < MAX_DEPTH else ():
                    if isinstance(each, ProjectFunction) and (given := names.held_parameters_of(call, each)):
                        if (each.scope, given) not in seen:
                            seen.add((each.scope, given))
                            inner = _NamesOfOutputs(self, each.module, each.scope, given, depth + 1)
                            while inner.follow_assignments_once():
                                pass
                            waiting.append((inner, depth + 1))

    def statements_on_outputs(self) -> tuple[list[ast.stmt], dict[str, ast.Call]]:
        """Return the statements outside of autocast that compute on what came from it, in the order of the text.

        Returns:
            Them, and the calls of which it is not known whether they compute, by the name of what is called.
        """
        module = self.core.module
        found = dict[ast.stmt, None]()
        unknown = list[ast.Call]()
        for names in self._names.values():
            for node in () if self.coverage.is_always_covered(names.scope) else names.nodes:
                statement, answer = module.statement_around(node), names.computes_on_outputs(node)
                if answer is Answer.NO or statement in found or self._is_cast_as_in_o1(node):
                    continue
                if answer is Answer.UNKNOWN and isinstance(node, ast.Call):
                    unknown.append(node)
                elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)):
                    found[statement] = None
                else:
                    raise UnsureRewrite(node, IN_CONDITION)
        named: dict[str, ast.Call] = {}
        for call in sorted(unknown, key=lambda each: each.lineno):
            if module.statement_around(call) not in found:
                named.setdefault(ast.unparse(call.func), call)
        return sorted(found, key=lambda each: each.lineno), named

    def _is_cast_as_in_o1(self, node: ast.AST) -> bool:
        """Return whether a node has autocast where O1 cast, or where nothing did."""
        core = self.core
        return (
            core.has_autocast(node)
            or core.is_in_disable_casts_block(node)
            or core.runs_only_before_initialize(core.module.statement_around(node))
        )

    def functions_returning_elsewhere(self) -> Iterator[tuple[ast.AST, str]]:
        """Yield the functions whose results from autocast go to another file, with the name of that file."""
        module, index = self.core.module, self.core.index
        for scope, names in self._names.items():
            calls = index.possible_calls_and_completeness(scope)[0] if names.returns else []
            for call in calls:
                if call not in module.scope_of:
                    yield scope.node, index.relative_path_of(index.scope_around_call(call).module)
                    break

    def call_makes_output(self, module: Module, call: ast.Call) -> bool:
        """Return whether a call under autocast computes by itself: one of a model, or of what nobody defines here."""
        if module is not self.core.module:
            return False
        if puts_autocast_in_forward(self.core):
            return (
                last_name_before_index(call.func) in self.core.model_names
            )  # whose forward pass alone has autocast
        if self.coverage.coverage_of_node(module, call) is not Answer.YES:
            return False
        if self.is_model_call(module, call):
            return True
        if not argument_values(call) or module.resolve(call.func) or last_name(call.func)[:1].isupper():
            return False
        if isinstance(call.func, ast.Attribute) and dotted_name(call.func.value) != "self":
            return False  # a method of an object that is none of the models
        choices = functions_of_callee(self.core.index.callee(call, module.scope_of[call]))
        return all(
            each.name.endswith("__call__") if isinstance(each, ImportedObject) else each.module is not module
            for each in choices
        )

    def is_model_call(self, module: Module, call: ast.Call) -> bool:
        """Return whether a call is one of a model that Apex got, or of a method of one."""
        owner = dotted_name(call.func.value) or "" if isinstance(call.func, ast.Attribute) else ""
        names = {last_name(call.func), *owner.split(".")}
        return module is self.core.module and not names.isdisjoint(self.core.model_names)

    def returns_output(self, function: ProjectFunction) -> bool:
        """Return whether a function of the module returns what came from autocast."""
        names = self._names.get(function.scope)
        return names is not None and names.returns

    def is_loss(self, node: ast.expr) -> bool:
        """Return whether an expression is a loss, which is one number, as it is or detached."""
        while (key := dotted_name(node)) is None or key not in self._losses:
            node = node.func if isinstance(node, ast.Call) else node
            if not isinstance(node, ast.Attribute) or node.attr not in ("data", "detach", "clone", "mean"):
                return False
            node = node.value
        return True

    def function_computes_on_parameters(
        self, function: ProjectFunction, held_parameters: frozenset[Path], depth: int
    ) -> Answer:
        """Return whether a function computes on some of its parameters in a type that O1's lists decide."""
        key = (function.scope, held_parameters)
        if key not in self._answers:
            self._answers[key] = Answer.NO  # for one that calls itself
            names = _NamesOfOutputs(self, function.module, function.scope, held_parameters, depth)
            while names.follow_assignments_once():
                pass
            self._answers[key] = strongest_answer(map(names.computes_on_outputs, names.nodes))
        return self._answers[key]
