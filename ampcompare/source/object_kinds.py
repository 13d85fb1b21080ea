"""What an object of a training script is, by what is assigned to it, or else by its name."""

import ast
import re

from ampcompare.source.index import Index, ProjectFunction, own_nodes_of_scope
from ampcompare.source.module import MAX_ALIASES, Module, Scope
from ampcompare.source.syntax import FunctionNode, arguments, dotted_name
from ampcompare.source.torch_methods import PARAMETER_LISTS, receiver_of

# Classes with another name, such as a scaler of Paddle or of the script itself, may work otherwise.
SCALERS = ("GradScaler", "ShardedGradScaler", "get_grad_scaler", "grad_scaler")
# In lower case, with underscores between words: `opt`, `g_opt`, `optimizers_d`, `optimg`.
OPTIMIZER = re.compile(
    r"^(?:opt|optim|optimi[sz]er)s?[a-z]?\d*(?:_[a-z0-9]{1,12})*$|_(?:opt|optim|optimi[sz]er)s?\d*$"
)
OF_OPTIMIZER = re.compile(r"_(?:level|name|type|kind|class|cls|args?|kwargs|params?|config|cfg|lr)s?$")
WITH_OPTIM = re.compile(r"(?:^|_)optim\w*$")
SCHEDULER = re.compile(r"sched|^lr_|warmup|_lr$")
# Functions that give what the last of their arguments holds, and those that join what all hold.
SAME_ELEMENTS = ("list", "tuple", "iter", "set", "sorted", "reversed", "filter")
JOINED = ("itertools.chain",)
OTHER_FRAMEWORKS = ("paddle", "mindspore", "oneflow", "tensorflow", "mxnet", "jittor", "sklearn")


def is_optimizer_name(name: str) -> bool:
    """Return whether an object is an optimizer by its name, such as `opt`, `optimizerG` and `gen_optim`.

    For what is said of an object, as by `lint`: a setting, such as `opt_level` and `OPTIM`, is none.

    Args:
        name: the last part of a dotted name.
    """
    words = name.strip("_")
    if not words[:1].isupper():
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", words)
    words = words.lower()
    return OPTIMIZER.search(words) is not None and OF_OPTIMIZER.search(words) is None and not name.isupper()


def may_be_optimizer_name(name: str) -> bool:
    """Return whether an object may be or hold an optimizer by its name, as `optim_wrapper` and `optimizer_config` may.

    For what must be missed nowhere, as by `migrate`: each name of `is_optimizer_name` is one of these.

    Args:
        name: the last part of a dotted name.
    """
    return is_optimizer_name(name) or WITH_OPTIM.search(name) is not None


