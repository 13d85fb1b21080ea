"""Rewrite the uses of Apex around its core: wrappers, layers, optimizers, decorators, contexts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TypeAlias

from ampcompare.source.edits import Edits
from ampcompare.source.migrate.core.context import Core
from ampcompare.source.migrate.finding import NOTE, Finding, Unsure
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.options import as_bool
from ampcompare.source.migrate.twin_table import DECORATORS, GONE, IMPORTED, OPTIMIZERS, STAYS, Optimizer
from ampcompare.source.module import Module
from ampcompare.source.syntax import HIDDEN, arguments, dotted, is_literal, last_name

__all__ = ["DDP", "Twins"]

# Functions that run in fp16 under autocast too.
HALF = ("einsum", "matmul", "bmm", "baddbmm", "addbmm", "mm", "mv", "linear", "conv1d", "conv2d", "conv3d", "prelu")

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
NO_CORRECTION = "FusedAdam without bias correction has no equivalent in torch; it stays, and current Apex still has it"
DDP = "torch.nn.parallel.DistributedDataParallel"
DDP_ARGUMENTS = (
    "module",
    "message_size",
    "delay_allreduce",
    "shared_param",
    "allreduce_trigger_params",
    "retain_allreduce_buffers",
    "allreduce_always_fp32",
    "num_allreduce_streams",
    "allreduce_communicators",
    "gradient_average",
    "gradient_predivide_factor",
    "gradient_average_split_factor",
    "prof",
)
BUFFERS = (
    "torch's DistributedDataParallel sends the buffers of rank 0 before each forward pass, Apex's does not; "
    "broadcast_buffers=False keeps them apart"
)
SHARDS = (
    "each rank holds all weights in fp32 now, which takes more memory than O2; if that is too much, "
    "torch.distributed.fsdp.fully_shard (FSDP2) splits weights, gradients and optimizer state over the ranks"
)


class Twins:
    """Rewrites single uses.

    Attributes:
        imports: what is imported from torch instead, by statement and name.
        findings: notes.
    """

    def __init__(
        self, module: Module, names: Names, edits: Edits, torch: str, core: Core | None, *, whole: bool
    ) -> None:
        self._module = module
        self._names = names
        self._edits = edits
        self._torch = torch
        self._core, self._whole = core, whole
        self.imports: dict[tuple[ast.stmt, str], str] = {}
        self.findings: list[Finding] = []
        self._staying: set[str] = set()

    def rewrite(self, node: ast.Name | ast.Attribute, meaning: str) -> bool:
        """Rewrite a use; return False where current Apex still has it and torch has no equivalent.

        Raises:
            Unsure: there is no twin.
        """
        if self._is_absence(node):
            return self._absence(node)
        if id(node) in self._names.passed:
            return self._whole
        if meaning == "apex.amp" and self._is_test(node):
            return self._tested(node)
        if meaning in IMPORTED:
            return self._imported(node, meaning, IMPORTED[meaning])
        parts = meaning.split(".")
        if parts[-2:-1] == ["ReduceOp"] and isinstance(node, ast.Attribute):  # a member of the enumeration
            return self.rewrite(node.value, ".".join(parts[:-1]))  # type: ignore[arg-type]
        if parts[:2] == ["apex", "optimizers"] and parts[-1] in OPTIMIZERS:
            if any(each.endswith("FP16_Optimizer") for _, each in self._names.uses):
                self._note(node, f"{parts[-1]} stays, as FP16_Optimizer does")
                return False
            fused = not _uses_larc([each for _, each in self._names.uses])
            return _rewrite_optimizer(self._module, self._edits, self._torch, node, parts[-1], self._note, fused=fused)
        if parts[-1] in ("FusedRMSNorm", "MixedFusedRMSNorm") and parts[1] == "normalization":
            return self._rms_norm(node)
        if meaning.startswith("apex.amp."):
            return self._amp(node, meaning.removeprefix("apex.amp."))
        if meaning == "apex.fp16_utils.to_python_float":
            return self._to_python_float(node)
        if meaning == "apex.parallel.create_syncbn_process_group":
            return self._process_group(node)
        if meaning.startswith("apex.parallel.LARC"):
            raise Unsure(node, "LARC has no equivalent in torch; ampcompare has it: import ampcompare.apex as apex")
        if meaning in ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network") and self._whole:
            if _evaluate_half(self._module, self._names, self._edits, self._torch, node, self._note):
                return True
        if meaning.startswith("apex.fp16_utils") or meaning.endswith("FP16_Optimizer"):
            raise Unsure(
                node,
                f"{parts[-1]} is of the API before amp.initialize, with an fp16 model; it has no equivalent in "
                f"torch.amp: "
                "keep the model in fp32, use autocast and GradScaler",
            )
        if (gone := next((name for name in GONE if f"{meaning}.".startswith(f"{name}.")), None)) is not None:
            when, instead = GONE[gone]
            raise Unsure(node, f"Apex removed {gone} in {when}: take {instead}")
        if meaning.startswith(STAYS):
            return self._stays(node, meaning)
        if meaning in ("apex", "apex.optimizers", "apex.parallel", "apex.normalization", "apex.amp"):
            raise Unsure(node, f"{meaning} is passed as a value")
        raise Unsure(node, f"{meaning} has no equivalent in torch")

    def _note(self, node: ast.AST, message: str) -> None:
        self.findings.append(Finding(node.lineno, node.col_offset, NOTE, message))  # type: ignore[attr-defined]

    def _stays(self, node: ast.AST, meaning: str) -> bool:
        """Note once per name that a part of Apex stays."""
        if meaning not in self._staying:
            self._staying.add(meaning)
            self._note(node, f"{meaning} stays: torch has no equivalent, and current Apex still has it")
        return False

    def _call(self, node: ast.AST) -> ast.Call | None:
        parent = self._module.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    # `amp = None` and tests for it

    def _is_absence(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return True
        parent = self._module.parent(node)
        return (
            isinstance(parent, ast.Compare)
            and parent.left is node
            and isinstance(parent.ops[0], (ast.Is, ast.IsNot))
            and isinstance(parent.comparators[0], ast.Constant)
            and parent.comparators[0].value is None
        )

    def _absence(self, node: ast.Name | ast.Attribute) -> bool:
        if not self._whole:
            return False
        parent = self._module.parent(node)
        if isinstance(parent, ast.Compare):
            self._edits.replace(parent, "True" if isinstance(parent.ops[0], ast.IsNot) else "False")
            return True
        statement = self._module.statement(node)
        caught = any(isinstance(outer, ast.ExceptHandler) for outer in self._module.ancestors(statement))
        value = _value_of(statement, node)
        if value is not None and (twin := self._fallback(node, value, caught=caught)):
            return self._imported(node, "", twin)
        if not isinstance(value, ast.Constant):
            raise Unsure(node, f"{ast.unparse(node)} is bound to something else as well")
        if not caught and isinstance(statement.targets[0], ast.Name):  # type: ignore[attr-defined]
            self._edits.remove(statement)
        return True

    def _is_test(self, node: ast.AST) -> bool:
        """Return whether only the truth of a name matters, such as in `amp.state_dict() if amp else None`."""
        parent = self._module.parent(node)
        if isinstance(parent, (ast.If, ast.IfExp)):
            return parent.test is node
        return isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not))

    def _tested(self, node: ast.Name | ast.Attribute) -> bool:
        """Replace the test whether a script uses Apex by one whether the scaler does something."""
        if not self._whole:
            return False
        if not self._names.may_be_none(node):
            self._edits.replace(node, "True")
            return True
        function = self._module.function(node)
        made = [] if self._core is None else self._core.sites.initializes
        early = any(each.function is function and each.statement.lineno > node.lineno for each in made)
        if self._core is None or early or (scaler := self._core.only_scaler()) is None:
            raise Unsure(node, "this compares amp with None, where no scaler is in scope")
        self._edits.replace(node, f"{scaler}.is_enabled()")
        return True

    def _fallback(self, node: ast.AST, value: ast.expr, *, caught: bool) -> str | None:
        """Return the class of torch that a name stands for instead, where it falls back to that one without Apex.

        Args:
            caught: whether this is in an `except`, which nothing reaches any more: torch is there.
        """
        twin = IMPORTED.get(str(self._names.meaning(node)))
        return twin if twin is not None and (caught or self._names.meaning(value) == twin) else None

    # what only has another name

    def _imported(self, node: ast.Name | ast.Attribute, meaning: str, twin: str) -> bool:
        call = self._call(node)
        if twin == DDP and call is not None:
            _rewrite_ddp(self._module, self._names, self._edits, call, self._note, core=self._whole)
        if twin.endswith(".convert_sync_batchnorm") and call is not None:
            if any(each.arg in ("channel_last", None) for each in call.keywords):
                raise Unsure(call, "channel_last of convert_syncbn_model has no equivalent")
        own = [
            (statement, alias.name)
            for statement, alias in self._names.imports
            if isinstance(statement, ast.ImportFrom) and (alias.asname or alias.name) == dotted(node)
        ]
        if own and not twin.endswith(".convert_sync_batchnorm"):
            self.imports |= dict.fromkeys(own, twin)
        else:  # an attribute, or a name that another file has from Apex
            self._edits.replace(node, f"{self._torch}{twin.removeprefix('torch')}")
        return True

    def _process_group(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if call is None or len(call.args) + len(call.keywords) != 1:
            raise Unsure(node, "create_syncbn_process_group is passed as a value")
        size = call.args[0] if call.args else call.keywords[0].value
        text = self._module.source(size)
        group = f"{self._torch}.distributed.new_subgroups({text})[0]"
        if isinstance(size, ast.Constant) and not size.value:  # one group of all
            group = "None"
        elif not isinstance(size, ast.Constant):
            group = f"{group} if {text} else None"
            group = group if isinstance(self._module.parent(call), (ast.Assign, ast.keyword)) else f"({group})"
        self._edits.replace(call, group)
        return True

    # layers and optimizers

    def _rms_norm(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if isinstance(self._module.parent(node), ast.ClassDef):
            self._note(node, "FusedRMSNorm is a base class here; it stays, and current Apex still has it")
            return False
        if call is None:
            raise Unsure(node, "FusedRMSNorm is passed as a value; its equivalent is torch.nn.RMSNorm with eps=1e-5")
        has_eps = len(call.args) > 1 or any(each.arg in ("eps", None) for each in call.keywords)
        self._edits.replace(node, f"{self._torch}.nn.RMSNorm")
        if not has_eps:
            _add_argument(self._module, self._edits, call, "eps=1e-5")
        return True

    # amp

    def _amp(self, node: ast.Name | ast.Attribute, what: str) -> bool:
        call = self._call(node)
        if what == "disable_casts" and call is not None:
            if not self._whole:
                return False
            self._edits.replace(call, f'{self._torch}.autocast("cuda", enabled=False)')
            return True
        if what in DECORATORS:
            if not self._whole:
                return False
            return self._decorator(node, DECORATORS[what])
        if what in REGISTERED and call is not None:
            return self._registered(call, REGISTERED[what])
        if what == "init" and call is not None and _cast_from_here(self._module, self._edits, self._torch, call):
            return True
        if what == "__dict__" and self._is_lookup(node):
            return self._whole
        raise Unsure(node, f"amp.{what} has no equivalent in torch.amp")

    def _is_lookup(self, node: ast.AST) -> bool:
        """Replace a test such as `"state_dict" in amp.__dict__`, for versions of Apex that lack a function."""
        test = self._module.parent(node)
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.In):
            return False
        if not isinstance(test.left, ast.Constant) or test.left.value not in ("state_dict", "load_state_dict"):
            return False
        both = self._module.parent(test)
        if isinstance(both, ast.BoolOp) and isinstance(both.op, ast.And) and len(both.values) == 2:
            self._edits.replace(both, self._module.source(both.values[0 if both.values[1] is test else 1]))
        else:
            self._edits.replace(test, "True")
        return True

    def _registered(self, call: ast.Call, dtype: str) -> bool:
        """Let a function cast its inputs, as Apex patched it; where autocast does so, nothing is left to do."""
        statement = self._module.statement(call)
        if not self._whole:
            return False
        if (
            len(call.args) != 2
            or not isinstance(call.args[1], ast.Constant)
            or statement is not self._module.parent(call)
        ):
            raise Unsure(call, "the function to register cannot be seen; autocast has no registry")
        name, owner = str(call.args[1].value), self._names.meaning(call.args[0])
        if name[:1].isupper():
            raise Unsure(call, f'{name} is a class: call it under torch.autocast("cuda", enabled=False) by hand')
        if dtype == "float16" and name in HALF and owner in ("torch", "torch.nn.functional"):
            self._edits.remove(statement)
            return True
        function = f"{self._module.source(call.args[0])}.{name}"
        cast = self._cast_inputs(call, dtype, in_torch=owner is not None)
        self._edits.replace_statement(statement, [f"{function} = {cast}({function})"])
        self._note(call, f"{function} casts its inputs under autocast for the whole process, as Apex had it")
        return True

    def _cast_inputs(self, node: ast.AST, dtype: str, *, in_torch: bool = False) -> str:
        """Return the expression that lets a function cast its inputs; the first one brings a definition along.

        Args:
            in_torch: whether autocast would cast them again inside of the function.

        Raises:
            Unsure: the module has another use for the name.
        """
        _put_function(self._module, self._edits, node, CAST, CAST_FUNCTION.format(torch=self._torch))
        return f"{CAST}({self._torch}.{dtype}{', autocast=False' * in_torch})"

    def _decorator(self, node: ast.Name | ast.Attribute, dtype: str) -> bool:
        call = self._call(node)
        if call is not None and len(call.args) == 1 and not call.keywords:
            self._edits.replace(node, self._cast_inputs(node, dtype))
            return True
        parent = self._module.parent(node)
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and node in parent.decorator_list:
            if not _is_autograd(parent):
                self._edits.replace(node, self._cast_inputs(node, dtype))
            elif parent.name == "backward":
                self._edits.replace(node, f'{self._torch}.amp.custom_bwd(device_type="cuda")')
            else:
                arguments = f'cast_inputs={self._torch}.{dtype}, device_type="cuda"'
                self._edits.replace(node, f"{self._torch}.amp.custom_fwd({arguments})")
            return True
        raise Unsure(node, "the decorator is passed as a value")

    def _to_python_float(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if call is None or len(call.args) != 1 or call.keywords:
            raise Unsure(node, "to_python_float is passed as a value; use t.item() instead")
        text = self._module.source(call.args[0])
        plain = isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        self._edits.replace(call, f"{text}.item()" if plain else f"({text}).item()")
        return True


def _is_autograd(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is one of a `torch.autograd.Function`, whose inside autograd does not see."""
    return function.name in ("forward", "backward") and any(
        last_name(each) == "staticmethod" for each in function.decorator_list
    )


