"""Rewrite the uses of Apex around its core: wrappers, layers, optimizers, decorators, contexts."""

from __future__ import annotations

import ast

from ampcompare.migrate.core.scalers import plan_scalers
from ampcompare.migrate.edits import Edits
from ampcompare.migrate.finding import NOTE, Finding
from ampcompare.migrate.read.names import Names
from ampcompare.migrate.read.sites import Unsure, collect_sites
from ampcompare.migrate.read.tree import Tree
from ampcompare.migrate.twins.catalog import DECORATORS, IMPORTED, OPTIMIZERS, STAYS
from ampcompare.migrate.twins.inference import cast_from_here, evaluate_half
from ampcompare.migrate.twins.larc import rewrite_larc, uses_larc
from ampcompare.migrate.twins.optimizers import add_argument, rewrite_optimizer
from ampcompare.migrate.twins.parallel import DDP, rewrite_ddp

__all__ = ["Twins"]

# Functions that run in fp16 under autocast too.
HALF = ("einsum", "matmul", "bmm", "baddbmm", "addbmm", "mm", "mv", "linear", "conv1d", "conv2d", "conv3d", "prelu")

REGISTERED = {"register_half_function": "float16", "register_float_function": "float32"}
LISTS = {"functional_overrides": ".nn.functional", "torch_overrides": "", "tensor_overrides": ".Tensor"}


