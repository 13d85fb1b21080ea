"""How many steps a script is going to make, as the loops around its first step say."""

import ast
import linecache
import math
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ampcompare.base.location import LIGHTNING, is_installed_file, is_users_or_installed_file

# Calls that give as many items as their first argument has.
PASSING = {
    "enumerate",
    "iter",
    "list",
    "tuple",
    "sorted",
    "reversed",
    "tqdm",
    "track",
    "progress_bar",
    "auto",
}
RANGES = {"range", "trange"}
OPERATIONS = {
    ast.Add: int.__add__,
    ast.Sub: int.__sub__,
    ast.Mult: int.__mul__,
    ast.FloorDiv: int.__floordiv__,
}


class _UnknownNumber(Exception):
    """Nothing but running the script would tell."""


def find_num_planned_steps() -> int | None:
    """Return how often the line of the script that has led here will run; None where that cannot be seen.

    A trainer of transformers or Lightning is asked for its own number.
    """
    loops = find_repetitions_of_loops_around()
    return _find_steps_of_trainer() if loops is None else math.ceil(math.prod(loops))


def _find_steps_of_trainer() -> int | None:
    """Return how many steps the trainer that has led here has planned; None without one that says so."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        module = str(frame.f_globals.get("__name__", ""))
        if module == "transformers.trainer":
            planned: Any = getattr(getattr(owner, "state", None), "max_steps", None)
        elif module.startswith(LIGHTNING):
            trainer = getattr(owner, "trainer", owner)
            planned = getattr(trainer, "estimated_stepping_batches", None)
        else:
            planned = None
        if isinstance(planned, int | float) and 0 < planned < math.inf:
            return math.ceil(planned)
        frame = frame.f_back
    return None


def find_repetitions_of_loops_around() -> list[float] | None:
    """Return how often each `for` loop around the line of the script that has led here runs, innermost first.

    That is what the loops run over, in all functions of the script; None where it cannot be seen. A condition such as
    `i % 4 == 0` divides the loop around it. Nothing of the script is called except the lengths of its objects.
    """
    frame: FrameType | None = sys._getframe(1)
    loops, share = [], 1.0
    try:
        while frame is not None:
            if is_installed_file(frame.f_code.co_filename):
                share *= _steps_per_call_of_library(frame)
            elif is_users_or_installed_file(frame.f_code.co_filename):
                for node in reversed([*_statements_deciding_repetition(frame)]):
                    times = _body_runs_per_statement(node, frame)
                    if isinstance(node, ast.If):
                        share *= times
                    else:
                        loops.append(times * share)
                        share = 1.0
                if frame.f_code.co_name == "<module>":
                    break
            frame = frame.f_back
    except _UnknownNumber:
        return None
    return loops


def _steps_per_call_of_library(frame: FrameType) -> float:
    """Return how many steps a function of a library makes for each call, such as the step of Accelerate's optimizer.

    Raises:
        _UnknownNumber: a loop is around the current line, as in a trainer.
    """
    share = 1.0
    for node in _statements_deciding_repetition(frame):
        if not isinstance(node, ast.If):
            raise _UnknownNumber
        for one in ast.walk(node.test):
            if (
                isinstance(one, ast.Attribute) and one.attr == "sync_gradients"
            ):  # Accelerate's, where they add up
                passes = ast.Attribute(one.value, "num_steps", ast.Load())
                share /= max(1, _evaluate_number(passes, frame))
    return share


def _statements_deciding_repetition(frame: FrameType) -> Iterator[ast.AST]:
    """Yield the statements around the current line of a frame that decide how often it runs."""
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        raise _UnknownNumber from None
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.While | ast.If):
            body = node.body
            inside = body[0].lineno <= line <= (body[-1].end_lineno or 0)
            if inside and (node.lineno > first or frame.f_code.co_name == "<module>"):
                yield node


def _body_runs_per_statement(node: ast.AST, frame: FrameType) -> float:
    """Return how often the body of a statement runs for each time that the statement does."""
    if isinstance(node, ast.For):
        return _length_of_iterable(node.iter, frame)
    if isinstance(node, ast.If):  # every so many iterations, as where gradients are accumulated
        for one in ast.walk(node.test):
            if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod):
                return 1 / max(1, _evaluate_number(one.right, frame))
        return 1.0
    raise _UnknownNumber


def _length_of_iterable(node: ast.expr, frame: FrameType) -> int:
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name in RANGES:
            return len(range(*(_evaluate_number(argument, frame) for argument in node.args)))
        if name in PASSING:
            return _length_of_iterable(node.args[0], frame)
        if name == "zip":
            return min(_length_of_iterable(argument, frame) for argument in node.args)
    if isinstance(node, ast.List | ast.Tuple):
        return len(node.elts)
    try:
        return len(_evaluate_name_or_constant(node, frame))
    except TypeError:  # of an iterator
        raise _UnknownNumber from None


def _evaluate_number(node: ast.expr, frame: FrameType) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        try:
            return OPERATIONS[type(node.op)](
                _evaluate_number(node.left, frame), _evaluate_number(node.right, frame)
            )
        except ZeroDivisionError:
            raise _UnknownNumber from None
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("int", "len")
        and node.args
    ):
        return (
            _evaluate_number(node.args[0], frame)
            if node.func.id == "int"
            else _length_of_iterable(node.args[0], frame)
        )
    value = _evaluate_name_or_constant(node, frame)
    if not isinstance(value, int):
        raise _UnknownNumber
    return value


def _evaluate_name_or_constant(node: ast.expr, frame: FrameType) -> Any:
    """Return what a name, an attribute or a constant stands for."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        try:
            return getattr(_evaluate_name_or_constant(node.value, frame), node.attr)
        except AttributeError:
            raise _UnknownNumber from None
    if isinstance(node, ast.Subscript):
        try:
            return _evaluate_name_or_constant(node.value, frame)[
                _evaluate_name_or_constant(node.slice, frame)
            ]
        except (KeyError, IndexError, TypeError):
            raise _UnknownNumber from None
    raise _UnknownNumber