def _put_function(module: Module, edits: Edits, node: ast.AST, name: str, text: str) -> None:
    """Put a function above the first statement of the module that uses it.

    Raises:
        Unsure: the module has another use for its name.
    """
    if any(getattr(each, "id", getattr(each, "name", None)) == name for each in module.nodes):
        raise Unsure(node, f"this needs a function {name}, but the module has something else of that name")
    if f"def {name}(" not in edits.inserted():
        edits.before(module.outermost(node), [*text.replace("    ", module.unit).splitlines(), "", ""])


def _value_of(statement: ast.stmt, node: ast.AST) -> ast.expr | None:
    """Return what an assignment binds to a name, also in a tuple of names; None if that cannot be seen."""
    if not isinstance(statement, ast.Assign):
        return None
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return next((each for name, each in zip(target.elts, value.elts, strict=True) if name is node), None)
    return value


def _trains(module: Module) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in TRAINING for each in module.nodes)


def _evaluate_half(
    module: Module,
    names: Names,
    edits: Edits,
    torch: str,
    node: ast.Name | ast.Attribute,
    note: Callable[[ast.AST, str], None],
) -> bool:
    """Let a model run under autocast instead of in fp16; return False where that is not sure to be the same."""
    call, statement = module.parent(node), module.statement(node)
    if not isinstance(call, ast.Call) or call.func is not node or not call.args or call.keywords or _trains(module):
        return False
    if any(meaning.endswith("FP16_Optimizer") for _, meaning in names.uses):
        return False
    if any(isinstance(each, ast.Attribute) and each.attr == "DataParallel" for each in module.nodes):
        return False
    if len(call.args) > 1 and names.meaning(call.args[1]) not in ("torch.half", "torch.float16"):
        return False
    model = dotted(call.args[0])
    if isinstance(statement, ast.Assign) and statement.value is call and len(statement.targets) == 1:
        model = dotted(statement.targets[0])
    elif not (isinstance(statement, ast.Expr) and statement.value is call):
        return False
    if model is None:
        return False
    source = module.source(call.args[0])
    wrap = f'{model}.forward = {torch}.autocast("cuda", dtype={torch}.float16)({model}.forward)'
    edits.replace_statement(statement, [*([f"{model} = {source}"] if source != model else []), wrap])
    note(call, f"{dotted(node)} made the weights fp16; under autocast they stay fp32, and products are in fp16")
    return True


