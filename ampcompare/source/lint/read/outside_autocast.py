"""Put the statement of a cross entropy of probabilities outside of autocast, in fp32, where nothing else changes."""

import ast
from collections.abc import Collection, Iterator

from ampcompare.source.edits import Edit, Edits
from ampcompare.source.module import Module
from ampcompare.source.syntax import argument, last_name

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
# What runs later than its statement, binds a name that the hoisted input may read, or leaves the block.
NOT_HERE = (ast.Lambda, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
# Methods and functions of which autocast casts none: what they return is the same outside of it.
SHAPES = frozenset({
    "view", "view_as", "reshape", "reshape_as", "squeeze", "unsqueeze", "flatten", "detach", "contiguous", "clone",
    "expand", "expand_as", "permute", "transpose", "t", "clamp", "float",
})  # fmt: skip
METHODS = SHAPES | {
    "sigmoid", "cuda", "cpu", "to", "type", "type_as", "half", "double", "long", "int", "bool", "size", "dim", "numel",
    "item", "mean", "append", "new_ones", "new_zeros", "new_full", "new_tensor", "fill_", "resize_",
}  # fmt: skip
SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid")
VARIABLE = "torch.autograd.Variable"
FUNCTIONS = frozenset({
    *SIGMOIDS, VARIABLE, "torch.ones", "torch.zeros", "torch.full", "torch.ones_like", "torch.zeros_like",
    "torch.full_like", "torch.tensor", "torch.clamp", "torch.squeeze", "torch.unsqueeze", "torch.flatten",
    "torch.reshape",
})  # fmt: skip
BUILT_IN = ("float", "int", "len")


def edits_moving_outside_autocast(
    module: Module, statement: ast.stmt, losses: Collection[ast.Call], autocast: ast.Call
) -> tuple[Edit, ...]:
    """Return the edits that put a statement outside of autocast, with the inputs of its losses in fp32.

    What else the statement computes must be of the same type there; what goes into its only loss may be computed above.

    Args:
        module: of the statement.
        statement: to be moved.
        losses: all cross entropies in the statement.
        autocast: the call that switches autocast on.

    Returns:
        No edits where that is not sure.
    """
    full = module.resolve(autocast.func)
    inputs = _inputs_of_losses(losses)
    value = getattr(statement, "value", None)
    if (
        inputs is None
        or value is None
        or not isinstance(statement, SIMPLE)
        or not _is_computed_where_it_stands(value)
    ):
        return ()
    if module.resolve(autocast.func, module.scope_of.get(value)) != full:
        return ()
    above = {}
    if list(losses) == [value] and not _is_unaffected_by_autocast(module, statement, losses, ()):
        above = _names_for_inputs_computed_above(module, losses, inputs[0])
    if not _is_unaffected_by_autocast(module, statement, losses, above):
        return ()
    edits = Edits(module)
    edits.insert_above(
        statement,
        [f"{name} = {_text_in_parentheses_if_needed(module.source(one))}" for one, name in above.items()],
    )
    device = "" if full == "torch.cuda.amp.autocast" else '"cuda", '
    edits.put_under_header(
        statement, statement, f"with {module.source(autocast.func)}({device}enabled=False):"
    )
    for one in (each for pair in inputs for each in pair):
        if one in above:
            edits.replace(one, f"{above[one]}.float()")
        else:
            _cast_input_to_fp32(module, edits, one)
    return () if edits.shared else edits.sorted_edits()


def _inputs_of_losses(losses: Collection[ast.Call]) -> list[tuple[ast.expr, ast.expr]] | None:
    """Return input and target of each loss; None where one is not written there."""
    found = []
    for loss in losses:
        given, target = argument(loss, "input", 0), argument(loss, "target", 1)
        if given is None or target is None or any(isinstance(one, ast.Starred) for one in loss.args):
            return None
        found.append((given, target))
    return found


def _is_computed_where_it_stands(value: ast.expr) -> bool:
    """Return whether all of an expression is computed where it stands, and binds no name."""
    return not any(isinstance(one, NOT_HERE) for one in ast.walk(value))


def _names_for_inputs_computed_above(
    module: Module, losses: Collection[ast.Call], inputs: tuple[ast.expr, ast.expr]
) -> dict[ast.expr, str]:
    """Return those of the inputs of the only loss that autocast must compute, above the statement: a name for each."""
    pairs = zip(inputs, ("loss_input", "loss_target"), strict=True)
    return {
        one: _unused_name(module, word)
        for one, word in pairs
        if not _is_unaffected_by_autocast(module, one, losses, ())
    }


def _text_in_parentheses_if_needed(text: str) -> str:
    return f"({text})" if "\n" in text else text


def _is_unaffected_by_autocast(
    module: Module, part: ast.AST, losses: Collection[ast.Call], kept_apart: Collection[ast.expr]
) -> bool:
    """Return whether a part of a statement, without losses and what is kept apart, gives the same out of autocast."""
    for node in _nodes_without_losses(part, losses, kept_apart):
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            is_reciprocal = isinstance(node.op, ast.Div) and isinstance(
                getattr(node, "left", None), ast.Constant
            )
            if isinstance(node.op, (ast.MatMult, ast.Pow)) or is_reciprocal:
                return False
        elif (
            isinstance(node, ast.Call)
            and node not in losses
            and not _is_uncast_by_autocast(module, node, losses)
        ):
            return False
    return True


def _nodes_without_losses(
    node: ast.AST, losses: Collection[ast.Call], kept_apart: Collection[ast.expr]
) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without what is kept apart, and without what names a loss."""
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in kept_apart and not (node in losses and child is getattr(node, "func", None)):
            yield from _nodes_without_losses(child, losses, kept_apart)


def _is_uncast_by_autocast(module: Module, call: ast.Call, losses: Collection[ast.Call]) -> bool:
    full = module.resolve(call.func)
    if full is not None:
        return full in FUNCTIONS
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in METHODS or (call.func.attr == "sum" and call.func.value in losses)
    return isinstance(call.func, ast.Name) and call.func.id in BUILT_IN


def _cast_input_to_fp32(module: Module, edits: Edits, node: ast.expr) -> None:
    """Make an input of a loss fp32 before it is reshaped, or goes through a sigmoid."""
    is_fp32 = through_sigmoid = False
    while isinstance(node, ast.Call):
        full = module.resolve(node.func)
        if full in (*SIGMOIDS, VARIABLE) and len(node.args) == 1:
            through_sigmoid |= full in SIGMOIDS
            node = node.args[0]
        elif full is None and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES | {"sigmoid"}:
            is_fp32 |= node.func.attr == "float" and not through_sigmoid
            through_sigmoid |= node.func.attr == "sigmoid"
            node = node.func.value
        else:
            break
    if is_fp32 and not through_sigmoid:
        return
    start, end = module.span(node)
    if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        edits.replace_span(end, end, ".float()")
    elif not isinstance(node, ast.Compare) or not is_fp32:
        edits.replace(node, f"({module.text[start:end]}).float()")


def _unused_name(module: Module, word: str) -> str:
    """Return a name that the module does not use."""
    taken = {last_name(node) for node in module.nodes} | {getattr(node, "arg", None) for node in module.nodes}
    number, name = 1, word
    while name in taken:
        number += 1
        name = f"{word}_{number}"
    return name
