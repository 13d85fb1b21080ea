"""Rewrite the uses of Apex around its core: wrappers, layers, optimizers, decorators, contexts."""

import ast
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType

from ampcompare.source.amp_names import APEX, is_unknown_to_every_apex
from ampcompare.source.edits import Edits
from ampcompare.source.migrate.read.apex_guards import (
    PASSED_ON,
    SWITCHED,
    answer_availability_question_yes,
    apex_names_rebound_by_choice,
    is_only_tested_for_presence,
)
from ampcompare.source.migrate.read.finding import NOTE, Finding, UnsureRewrite
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.replacement_table import (
    DECORATORS,
    FUSED_SINCE,
    GONE,
    IMPORTED,
    LAYER_OPTIONS,
    OPTIMIZERS,
    STAYS,
    STAYS_WITH_TWIN,
    OptimizerReplacement,
)
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    HIDDEN,
    FunctionNode,
    argument,
    arguments,
    dotted_name,
    is_literal,
    last_name,
    walk,
)
from ampcompare.source.versions import NEWEST

# Functions that run in fp16 under autocast too.
HALF = (
    "einsum",
    "matmul",
    "bmm",
    "baddbmm",
    "addbmm",
    "mm",
    "mv",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "prelu",
)

REGISTERED = {"register_half_function": "float16", "register_float_function": "float32"}
TRAINING = {"backward", "scale_loss", "step", "wrap_optimizer"}
CAST = "cast_inputs"
CAST_FUNCTION = '''\
def cast_inputs(dtype, autocast=True):
    """Let a function cast the tensors that it gets under autocast, as half_function and float_function of Apex did."""

    def cast(value):
        if isinstance(value, {torch}.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return type(value)(map(cast, value)) if type(value) in (list, tuple) else value

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **options):
            if not {torch}.is_autocast_enabled("cuda"):
                return function(*args, **options)
            with {torch}.autocast("cuda", enabled=autocast):
                return function(*map(cast, args), **{{name: cast(value) for name, value in options.items()}})

        return call

    return decorate
'''
NO_CORRECTION = (
    "FusedAdam without bias correction has no equivalent in torch; it stays, and current Apex still has it"
)
OLD_API = (
    "{0} is of the API before amp.initialize, with an fp16 model; it has no equivalent in torch.amp: keep the model in "
    "fp32, use autocast and GradScaler"
)
NEVER_THERE = "no version of Apex has {0}: its import fails with Apex too, and stays"
MODULES = frozenset({"apex", "apex.optimizers", "apex.parallel", "apex.normalization", "apex.amp"})
DDP = "torch.nn.parallel.DistributedDataParallel"
DDP_ARGUMENTS = (
    "module", "message_size", "delay_allreduce", "shared_param", "allreduce_trigger_params", "retain_allreduce_buffers",
    "allreduce_always_fp32", "num_allreduce_streams", "allreduce_communicators", "gradient_average",
    "gradient_predivide_factor", "gradient_average_split_factor", "prof",
)  # fmt: skip
# Apex sends no buffers, so that a forward pass on one rank waits for no other
APART = "broadcast_buffers=False"
BUFFERS = (
    "torch's DistributedDataParallel sends the buffers of rank 0 before each forward pass, so that one on rank 0 alone "
    f"waits for the others; Apex's does not: pass {APART} where this is called"
)
UNUSED = (
    "Apex's DistributedDataParallel takes parameters that never get a gradient; torch's raises an error in the second "
    "step: pass {0} if there are any that do not have requires_grad=False"
)
ACCUMULATION = (
    "torch's DistributedDataParallel has no {}; to accumulate, use `model.no_sync()`, or take the adapter"
)
ACCUMULATING = ("disable_allreduce", "enable_allreduce")
LATER_STAR = (
    "{0} is of `import *` of Apex, and a later `import *` may bind it to something else; import it by name"
)
# Classes of torch that take the place of classes of Apex which are no subclass of them.
OTHER_CLASSES = ("LayerNorm", "DistributedDataParallel")
ASKED_FOR = "{0} asks for torch's {1} by `isinstance`, and Apex's {1} is none; torch's in its place is one"
LAYER_NORM = "torch.nn.LayerNorm"
FP32_RESULT = "under autocast torch's LayerNorm returns fp32, where Apex's returned the type of autocast"
REDUCTIONS = "apex.parallel.ReduceOp"  # torch's own enumeration, whose members are used
UNUSED_OPTION = "find_unused_parameters=True"
SHARDS = (
    "each rank holds all weights in fp32 now, which takes more memory than O2; if that is too much, "
    "torch.distributed.fsdp.fully_shard (FSDP2) splits weights, gradients and optimizer state over the ranks"
)