def _cast_from_here(module: Module, edits: Edits, torch: str, call: ast.Call) -> bool:
    """Turn the casts of `amp.init` on for the rest of the process; return False where its handle is used."""
    statement = module.statement(call)
    given = arguments(call)
    handle = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else None
    names = [each for each in module.nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]
    if handle is None or any(each.id == handle for each in names) or _trains(module):
        return False
    if call.args or set(given) - {"enabled", "verbose", "enable_caching"}:
        return False
    enabled = f", enabled={as_bool(module, module.source(given['enabled']))}" if "enabled" in given else ""
    autocast = f'{torch}.autocast("cuda", dtype={torch}.float16, cache_enabled=False{enabled})'
    lines = [f"{handle} = {autocast}", f"{handle}.__enter__()  # for the rest of the process, as amp.init has it"]
    edits.replace_statement(statement, lines)
    return True


def _uses_larc(meanings: list[str]) -> bool:
    """Return whether LARC is among the full names that a module uses: its hooks need gradients that are unscaled.

    Optimizers with `fused=True` unscale inside their step, after such hooks.
    """
    return any(each.startswith("apex.parallel.LARC") for each in meanings)


Note: TypeAlias = Callable[[ast.AST, str], None]


def _add_argument(module: Module, edits: Edits, call: ast.Call, text: str) -> None:
    """Put an argument at the end of those of a call."""
    start = module.span(call.func)[1]
    inner = module.text[start : module.span(call)[1] - 1].rstrip()
    separator = "" if inner.endswith("(") else (" " if inner.endswith(",") else ", ")
    at = start + len(inner)
    edits.replace_span(at, at, f"{separator}{text}")