class ObjectKinds:
    """The kinds of the objects of one module."""

    def __init__(self, module: Module, index: Index) -> None:
        self._module = module
        self._index = index
        self._known: dict[tuple[str, Scope], str] = {}
        self._models: dict[tuple[str, Scope], ast.expr | None] = {}

    def kind_of_object(self, node: ast.expr, scope: Scope) -> str:
        """Return `scaler`, `optimizer`, `scheduler`, or an empty text."""
        base = node.value if isinstance(node, ast.Subscript) else node
        text = dotted_name(base)
        if text is None:
            return ""
        key = (text, scope)
        if key not in self._known:
            self._known[key] = self._kind_of_named_object(text, scope)
        return self._known[key]

    def is_new_object(self, kind: str, node: ast.expr, scope: Scope) -> bool:
        """Return whether an expression builds a `scaler`, or an `optimizer` of torch or Apex."""
        return isinstance(node, ast.Call) and self._kind_of_object_made_by(node, scope) == kind

    def kind_of_method_owner(self, node: ast.expr, method: str, scope: Scope) -> str:
        """Return the kind of the object whose method an expression calls; empty for any other expression."""
        owner = receiver_of(node, (method,))
        return "" if owner is None else self.kind_of_object(owner, scope)

    def model_of_parameters(self, node: ast.expr, scope: Scope, depth: int = 0) -> ast.expr | None:
        """Return the model whose `parameters()` an expression holds: a list or generator of them, or a name of one.

        None for anything else, and for a name that is assigned several times. Of joined lists the first one counts.
        """
        if depth > MAX_ALIASES:
            return None
        if (text := dotted_name(node)) is not None:
            key = (text, scope)
            if key not in self._models:
                self._models[key] = None  # for a name that is assigned to itself
                values = self._module.values_of(text, scope) or []
                if len(values) == 1 and not isinstance(values[0], ast.Starred):
                    home = self._module.scope_of.get(values[0], scope)
                    self._models[key] = self.model_of_parameters(values[0], home, depth + 1)
            return self._models[key]
        if isinstance(node, ast.Call):
            return self._model_of_parameters_call(node, scope, depth)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            targets = {each.id for each in ast.walk(node.generators[0].target) if isinstance(each, ast.Name)}
            is_element = isinstance(node.elt, ast.Name) and node.elt.id in targets
            return self.model_of_parameters(node.generators[0].iter, scope, depth + 1) if is_element else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.model_of_parameters(node.left, scope, depth + 1)
        if isinstance(node, (ast.List, ast.Tuple)) and node.elts and isinstance(node.elts[0], ast.Starred):
            return self.model_of_parameters(node.elts[0].value, scope, depth + 1)
        return None

    def _model_of_parameters_call(self, call: ast.Call, scope: Scope, depth: int) -> ast.expr | None:
        """Return the model whose parameters a call returns: `model.parameters()`, a filter of them, or a function's."""
        if (model := receiver_of(call, PARAMETER_LISTS)) is not None:
            return model
        name = self._module.resolve(call.func, scope) or dotted_name(call.func) or ""
        if name in SAME_ELEMENTS and call.args:
            return self.model_of_parameters(call.args[-1], scope, depth + 1)
        if name in JOINED and call.args:
            return self.model_of_parameters(call.args[0], scope, depth + 1)
        # A function of this module that returns them.
        found = self._index.callee(call, self._module.scope_of.get(call, scope))
        if not isinstance(found, ProjectFunction) or found.module is not self._module:
            return None
        inside = found.scope
        if not isinstance(inside.node, FunctionNode):
            return None
        returned = [
            each.value
            for each in own_nodes_of_scope(inside)
            if isinstance(each, ast.Return) and each.value is not None
        ]
        model = self.model_of_parameters(returned[0], inside, depth + 1) if len(returned) == 1 else None
        if isinstance(model, ast.Name) and model.id in inside.parameters:
            return arguments(call, self._module.positional_parameters_without_self(inside.node)).get(model.id)
        return model

    def _kind_of_named_object(self, text: str, scope: Scope) -> str:
        """Return the kind of the object that a name holds, by what is assigned to it, or by the name itself."""
        last = text.rpartition(".")[2].strip("_").lower()
        values = self._module.values_of(text, scope) or []
        values = [value for value in values if not isinstance(value, (ast.Constant, ast.Starred))]
        made = {self._kind_of_object_made_by(value, scope) for value in values if isinstance(value, ast.Call)}
        for kind in ("scaler", "scheduler", "optimizer"):
            if kind in made:
                return kind
        if SCHEDULER.search(last):
            return "scheduler"
        if "scaler" in last:
            # A scaler of another kind, such as StandardScaler or timm's NativeScaler, works otherwise.
            return "" if made else "scaler"
        return "optimizer" if is_optimizer_name(text.rpartition(".")[2]) else ""

    def _kind_of_object_made_by(self, call: ast.Call, scope: Scope) -> str:
        """Return the kind of the object that a call makes; `unknown` or `other` where it is none of them."""
        name = self._module.resolve(call.func, scope) or dotted_name(call.func) or ""
        if name.startswith(OTHER_FRAMEWORKS):
            return "other"
        last = name.rpartition(".")[2]
        if last in SCALERS:
            return "scaler"
        if "lr_scheduler" in name or SCHEDULER.search(last.lower()) or last.endswith("LR"):
            return "scheduler"
        if name.startswith(("torch.optim.", "apex.optimizers.")) and ".swa_utils." not in name:
            return "optimizer"
        return "unknown"