class ApexUseRewriter:
    """Rewrites single uses of Apex outside of its core: optimizers, layers, DistributedDataParallel, decorators.

    Args:
        torch: the name by which the module knows torch.
        asked: classes of torch for which the project asks by `isinstance`, with the place of a question.
        fused_for: version of torch whose fused optimizers are taken; None for the plain ones.
    """

    def __init__(
        self,
        module: Module,
        names: ModuleImports,
        edits: Edits,
        torch: str,
        asked: Mapping[str, str] = MappingProxyType({}),
        fused_for: tuple[int, int] | None = NEWEST,
    ) -> None:
        self._module = module
        self._names = names
        self._edits = edits
        self._torch = torch
        self._asked = asked
        self._fused_for = fused_for
        self._switches = apex_names_rebound_by_choice(module, names)
        self._by_name: dict[str, Callable[[ast.Name | ast.Attribute], bool]] = {
            "apex.amp": self._answer_availability_question,
            "apex.fp16_utils.to_python_float": self._rewrite_to_python_float,
            "apex.fp16_utils.network_to_half": self._rewrite_half_evaluation,
            "apex.fp16_utils.convert_network": self._rewrite_half_evaluation,
            "apex.parallel.create_syncbn_process_group": self._rewrite_process_group,
        }
        self.imports: dict[tuple[ast.stmt, str], str] = {}
        self.findings: list[Finding] = []
        self._staying: set[str] = set()

    def rewrite_use(self, node: ast.Name | ast.Attribute, meaning: str) -> bool:
        """Rewrite a use; return False where current Apex still has it and torch has no equivalent."""
        if isinstance(node, ast.Name) and node.id in self._switches:
            raise UnsureRewrite(self._switches[node.id], SWITCHED.format(node.id))
        if self._may_be_from_later_star_import(node):
            raise UnsureRewrite(node, LATER_STAR.format(node.id if isinstance(node, ast.Name) else ""))
        if self._is_about_absence_of_apex(node):
            stays = meaning.startswith(STAYS) and meaning not in IMPORTED and not meaning.endswith("RMSNorm")
            return not stays and self._rewrite_absence_of_apex(node)
        while meaning.startswith(f"{REDUCTIONS}.") and isinstance(node, ast.Attribute):
            node, meaning = node.value, meaning.rpartition(".")[0]  # type: ignore[assignment]
        if meaning in IMPORTED:
            return self._rename_use(node, IMPORTED[meaning])
        last = meaning.rpartition(".")[2]
        if meaning.startswith("apex.optimizers.") and last in OPTIMIZERS:
            return self._rewrite_optimizer(node, last)
        if meaning.startswith("apex.normalization.") and last in ("FusedRMSNorm", "MixedFusedRMSNorm"):
            return self._rewrite_rms_norm(node)
        if meaning.startswith("apex.amp."):
            return self._rewrite_amp_use(node, meaning.removeprefix("apex.amp."))
        if (by_name := self._by_name.get(meaning)) is not None and by_name(node):
            return True
        if (reason := _why_part_is_left(meaning)) is not None:
            raise UnsureRewrite(node, reason)
        if is_unknown_to_every_apex(meaning):
            self._add_note(node, NEVER_THERE.format(meaning))
            return False
        if meaning.startswith(STAYS):
            return self._note_part_that_stays(node, meaning)
        raise UnsureRewrite(
            node, PASSED_ON.format(meaning) if meaning in MODULES else f"{meaning} has no equivalent in torch"
        )

    def _may_be_from_later_star_import(self, node: ast.Name | ast.Attribute) -> bool:
        """Return whether a name comes from `import *` of Apex alone, and another such import follows that."""
        if not isinstance(node, ast.Name):
            return False
        imports = self._module.imports
        if any((alias.asname or alias.name) == node.id for _, alias, _ in imports):
            return False
        stars = [full.partition(".")[0] in APEX for _, alias, full in imports if alias.name == "*"]
        return True in stars and False in stars[stars.index(True) :]

    def _answer_availability_question(self, node: ast.Name | ast.Attribute) -> bool:
        """Answer where `apex.amp` is only asked whether it is there."""
        if not is_only_tested_for_presence(self._module, node):
            return False
        self.findings += answer_availability_question_yes(self._module, self._edits, node)
        return True

    def _add_note(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding.of_node(node, NOTE, message))

    def _full_torch_name(self, name: str) -> str:
        """Return the full name of something in torch, as the module knows torch."""
        return f"{self._torch}{name.removeprefix('torch')}"

    def _note_part_that_stays(self, node: ast.AST, meaning: str) -> bool:
        """Note once per name that a part of Apex stays."""
        if meaning not in self._staying:
            self._staying.add(meaning)
            twin = STAYS_WITH_TWIN.get(meaning)
            why = f"{twin} does the same" if twin else "torch has no equivalent"
            self._add_note(node, f"{meaning} stays: {why}, and current Apex still has it")
        return False

    def _find_call_of_function(self, node: ast.AST) -> ast.Call | None:
        """Return the call whose function a node is; None where it is used otherwise."""
        parent = self._module.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    # `amp = None` and tests for it

    def _is_about_absence_of_apex(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return True
        return isinstance(self._module.parent(node), ast.Compare) and is_only_tested_for_presence(
            self._module, node
        )

    def _rewrite_absence_of_apex(self, node: ast.Name | ast.Attribute) -> bool:
        parent = self._module.parent(node)
        if isinstance(parent, ast.Compare):
            self.findings += answer_availability_question_yes(self._module, self._edits, node)
            return True
        statement = self._module.statement_around(node)
        caught = any(isinstance(outer, ast.ExceptHandler) for outer in self._module.ancestors(statement))
        value = _find_value_assigned_to(statement, node)
        twin = IMPORTED.get(str(self._names.full_name_of(node)))
        if value is not None and twin is not None and (caught or self._names.full_name_of(value) == twin):
            return self._rename_use(node, twin)  # the class to which the script falls back without Apex
        if not isinstance(value, ast.Constant):
            raise UnsureRewrite(node, f"{ast.unparse(node)} is bound to something else as well")
        if not caught and isinstance(statement.targets[0], ast.Name):  # type: ignore[attr-defined]
            self._edits.remove(statement)
        return True

    # what only has another name

    def _rename_use(self, node: ast.Name | ast.Attribute, twin: str) -> bool:
        name = twin.rpartition(".")[2]
        if name in self._asked and not is_only_used_as_type(self._module, node):
            raise UnsureRewrite(node, ASKED_FOR.format(self._asked[name], name))
        call = self._find_call_of_function(node)
        if twin == DDP and not is_only_used_as_type(self._module, node):
            for call_of_method, _ in self._module.method_calls(*ACCUMULATING):
                raise UnsureRewrite(call_of_method, ACCUMULATION.format(last_name(call_of_method.func)))
            self._rewrite_ddp_arguments(call) if call is not None else self._add_note(node, BUFFERS)
            if ddp_may_lack_gradients(call):
                self._add_note(call or node, UNUSED.format(UNUSED_OPTION))
        self._refuse_dropped_options(call, twin)
        base = self._module.parent(node) if call is None else None
        if twin == LAYER_NORM and (call is not None or isinstance(base, ast.ClassDef)):
            self._add_note(call or node, FP32_RESULT)
        own = [
            (statement, alias.name)
            for statement, alias in self._names.imports
            if isinstance(statement, ast.ImportFrom) and (alias.asname or alias.name) == dotted_name(node)
        ]
        if own and not twin.endswith((".convert_sync_batchnorm", ".ReduceOp")):
            self.imports |= dict.fromkeys(own, twin)
        else:  # an attribute, or a name that another file has from Apex
            self._edits.replace(node, self._full_torch_name(twin))
        return True

    def _refuse_dropped_options(self, call: ast.Call | None, twin: str) -> None:
        for each in [] if call is None else call.keywords:
            if each.arg in LAYER_OPTIONS:
                raise UnsureRewrite(each.value, f"{twin} has no option {each.arg}")

    def _rewrite_process_group(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._find_call_of_function(node)
        size = None if call is None else argument(call, "group_size", 0)
        if call is None or size is None:
            raise UnsureRewrite(node, "create_syncbn_process_group is passed as a value")
        text = self._module.source(size)
        group = f"{self._torch}.distributed.new_subgroups({text})[0]"
        is_alone = isinstance(size, ast.Constant) or isinstance(
            self._module.parent(call), (ast.Assign, ast.keyword)
        )
        if is_literal(size, 0):  # asks for one group of all
            group = "None"
        elif not isinstance(size, ast.Constant):
            group += f" if {text} else None"
        self._edits.replace(call, group if is_alone else f"({group})")
        return True

    # layers and optimizers

    def _rewrite_rms_norm(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._find_call_of_function(node)
        if isinstance(self._module.parent(node), ast.ClassDef):
            self._add_note(node, "FusedRMSNorm is a base class here; it stays, and current Apex still has it")
            return False
        if call is None:
            raise UnsureRewrite(
                node, "FusedRMSNorm is passed as a value; its equivalent is torch.nn.RMSNorm with eps=1e-5"
            )
        self._refuse_dropped_options(call, "torch.nn.RMSNorm")
        has_eps = len(call.args) > 1 or any(each.arg in ("eps", None) for each in call.keywords)
        self._edits.replace(node, f"{self._torch}.nn.RMSNorm")
        if not has_eps:
            self._add_argument(call, "eps=1e-5")
        return True

    # amp

    def _rewrite_amp_use(self, node: ast.Name | ast.Attribute, what: str) -> bool:
        call = self._find_call_of_function(node)
        if what == "disable_casts" and call is not None:
            self._edits.replace(call, f'{self._torch}.autocast("cuda", enabled=False)')
            return True
        if what in DECORATORS:
            return self._rewrite_decorator(node, DECORATORS[what])
        if what in REGISTERED and call is not None:
            return self._rewrite_cast_registration(call, REGISTERED[what])
        raise UnsureRewrite(node, f"amp.{what} has no equivalent in torch.amp")

    def _rewrite_cast_registration(self, call: ast.Call, dtype: str) -> bool:
        """Let a function cast its inputs, as Apex patched it; where autocast does so, nothing is left to do."""
        statement = self._module.statement_around(call)
        is_alone = statement is self._module.parent(call)
        if len(call.args) != 2 or not isinstance(call.args[1], ast.Constant) or not is_alone:
            raise UnsureRewrite(call, "the function to register cannot be seen; autocast has no registry")
        name, owner = str(call.args[1].value), self._names.full_name_of(call.args[0])
        if name[:1].isupper():
            raise UnsureRewrite(
                call, f'{name} is a class; call it under torch.autocast("cuda", enabled=False) by hand'
            )
        if dtype == "float16" and name in HALF and owner in ("torch", "torch.nn.functional"):
            self._edits.remove(statement)
            return True
        function = f"{self._module.source(call.args[0])}.{name}"
        cast = self._input_casting_expression(call, dtype, in_torch=owner is not None)
        self._edits.replace_statement(statement, [f"{function} = {cast}({function})"])
        self._add_note(
            call, f"{function} casts its inputs under autocast for the whole process, as Apex had it"
        )
        return True

    def _input_casting_expression(self, node: ast.AST, dtype: str, *, in_torch: bool = False) -> str:
        """Return the expression that lets a function cast its inputs; the first one brings a definition along."""
        module, text = self._module, CAST_FUNCTION.format(torch=self._torch)
        if any(getattr(each, "id", getattr(each, "name", None)) == CAST for each in module.nodes):
            raise UnsureRewrite(
                node, f"this needs a function {CAST}, but the module has something else of that name"
            )
        if f"def {CAST}(" not in self._edits.inserted_text():
            self._edits.insert_above(
                module.outermost_statement(node),
                [*text.replace("    ", module.indentation_unit).splitlines(), "", ""],
            )
        return f"{CAST}({self._torch}.{dtype}{', autocast=False' * in_torch})"

    def _rewrite_decorator(self, node: ast.Name | ast.Attribute, dtype: str) -> bool:
        call = self._find_call_of_function(node)
        if call is not None and len(call.args) == 1 and not call.keywords:
            self._edits.replace(node, self._input_casting_expression(node, dtype))
            return True
        parent = self._module.parent(node)
        if isinstance(parent, FunctionNode) and node in parent.decorator_list:
            if not _is_autograd_method(parent):
                self._edits.replace(node, self._input_casting_expression(node, dtype))
            elif parent.name == "backward":
                self._edits.replace(node, f'{self._torch}.amp.custom_bwd(device_type="cuda")')
            else:
                arguments = f'cast_inputs={self._torch}.{dtype}, device_type="cuda"'
                self._edits.replace(node, f"{self._torch}.amp.custom_fwd({arguments})")
            return True
        raise UnsureRewrite(node, "the decorator is passed as a value")

    def _rewrite_to_python_float(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._find_call_of_function(node)
        if call is None or len(call.args) != 1 or call.keywords:
            raise UnsureRewrite(node, "to_python_float is passed as a value; use t.item() instead")
        text = self._module.source(call.args[0])
        plain = isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        self._edits.replace(call, f"{text}.item()" if plain else f"({text}).item()")
        return True

    def _rewrite_optimizer(self, node: ast.Name | ast.Attribute, name: str) -> bool:
        """Rewrite a use of a fused optimizer; return False where it stays."""
        call, twin = self._find_call_of_function(node), OPTIMIZERS[name]
        if stays := self._why_optimizer_stays(node, name):
            self._add_note(node, stays)
            return False
        if call is None:
            self._replace_optimizer_class(node, name, self._fused_option_of(twin.torch))
            return True
        given = _torch_arguments_of_fused_optimizer(call, name)
        bias, mode = given.get("bias_correction"), given.get("adam_w_mode")
        if bias is not None and _is_option_off(bias):
            self._add_note(node, NO_CORRECTION)
            return False
        if not all(each is None or isinstance(each, ast.Constant) for each in (bias, mode)):
            raise UnsureRewrite(
                call, "bias_correction or adam_w_mode is no literal here: AdamW if both are true"
            )
        target = "torch.optim.Adam" if mode is not None and _is_option_off(mode) else twin.torch
        self._replace_optimizer_call(call, twin, target, self._fused_option_of(target))
        return True

    def _fused_option_of(self, optimizer: str) -> list[str]:
        """Return the argument by which an optimizer of torch is fused, in a list; an empty one for a plain one."""
        # The hooks of LARC need gradients that are unscaled; a fused step unscales after them.
        is_hooked = any(each.startswith("apex.parallel.LARC") for _, each in self._names.uses)
        if is_hooked or self._fused_for is None or self._fused_for < FUSED_SINCE[optimizer]:
            return []
        return ["fused=True"]

    def _why_optimizer_stays(self, node: ast.AST, name: str) -> str:
        """Return why a fused optimizer stays, which current Apex still has; empty where it does not."""
        if isinstance(self._module.parent(node), ast.ClassDef):
            return f"{name} is a base class here; it stays, and current Apex still has it"
        if any(each.endswith("FP16_Optimizer") for _, each in self._names.uses):
            return f"{name} stays, as FP16_Optimizer does"
        return ""

    def _replace_optimizer_call(
        self, call: ast.Call, twin: OptimizerReplacement, target: str, fused: list[str]
    ) -> None:
        """Let a call of a fused optimizer make that of torch, with the defaults of Apex."""
        module = self._module
        given = {each.arg for each in call.keywords if each.arg is not None}
        spread = len(given) < len(call.keywords)
        if spread:
            self._add_note(
                call, f"arguments passed as ** must be those of {target}, without {', '.join(twin.dropped)}"
            )
        added = [f"{key}={value}" for key, value in twin.added if key not in given and target == twin.torch]
        added = [*([] if spread else added), *(fused if "fused" not in given else [])]
        if given & set(twin.dropped) or not added:
            kept = [*call.args, *(each for each in call.keywords if each.arg not in twin.dropped)]
            texts = [*map(module.source, kept), *added]
            self._edits.replace(call, f"{self._full_torch_name(target)}({', '.join(texts)})")
        else:
            self._edits.replace(call.func, self._full_torch_name(target))
            self._add_argument(call, ", ".join(added))

    def _replace_optimizer_class(self, node: ast.Name | ast.Attribute, name: str, fused: list[str]) -> None:
        """Replace a class that is bound to a name, of which every call can be seen, by a partial of torch's."""
        module = self._module
        twin = OPTIMIZERS[name]
        parent = self._module.parent(node)
        chosen = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
        if not isinstance(chosen, ast.Name):
            raise UnsureRewrite(node, f"{name} is passed as a value; {twin.torch} has other arguments")
        allowed, scope = set(twin.arguments) - set(twin.dropped), module.scope_of[node]
        explicit: list[dict[str, ast.expr]] = []
        for use in walk(module.tree if chosen.id in scope.globals else scope.function or module.tree):
            if not isinstance(use, ast.Name) or use.id != chosen.id or not isinstance(use.ctx, ast.Load):
                continue
            call = self._find_call_of_function(use)
            given = None if call is None or len(call.args) > 2 else arguments(call, ("params", "lr"))
            if given is None or not given.keys() <= allowed:
                raise UnsureRewrite(
                    node, f"line {use.lineno} passes {name} on, or gives it what {twin.torch} may not take"
                )
            explicit.append(given)
        if not explicit:
            raise UnsureRewrite(
                node, f"{name} is chosen, but its call is not found; {twin.torch} has other arguments"
            )
        added = [f"{key}={value}" for key, value in twin.added if any(key not in given for given in explicit)]
        self._edits.replace(
            node, f"functools.partial({', '.join([self._full_torch_name(twin.torch), *added, *fused])})"
        )

    def _add_argument(self, call: ast.Call, text: str) -> None:
        """Put an argument at the end of those of a call."""
        start = self._module.end_of(call.func)
        inner = self._module.text[start : self._module.end_of(call) - 1].rstrip()
        separator = "" if inner.endswith("(") else (" " if inner.endswith(",") else ", ")
        self._edits.replace_span(start + len(inner), start + len(inner), f"{separator}{text}")

    # wrappers and models

    def _rewrite_ddp_arguments(self, call: ast.Call) -> None:
        """Rewrite the arguments of Apex's DistributedDataParallel."""
        module, known = self._module, arguments(call, DDP_ARGUMENTS)
        if known.keys() & HIDDEN:
            raise UnsureRewrite(call, "the arguments of Apex's DistributedDataParallel are passed as * or **")
        if not known.keys() <= set(DDP_ARGUMENTS):  # torch's own arguments, which Apex would refuse
            return
        if self._initializes_at_o2_or_o3():
            self._add_note(call, SHARDS)
        if len(known) == 1:
            self._add_argument(call, APART)
            return
        for name in ("allreduce_communicators", "allreduce_trigger_params", "gradient_average"):
            value = known.get(name)
            if not (
                _is_option_off(value)
                if name != "gradient_average"
                else value is None or is_literal(value, True)
            ):
                raise UnsureRewrite(call, f"{name} has no equivalent in torch's DistributedDataParallel")
        texts = [module.source(known["module"])] if "module" in known else []
        if not _is_option_off(known.get("delay_allreduce")):
            texts.append(f"find_unused_parameters={module.source(known['delay_allreduce'])}")
        texts.append(APART)
        self._edits.replace_span(module.end_of(call.func), module.end_of(call), f"({', '.join(texts)})")
        if dropped := ", ".join(sorted(known.keys() - {"module", "delay_allreduce"})):
            self._add_note(
                call, f"{dropped} of Apex's DistributedDataParallel has no equivalent and is left out"
            )

    def _initializes_at_o2_or_o3(self) -> bool:
        """Return whether the module initializes at O2 or O3, whose weights take half the memory."""
        calls = [
            self._find_call_of_function(use)
            for use, meaning in self._names.uses
            if meaning == "apex.amp.initialize"
        ]
        levels = [argument(call, "opt_level") for call in calls if call is not None]
        return any(is_literal(level, "O2") or is_literal(level, "O3") for level in levels)

    def _rewrite_half_evaluation(self, node: ast.Name | ast.Attribute) -> bool:
        """Let a model run under autocast instead of in fp16; return False where that is not sure to be the same."""
        module, statement = self._module, self._module.statement_around(node)
        call = self._find_call_of_function(node)
        attributes = {each.attr for each in module.nodes if isinstance(each, ast.Attribute)}
        if call is None or not call.args or call.keywords or attributes & {*TRAINING, "DataParallel"}:
            return False
        if any(meaning.endswith("FP16_Optimizer") for _, meaning in self._names.uses):
            return False
        if len(call.args) > 1 and self._names.full_name_of(call.args[1]) not in (
            "torch.half",
            "torch.float16",
        ):
            return False
        bound = statement.targets if isinstance(statement, ast.Assign) else call.args[:1]
        model, source = dotted_name(bound[0]), module.source(call.args[0])
        is_alone = isinstance(statement, (ast.Assign, ast.Expr)) and statement.value is call
        if not is_alone or len(bound) > 1 or model is None:
            return False
        wrap = (
            f'{model}.forward = {self._torch}.autocast("cuda", dtype={self._torch}.float16)({model}.forward)'
        )
        self._edits.replace_statement(
            statement, [*([f"{model} = {source}"] if source != model else []), wrap]
        )
        name = dotted_name(node)
        self._add_note(
            call, f"{name} made the weights fp16; under autocast they stay fp32, and products are in fp16"
        )
        return True


def _why_part_is_left(meaning: str) -> str | None:
    """Return why a part of Apex is left that torch has nothing for, and Apex no longer has; None for any other."""
    if meaning.startswith("apex.parallel.LARC"):
        return "LARC has no equivalent in torch; ampcompare has it: import ampcompare.apex as apex"
    if meaning.startswith("apex.fp16_utils") or meaning.endswith("FP16_Optimizer"):
        return OLD_API.format(meaning.rpartition(".")[2])
    gone = next((name for name in GONE if f"{meaning}.".startswith(f"{name}.")), None)
    if gone is None:
        return None
    when, instead = GONE[gone]
    return f"Apex removed {gone} {when}; take {instead}"


def classes_tested_by_isinstance(modules: Iterable[tuple[str, Module]]) -> dict[str, str]:
    """Return the classes of torch for which modules ask by `isinstance` and Apex's answer otherwise, with a place.

    Args:
        modules: with the names of their files, for the place.
    """
    asked: dict[str, str] = {}
    for file, module in modules:
        for node in module.nodes if any(each in module.text for each in OTHER_CLASSES) else ():
            if not isinstance(node, (ast.Name, ast.Attribute)) or not is_in_type_test(module, node):
                continue
            full = module.resolve(node) or ""
            name = full.rpartition(".")[2]
            if full.startswith("torch.nn.") and name in OTHER_CLASSES:
                asked.setdefault(name, f"line {node.lineno} of {file}")
    return asked


def ddp_may_lack_gradients(ddp: ast.Call | None) -> bool:
    """Return whether Apex's DistributedDataParallel, or what is not called here, may not look for unused parameters."""
    given = {} if ddp is None else arguments(ddp, DDP_ARGUMENTS)
    if ddp is not None and not given.keys() <= {*DDP_ARGUMENTS, *HIDDEN}:
        return False  # one that Apex would refuse: torch's, which the script takes where there is no Apex
    return not any(
        is_literal(given.get(each), True) for each in ("delay_allreduce", "find_unused_parameters")
    )


def is_only_used_as_type(module: Module, node: ast.AST) -> bool:
    """Return whether a class only stands for a type: in an annotation, or in a question for one."""
    return is_in_annotation(module, node) or is_in_type_test(module, node)


def is_in_annotation(module: Module, node: ast.AST) -> bool:
    """Return whether a name stands in an annotation."""
    around = pairwise([node, *module.ancestors(node)])
    return any(
        below in (getattr(outer, "annotation", None), getattr(outer, "returns", None))
        for below, outer in around
    )


def is_in_type_test(module: Module, node: ast.AST) -> bool:
    """Return whether a name stands in a question for a type, or in a tuple for such questions."""
    for below, outer in pairwise([node, *module.ancestors(node)]):
        if isinstance(outer, ast.Call):
            return last_name(outer.func) in ("isinstance", "issubclass") and below in outer.args[1:]
        if isinstance(outer, (ast.Compare, ast.stmt)):
            return isinstance(outer, ast.Compare) or _is_named_tuple_of_types_only_tested(
                module, outer, below
            )
    return False


def _is_named_tuple_of_types_only_tested(module: Module, statement: ast.AST, value: ast.AST) -> bool:
    """Return whether a statement gives a tuple of types a name, by which the module only asks for types."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return False
    name = last_name(target)
    if not name or not isinstance(value, (ast.Tuple, ast.List)):
        return False
    uses = [
        node
        for node in module.nodes
        if isinstance(node, (ast.Name, ast.Attribute))
        and last_name(node) == name
        and isinstance(node.ctx, ast.Load)
    ]
    return bool(uses) and all(_is_value_used_in_type_test(module, each) for each in uses)


def _is_value_used_in_type_test(module: Module, node: ast.AST) -> bool:
    """Return whether what a name holds is a type, or several, for which `isinstance` or a comparison asks."""
    below, outer = node, module.parent(node)
    while isinstance(outer, (ast.BinOp, ast.Tuple, ast.List, ast.Starred)):
        below, outer = outer, module.parent(outer)
    if isinstance(outer, ast.Call):
        return last_name(outer.func) in ("isinstance", "issubclass") and below in outer.args[1:]
    return isinstance(outer, ast.Compare) and below in outer.comparators


def _is_option_off(value: ast.expr | None) -> bool:
    """Return whether an option is not given, or as a literal that is false."""
    return value is None or (isinstance(value, ast.Constant) and not value.value)


def _torch_arguments_of_fused_optimizer(call: ast.Call, name: str) -> dict[str, ast.expr]:
    """Return the named arguments of a call of a fused optimizer; refuse those that the one of torch has not."""
    twin = OPTIMIZERS[name]
    if any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > 2:
        raise UnsureRewrite(call, f"the arguments of {name} cannot be matched; pass them by name")
    given = {each.arg: each.value for each in call.keywords if each.arg is not None}
    for option in given:
        if option not in (*twin.arguments, "fused", "maximize"):
            raise UnsureRewrite(call, f"{name}({option}=...) has no equivalent in {twin.torch}")
    if not (_is_option_off(given.get("wd_after_momentum")) and _is_option_off(given.get("adagrad_w_mode"))):
        raise UnsureRewrite(call, f"{name} with another order of weight decay has no equivalent in torch")
    return given


def _is_autograd_method(function: FunctionNode) -> bool:
    """Return whether a function is one of a `torch.autograd.Function`, whose inside autograd does not see."""
    return function.name in ("forward", "backward") and any(
        last_name(each) == "staticmethod" for each in function.decorator_list
    )


def _find_value_assigned_to(statement: ast.stmt, node: ast.AST) -> ast.expr | None:
    """Return what an assignment binds to a name, also in a tuple of names; None if that cannot be seen."""
    if not isinstance(statement, ast.Assign):
        return None
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return next((each for name, each in zip(target.elts, value.elts, strict=True) if name is node), None)
    return value