def _rewrite_optimizer(
    module: Module, edits: Edits, torch: str, node: ast.Name | ast.Attribute, name: str, note: Note, *, fused: bool
) -> bool:
    """Rewrite a use of a fused optimizer; return False where it stays.

    Args:
        torch: the name by which the module knows torch.
        name: of the class in Apex.
        note: gets a remark on a node.
        fused: whether to ask torch for its fused step; one with hooks that read gradients must not be.

    Raises:
        Unsure: its arguments have no equivalent, or cannot be seen.
    """
    parent = module.parent(node)
    twin = OPTIMIZERS[name]
    if isinstance(parent, ast.ClassDef):
        note(node, f"{name} is a base class here; it stays, and current Apex still has it")
        return False
    if not (isinstance(parent, ast.Call) and parent.func is node):
        _value(module, edits, torch, node, name, fused)
        return True
    given = {each.arg: each.value for each in parent.keywords if each.arg is not None}
    target, stays = _target(module, parent, name, given)
    if stays:
        note(node, NO_CORRECTION)
        return False
    spread = any(each.arg is None for each in parent.keywords)
    if spread:
        note(parent, f"arguments passed as ** must be those of {target}, without {', '.join(twin.dropped)}")
    _call(module, edits, torch, parent, twin, target, fused)
    return True