class Twins:
    """Rewrites single uses.

    Attributes:
        imports: what is imported from torch instead, by statement and name.
        findings: notes.
    """

    def __init__(self, tree: Tree, names: Names, edits: Edits, torch: str, *, core: bool) -> None:
        self._tree = tree
        self._names = names
        self._edits = edits
        self._torch = torch
        self._core = core
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
            return self._core
        if meaning == "apex.amp" and self._is_test(node):
            return self._tested(node)
        if meaning in IMPORTED:
            return self._imported(node, meaning, IMPORTED[meaning])
        parts = meaning.split(".")
        if parts[-2:-1] == ["ReduceOp"] and isinstance(node, ast.Attribute):  # a member of the enumeration
            return self.rewrite(node.value, ".".join(parts[:-1]))  # type: ignore[arg-type]
        if parts[:2] == ["apex", "optimizers"] and parts[-1] in OPTIMIZERS:
            fused = not uses_larc([each for _, each in self._names.uses])
            return rewrite_optimizer(self._tree, self._edits, self._torch, node, parts[-1], self._note, fused=fused)
        if parts[-1] in ("FusedRMSNorm", "MixedFusedRMSNorm") and parts[1] == "normalization":
            return self._rms_norm(node)
        if meaning.startswith("apex.amp."):
            return self._amp(node, meaning.removeprefix("apex.amp."))
        if meaning == "apex.fp16_utils.to_python_float":
            return self._to_python_float(node)
        if meaning == "apex.parallel.create_syncbn_process_group":
            return self._process_group(node)
        if meaning.startswith("apex.parallel.LARC"):
            rewrite_larc(self._tree, self._edits, self._torch, node)
            return True
        if meaning in ("apex.fp16_utils.network_to_half", "apex.fp16_utils.convert_network") and self._core:
            if evaluate_half(self._tree, self._names, self._edits, self._torch, node, self._note):
                return True
        if meaning.startswith("apex.fp16_utils") or meaning.endswith("FP16_Optimizer"):
            raise Unsure(
                node,
                f"{parts[-1]} is of the API before amp.initialize, with an fp16 model; it has no equivalent in "
                f"torch.amp: "
                "keep the model in fp32, use autocast and GradScaler",
            )
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
        parent = self._tree.parent(node)
        return parent if isinstance(parent, ast.Call) and parent.func is node else None

    # `amp = None` and tests for it

    def _is_absence(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            return True
        parent = self._tree.parent(node)
        return (
            isinstance(parent, ast.Compare)
            and parent.left is node
            and isinstance(parent.ops[0], (ast.Is, ast.IsNot))
            and isinstance(parent.comparators[0], ast.Constant)
            and parent.comparators[0].value is None
        )

    def _absence(self, node: ast.Name | ast.Attribute) -> bool:
        if not self._core:
            return False
        parent = self._tree.parent(node)
        if isinstance(parent, ast.Compare):
            self._edits.replace(parent, "True" if isinstance(parent.ops[0], ast.IsNot) else "False")
            return True
        statement = self._tree.statement(node)
        caught = any(isinstance(outer, ast.ExceptHandler) for outer in self._tree.ancestors(statement))
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
        parent = self._tree.parent(node)
        if isinstance(parent, (ast.If, ast.IfExp)):
            return parent.test is node
        return isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not))

    def _tested(self, node: ast.Name | ast.Attribute) -> bool:
        """Replace the test whether a script uses Apex by one whether the scaler does something."""
        if not self._core:
            return False
        if not self._names.may_be_none(node):
            self._edits.replace(node, "True")
            return True
        sites = collect_sites(self._tree, self._names)
        scalers = plan_scalers(self._tree, sites, "scaler")
        early = any(
            each.function is self._tree.function(node) and each.statement.lineno > node.lineno
            for each in sites.initializes
        )
        if early or len(scalers.names) != 1 or scalers.home == "optimizer":
            raise Unsure(node, "this compares amp with None, where no scaler is in scope")
        self._edits.replace(node, f"{scalers.reference(None)}.is_enabled()")
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
            rewrite_ddp(self._tree, self._names, self._edits, self._torch, call, self._note, core=self._core)
        if twin == "torch.nn.SyncBatchNorm.convert_sync_batchnorm":
            if call is not None and any(each.arg in ("channel_last", None) for each in call.keywords):
                raise Unsure(call, "channel_last of convert_syncbn_model has no equivalent")
            self._edits.replace(node, f"{self._torch}{twin.removeprefix('torch')}")
            return True
        if isinstance(node, ast.Name):
            for statement, alias in self._names.imports:
                if isinstance(statement, ast.ImportFrom) and (alias.asname or alias.name) == node.id:
                    self.imports[(statement, alias.name)] = twin
            return True
        self._edits.replace(node, f"{self._torch}{twin.removeprefix('torch')}")
        return True

    def _process_group(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if call is None or len(call.args) + len(call.keywords) != 1:
            raise Unsure(node, "create_syncbn_process_group is passed as a value")
        size = call.args[0] if call.args else call.keywords[0].value
        text = self._tree.source(size)
        group = f"{self._torch}.distributed.new_subgroups({text})[0]"
        if isinstance(size, ast.Constant) and not size.value:  # one group of all
            group = "None"
        elif not isinstance(size, ast.Constant):
            group = f"{group} if {text} else None"
            group = group if isinstance(self._tree.parent(call), (ast.Assign, ast.keyword)) else f"({group})"
        self._edits.replace(call, group)
        return True

    # layers and optimizers

    def _rms_norm(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if isinstance(self._tree.parent(node), ast.ClassDef):
            self._note(node, "FusedRMSNorm is a base class here; it stays, and current Apex still has it")
            return False
        if call is None:
            raise Unsure(node, "FusedRMSNorm is passed as a value; its equivalent is torch.nn.RMSNorm with eps=1e-5")
        has_eps = len(call.args) > 1 or any(each.arg in ("eps", None) for each in call.keywords)
        self._edits.replace(node, f"{self._torch}.nn.RMSNorm")
        if not has_eps:
            add_argument(self._tree, self._edits, call, "eps=1e-5")
        return True

    # amp

    def _amp(self, node: ast.Name | ast.Attribute, what: str) -> bool:
        call = self._call(node)
        if what == "disable_casts" and call is not None:
            if not self._core:
                return False
            self._edits.replace(call, f'{self._torch}.autocast("cuda", enabled=False)')
            return True
        if what in DECORATORS:
            if not self._core:
                return False
            return self._decorator(node, DECORATORS[what])
        if what in REGISTERED and call is not None:
            return self._registered(call, REGISTERED[what])
        if what.startswith("lists.") and call is not None:
            return self._listed(call, what)
        if what == "init" and call is not None and cast_from_here(self._tree, self._edits, self._torch, call):
            return True
        if what.startswith("_amp_state"):
            return self._state(node, what)
        if what == "__dict__" and self._is_lookup(node):
            return self._core
        raise Unsure(node, f"amp.{what} has no equivalent in torch.amp")

    def _is_lookup(self, node: ast.AST) -> bool:
        """Replace a test such as `"state_dict" in amp.__dict__`, for versions of Apex that lack a function."""
        test = self._tree.parent(node)
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.In):
            return False
        if not isinstance(test.left, ast.Constant) or test.left.value not in ("state_dict", "load_state_dict"):
            return False
        both = self._tree.parent(test)
        if isinstance(both, ast.BoolOp) and isinstance(both.op, ast.And) and len(both.values) == 2:
            self._edits.replace(both, self._tree.source(both.values[0 if both.values[1] is test else 1]))
        else:
            self._edits.replace(test, "True")
        return True

    def _registered(self, call: ast.Call, dtype: str) -> bool:
        """Let a function cast its inputs, as Apex patched it; where autocast does so, nothing is left to do."""
        statement = self._tree.statement(call)
        if not self._core:
            return False
        if (
            len(call.args) != 2
            or not isinstance(call.args[1], ast.Constant)
            or statement is not self._tree.parent(call)
        ):
            raise Unsure(call, "the function to register cannot be seen; autocast has no registry")
        name, owner = str(call.args[1].value), self._names.meaning(call.args[0])
        if name[:1].isupper():
            raise Unsure(call, f'{name} is a class: call it under torch.autocast("cuda", enabled=False) by hand')
        if dtype == "float16" and name in HALF and owner in ("torch", "torch.nn.functional"):
            self._edits.remove(statement)
            return True
        function = f"{self._tree.source(call.args[0])}.{name}"
        arguments = f'{function}, cast_inputs={self._torch}.{dtype}, device_type="cuda"'
        self._edits.replace_statement(statement, [f"{function} = {self._torch}.amp.custom_fwd({arguments})"])
        self._note(call, f"{function} casts its inputs under autocast for the whole process, as Apex had it")
        return True

    def _listed(self, call: ast.Call, what: str) -> bool:
        """Rewrite a change of the lists of O1, such as `amp.lists.functional_overrides.FP32_FUNCS.remove(...)`."""
        parts = what.split(".")
        statement = self._tree.statement(call)
        if not self._core:
            return False
        owner = LISTS.get(parts[1])
        constant = call.args[0] if len(call.args) == 1 else None
        if owner is None or not isinstance(constant, ast.Constant) or statement is not self._tree.parent(call):
            raise Unsure(call, f"amp.{what}: the lists of O1 have no equivalent in autocast")
        function = f"{self._torch}{owner}.{constant.value!s}"
        if parts[-1] == "remove":
            self._edits.remove(statement)
            self._note(call, f"autocast has no lists to change: {function} is cast as autocast has it")
            return True
        dtype = {"FP16_FUNCS": "float16", "FP32_FUNCS": "float32"}.get(parts[2])
        if parts[-1] != "append" or dtype is None:
            raise Unsure(call, f"amp.{what}: the lists of O1 have no equivalent in autocast")
        arguments = f'{function}, cast_inputs={self._torch}.{dtype}, device_type="cuda"'
        self._edits.replace_statement(statement, [f"{function} = {self._torch}.amp.custom_fwd({arguments})"])
        return True

    def _decorator(self, node: ast.Name | ast.Attribute, dtype: str) -> bool:
        arguments = f'cast_inputs={self._torch}.{dtype}, device_type="cuda"'
        call = self._call(node)
        if call is not None and len(call.args) == 1 and not call.keywords:
            function = self._tree.source(call.args[0])
            self._edits.replace(call, f"{self._torch}.amp.custom_fwd({function}, {arguments})")
            return True
        parent = self._tree.parent(node)
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and node in parent.decorator_list:
            if parent.name == "backward":
                self._edits.replace(node, f'{self._torch}.amp.custom_bwd(device_type="cuda")')
            else:
                self._edits.replace(node, f"{self._torch}.amp.custom_fwd({arguments})")
            return True
        raise Unsure(node, "the decorator is passed as a value")

    def _state(self, node: ast.Name | ast.Attribute, what: str) -> bool:
        """Rewrite `amp._amp_state.loss_scalers[0].loss_scale()` and assignments of its `_loss_scale`."""
        tree = self._tree
        subscript = tree.parent(node)
        attribute = tree.parent(subscript)
        is_scaler = what == "_amp_state.loss_scalers" and isinstance(subscript, ast.Subscript)
        if not self._core and is_scaler:
            return False
        if is_scaler and isinstance(attribute, ast.Attribute):
            scalers = plan_scalers(tree, collect_sites(tree, self._names), "scaler")
            if len(scalers.names) == 1 and scalers.home != "optimizer":
                scaler = scalers.reference(None)
                call = tree.parent(attribute)
                if attribute.attr == "loss_scale" and isinstance(call, ast.Call):
                    self._edits.replace(call, f"{scaler}.get_scale()")
                    return True
                if attribute.attr == "_loss_scale" and isinstance(attribute.ctx, ast.Load):
                    self._edits.replace(attribute, f"{scaler}.get_scale()")
                    return True
                statement = tree.statement(node)
                if isinstance(statement, ast.Assign) and statement.targets == [attribute]:
                    value = tree.source(statement.value)
                    self._edits.replace_statement(
                        statement, [f'{scaler}.load_state_dict({{**{scaler}.state_dict(), "scale": {value}}})']
                    )
                    return True
        raise Unsure(node, f"amp.{what} is internal to Apex, with no equivalent")

    def _to_python_float(self, node: ast.Name | ast.Attribute) -> bool:
        call = self._call(node)
        if call is None or len(call.args) != 1 or call.keywords:
            raise Unsure(node, "to_python_float is passed as a value; use t.item() instead")
        text = self._tree.source(call.args[0])
        plain = isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        self._edits.replace(call, f"{text}.item()" if plain else f"({text}).item()")
        return True


def _value_of(statement: ast.stmt, node: ast.AST) -> ast.expr | None:
    """Return what an assignment binds to a name, also in a tuple of names; None if that cannot be seen."""
    if not isinstance(statement, ast.Assign):
        return None
    target, value = statement.targets[0], statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return next((each for name, each in zip(target.elts, value.elts, strict=True) if name is node), None)
    return value
