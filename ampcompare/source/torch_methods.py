"""What methods and attributes of torch's objects are taken for, by their last names.

The index (`index.py`) says which function a call names, as far as the text of a project tells. What a loader yields, a
function gets or a factory of another package returns is a tensor, a model or an optimizer whose class no line names: of
`x.backward()` only the name of the method is left. Such names stand here, once each, with what they are taken for. Who
can ask the index asks it first: a function of the project does what its own lines say, whatever its name is.
"""

import ast
from collections.abc import Container
from typing import TypeGuard

# Of models and tensors: give the object back, on another device, in another type or mode.
GIVING_BACK = frozenset({
    "cuda", "to", "cpu", "float", "half", "double", "bfloat16", "train", "eval", "type", "share_memory",
    "requires_grad_",
})  # fmt: skip
# Those of them that may stand between what makes a model or an optimizer and its name, where all of it trains in fp32.
MOVING = frozenset({"cuda", "to"})
MOVING_IN_FP32 = MOVING | {"train", "float"}
# Of models: the parameters, and all that a model is made of.
PARAMETER_LISTS = ("parameters", "named_parameters")
PARTS = (*PARAMETER_LISTS, "modules", "named_modules", "children", "named_children", "buffers")
# Of containers, and of tensors in place: add to the object.
ADDING = frozenset({"append", "add", "insert", "extend", "update", "setdefault"})
WRITING = frozenset({"add_", "copy_"})
LIMITING = ("clamp", "clip", "clamp_min", "clamp_max")  # to a size; each has a form in place
# Of tensors, and functions of torch: return values and where they are.
WITH_INDICES = frozenset({"max", "min", "topk", "sort", "median", "mode", "kthvalue", "cummax", "cummin"})
# Of optimizers and models, in whatever library: clear the gradients.
CLEARING = ("zero_grad", "clear_grad", "clear_gradients", "reset_grad")


def receiver_of(node: ast.AST | None, method_names: Container[str]) -> ast.expr | None:
    """Return the object whose method, of one of some names, an expression calls; None for any other expression."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in method_names:
        return node.func.value
    return None


def is_gradient(node: ast.AST) -> TypeGuard[ast.Attribute]:
    """Return whether an expression is the gradient of something, as `p.grad` is."""
    return isinstance(node, ast.Attribute) and node.attr == "grad"