def _target(module: Module, call: ast.Call, name: str, given: dict[str, ast.expr]) -> tuple[str, bool]:
    """Return the class of torch for a call, and whether Apex's stays."""
    twin = OPTIMIZERS[name]
    if any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > 2:
        raise Unsure(call, f"the arguments of {name} cannot be matched; pass them by name")
    for argument in given:
        if argument not in twin.arguments and argument not in ("fused", "maximize"):
            raise Unsure(call, f"{name}({argument}=...) has no equivalent in {twin.torch}")
    late = given.get("wd_after_momentum") or given.get("adagrad_w_mode")
    if late is not None and not (isinstance(late, ast.Constant) and not late.value):
        raise Unsure(call, f"{name} with another order of weight decay has no equivalent in torch")
    if name != "FusedAdam":
        return twin.torch, False
    mode, bias = given.get("adam_w_mode"), given.get("bias_correction")
    if isinstance(bias, ast.Constant) and not bias.value:
        return twin.torch, True
    if bias is not None and not isinstance(bias, ast.Constant):
        raise Unsure(call, "bias_correction is chosen at run time; torch has no Adam without it")
    if mode is not None and not isinstance(mode, ast.Constant):
        raise Unsure(call, "adam_w_mode is chosen at run time: AdamW if true, Adam if not")
    return ("torch.optim.Adam" if mode is not None and not mode.value else twin.torch), False


def _call(module: Module, edits: Edits, torch: str, call: ast.Call, twin: Optimizer, target: str, fused: bool) -> None:
    given = {each.arg for each in call.keywords}
    arguments = [module.source(each) for each in call.args]
    arguments += [
        f"{each.arg}={module.source(each.value)}" if each.arg else f"**{module.source(each.value)}"
        for each in call.keywords
        if each.arg not in twin.dropped
    ]
    added = [
        f"{key}={value}"
        for key, value in twin.added
        if key not in given and None not in given and target != "torch.optim.Adam"
    ]
    if fused and "fused" not in given:
        added.append("fused=True")
    full = f"{torch}{target.removeprefix('torch')}"
    if given & set(twin.dropped) or not added:
        edits.replace(call, f"{full}({', '.join([*arguments, *added])})")
    else:
        edits.replace(call.func, full)
        _add_argument(module, edits, call, ", ".join(added))


# a class that is chosen first: `cls = FusedAdam`, `{"adam": FusedAdam}[name]`


def _value(module: Module, edits: Edits, torch: str, node: ast.Name | ast.Attribute, name: str, fused: bool) -> None:
    """Replace a class that is only called later, with arguments that can all be seen, by a partial of its twin."""
    twin = OPTIMIZERS[name]
    calls = list(_calls(module, node, name))
    if not calls:
        raise Unsure(node, f"{name} is chosen, but its call is not found; its twin {twin.torch} has other arguments")
    allowed = set(twin.arguments) - set(twin.dropped)
    explicit: list[set[str]] = []
    for call in calls:
        given = _argument_names(module, call)
        if given is None or any(isinstance(each, ast.Starred) for each in call.args) or len(call.args) > 2:
            raise Unsure(node, f"{name} is chosen here, and the arguments of its call in line {call.lineno} are hidden")
        wrong = sorted(given - allowed)
        if wrong:
            raise Unsure(
                node, f"{name} is chosen here, and {twin.torch} has no {wrong[0]}, given in line {call.lineno}"
            )
        explicit.append(given)
    added = [f"{key}={value}" for key, value in twin.added if any(key not in given for given in explicit)]
    full = f"{torch}{twin.torch.removeprefix('torch')}"
    edits.replace(node, f"functools.partial({', '.join([full, *added, *(['fused=True'] if fused else [])])})")


def _calls(module: Module, node: ast.expr, name: str) -> Iterator[ast.Call]:
    """Yield the calls that a chosen class comes to.

    Raises:
        Unsure: it also goes somewhere else.
    """
    parent = module.parent(node)
    if isinstance(parent, ast.Call) and parent.func is node:
        yield parent
        return
    if isinstance(parent, ast.IfExp) and parent.test is not node:
        yield from _calls(module, parent, name)
        return
    if isinstance(parent, ast.Dict) and node in parent.values:
        yield from _entries(module, parent, name)
        return
    variable = _assigned(parent, node)
    if variable is None:
        raise Unsure(node, f"{name} is passed as a value; its twin {OPTIMIZERS[name].torch} has other arguments")
    for use in _loads(module, variable):
        call = module.parent(use)
        if not (isinstance(call, ast.Call) and call.func is use):
            raise Unsure(node, f"{name} is passed on in line {use.lineno}, where its call cannot be seen")
        yield call


def _entries(module: Module, table: ast.Dict, name: str) -> Iterator[ast.Call]:
    parent = module.parent(table)
    if isinstance(parent, ast.Subscript) and parent.value is table:
        yield from _calls(module, parent, name)
        return
    variable = _assigned(parent, table)
    if variable is None:
        raise Unsure(table, f"the table with {name} is passed on; its equivalent has other arguments")
    for use in _loads(module, variable):
        outer = module.parent(use)
        if isinstance(outer, ast.Subscript) and outer.value is use and isinstance(outer.ctx, ast.Load):
            yield from _calls(module, outer, name)
        elif not _reads_keys(module, outer, use):
            raise Unsure(table, f"the table with {name} is passed on in line {use.lineno}")


def _reads_keys(module: Module, outer: ast.AST, use: ast.Name) -> bool:
    """Return whether only the keys of a table are used."""
    if isinstance(outer, ast.Compare):
        return use in outer.comparators and all(isinstance(each, (ast.In, ast.NotIn)) for each in outer.ops)
    call = module.parent(outer)
    return isinstance(outer, ast.Attribute) and outer.attr == "keys" and isinstance(call, ast.Call)


def _assigned(parent: ast.AST, value: ast.expr) -> ast.Name | None:
    """Return the plain name that a value is assigned to."""
    if isinstance(parent, ast.Assign) and parent.value is value and len(parent.targets) == 1:
        target = parent.targets[0]
        return target if isinstance(target, ast.Name) else None
    return None


def _loads(module: Module, variable: ast.Name) -> Iterator[ast.Name]:
    """Yield the places where a variable is read, except those that it reaches only after it was bound again.

    They are in its function, or anywhere if it is of the module or global.
    """
    scope: ast.AST = module.function(variable) or module.tree
    for each in ast.walk(scope):
        if isinstance(each, (ast.Global, ast.Nonlocal)) and variable.id in each.names:
            scope = module.tree
    for each in ast.walk(scope):
        if isinstance(each, ast.Name) and each.id == variable.id and isinstance(each.ctx, ast.Load):
            last = _last_binding(module, each)
            if last is None or last.lineno <= variable.lineno:
                yield each


def _last_binding(module: Module, use: ast.Name) -> ast.Assign | None:
    """Return the nearest assignment that always runs before a use, in its function."""
    outer: ast.stmt | None = module.statement(use)
    while (current := outer) is not None:
        block, place = module.siblings(current)
        for each in reversed(block[:place]):
            if isinstance(each, ast.Assign) and any(dotted(target) == use.id for target in each.targets):
                return each
        outer = module.outer(current)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
    return None


def _argument_names(module: Module, call: ast.Call) -> set[str] | None:
    """Return the keywords of a call; those of `**options` from its one dict, and None if that cannot be seen."""
    found: set[str] = set()
    for each in call.keywords:
        keys = {each.arg} if each.arg is not None else _keys(module, each.value)
        if keys is None:
            return None
        found |= keys
    return found


def _keys(module: Module, options: ast.expr) -> set[str] | None:
    """Return the keys that a dict of options may have at a use; None if something else may change it."""
    if not isinstance(options, ast.Name):
        return None
    scope = module.function(options) or module.tree
    last = _last_binding(module, options)
    loops = any(isinstance(each, (ast.For, ast.While)) for each in module.ancestors(options))
    found: set[str] = set()
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or node.id != options.id:
            continue
        if last is not None and (node.lineno < last.lineno or (node.lineno > options.lineno and not loops)):
            continue
        parent = module.parent(node)
        if isinstance(parent, ast.keyword) and parent.arg is None:
            continue
        keys = _bound_keys(parent, node)
        if keys is None:
            return None
        found |= keys
    return found or None


def _bound_keys(parent: ast.AST, node: ast.Name) -> set[str] | None:
    if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.slice, ast.Constant):
        return {str(parent.slice.value)}
    if not isinstance(parent, ast.Assign) or not isinstance(parent.value, ast.Dict):
        return None
    keys = [key.value for key in parent.value.keys if isinstance(key, ast.Constant)]
    return {str(key) for key in keys} if len(keys) == len(parent.value.keys) else None


def _rewrite_ddp(
    module: Module,
    names: Names,
    edits: Edits,
    call: ast.Call,
    note: Callable[[ast.AST, str], None],
    *,
    core: bool,
) -> None:
    """Rewrite the arguments of a call.

    Args:
        note: gets a remark on a node.
        core: whether `amp.initialize` is rewritten too.

    Raises:
        Unsure: an argument has no equivalent, or cannot be seen.
    """
    bound = arguments(call, DDP_ARGUMENTS)
    if bound.keys() & HIDDEN:
        raise Unsure(call, "the arguments of Apex's DistributedDataParallel are passed as * or **")
    known = {name: value for name, value in bound.items() if name in DDP_ARGUMENTS}
    if len(known) < len(bound):  # torch's own arguments, which Apex would refuse
        return
    note(call, BUFFERS)
    if core and _halves_weights(names):
        note(call, SHARDS)
    if len(bound) == 1:
        return
    average = known.get("gradient_average")
    if average is not None and not is_literal(average, True):
        raise Unsure(call, "gradient_average=False has no equivalent: torch averages; scale the loss by the world size")
    kept = any(isinstance(each, ast.Attribute) and each.attr == "allreduce_buffers" for each in module.nodes)
    refused = ("allreduce_communicators", "allreduce_trigger_params", *(["retain_allreduce_buffers"] if kept else []))
    for name in refused:
        value = known.get(name)
        if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            raise Unsure(call, f"{name} has no equivalent in torch's DistributedDataParallel")
    texts = [module.source(known["module"])] if "module" in known else []
    delay = known.get("delay_allreduce")
    if delay is not None and not (isinstance(delay, ast.Constant) and not delay.value):
        texts.append(f"find_unused_parameters={module.source(delay)}")
    edits.replace_span(module.end(call.func), module.end(call), f"({', '.join(texts)})")
    dropped = sorted(set(known) - {"module", "delay_allreduce"})
    if dropped:
        note(call, f"{', '.join(dropped)} of Apex's DistributedDataParallel has no equivalent and is left out")


def _halves_weights(names: Names) -> bool:
    """Return whether a module initializes at O2 or O3, whose weights take half the memory."""
    for use, meaning in names.uses:
        call = names.module.parent(use)
        if meaning == "apex.amp.initialize" and isinstance(call, ast.Call):
            level = next((each.value for each in call.keywords if each.arg == "opt_level"), None)
            if isinstance(level, ast.Constant) and level.value in ("O2", "O3"):
                return True
    return False
