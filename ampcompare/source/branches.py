"""Under which conditions a place of a module runs, and whether two places can run together."""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from ampcompare.source.module import Module
from ampcompare.source.syntax import dotted_name

# What is known of expressions, by their text.
Facts = Mapping[str, object]


def branches_around(
    module: Module, node: ast.AST, within: ast.AST | None = None
) -> Iterator[tuple[ast.If, bool]]:
    """Yield the `if` statements around a node, the innermost first, and whether it is in the branch of the test."""
    for below, outer in pairwise([node, *module.ancestors(node)]):
        if outer is within:
            break
        if isinstance(outer, ast.If) and below is not outer.test:
            yield outer, any(each is below for each in outer.body)


def conditions_around(module: Module, node: ast.AST, within: ast.AST | None = None) -> set[str]:
    """Return the tests, as text, under which a node runs in each round of a loop, or in its function."""
    return {
        ast.unparse(outer.test) if holds else f"not ({ast.unparse(outer.test)})"
        for outer, holds in branches_around(module, node, within)
    }


def known_conditions_at(module: Module, node: ast.AST) -> Facts:
    """Return what is known where a node is reached, by the `if` statements around it."""
    facts: Facts = {}
    for outer, holds in reversed(list(branches_around(module, node))):
        facts = facts_with_conditions_of_test(facts, outer.test, holds)
    return facts


def never_run_together(module: Module, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two places never run together: a test of one is the opposite of a test of the other."""
    return conditions_contradict(known_conditions_at(module, one), known_conditions_at(module, other))


def conditions_contradict(one: Facts, other: Facts) -> bool:
    """Return whether two sets of conditions cannot both hold."""
    return any(key in other and other[key] != value for key, value in one.items())


@functools.lru_cache(maxsize=4096)
def _text_of_expression(node: ast.expr) -> str:
    """Return the text of an expression, which is asked for once for each way that leads there."""
    return ast.unparse(node)


def conditions_of_test(test: ast.expr, holds: bool) -> dict[str, object]:
    """Return what is known where a test holds, or where it does not.

    `x is not None` counts as `x`; `a == "b"` contradicts `a == "c"`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions_of_test(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        if isinstance(test.op, ast.And) == holds:
            return _merge_facts(conditions_of_test(value, holds) for value in test.values) | {
                _text_of_expression(test): holds
            }
        return {_text_of_expression(test): holds}
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        operator, right = test.ops[0], test.comparators[0]
        is_equal = isinstance(operator, (ast.Eq, ast.Is))
        if is_equal or isinstance(operator, (ast.NotEq, ast.IsNot)):
            holds = holds == is_equal
            left = _text_of_expression(test.left)
            known: dict[str, object]
            if isinstance(right, ast.Constant):
                if right.value is None or isinstance(right.value, bool):
                    return {left: holds == bool(right.value)}
                known = {f"{left} == {right.value!r}": holds}
                if holds:
                    known[f"{left} =="] = right.value
                return known
            known = {f"{left} == {_text_of_expression(right)}": holds}
            if (
                holds and (dotted_name(right) or "").rpartition(".")[2].isupper()
            ):  # a constant, or a member of an enumeration
                known[f"{left} =="] = _text_of_expression(right)
            return known
    return {_text_of_expression(test): holds}


def facts_with_conditions_of_test(facts: Facts, test: ast.expr, holds: bool) -> Facts:
    """Return facts together with what a test adds to them.

    Where `a and b` does not hold but `b` does, `a` does not; where `a or b` holds but `b` does not, `a` does.
    """
    known = {**facts, **conditions_of_test(test, holds)}
    while True:
        found = _conditions_from_last_undecided_operand(known)
        if not found:
            return known
        known |= found


def _conditions_from_last_undecided_operand(known_facts: Facts) -> dict[str, object]:
    """Return what follows for the only undecided part of a joint condition."""
    for text, value in known_facts.items():
        test = _parse_joint_condition(text) if isinstance(value, bool) else None
        if test is None or isinstance(test.op, ast.And) == value:
            continue
        undecided = [each for each in test.values if not _is_outcome_known(known_facts, each, not value)]
        if len(undecided) == 1:
            found = conditions_of_test(undecided[0], bool(value))
            if any(key not in known_facts for key in found):
                return {key: one for key, one in found.items() if key not in known_facts}
    return {}


def _is_outcome_known(known_facts: Facts, test: ast.expr, holds: bool) -> bool:
    return all(
        key in known_facts and known_facts[key] == value
        for key, value in conditions_of_test(test, holds).items()
    )


def _parse_joint_condition(text: str) -> ast.BoolOp | None:
    test = expression_of_condition(text) if " and " in text or " or " in text else None
    return test if isinstance(test, ast.BoolOp) else None


@functools.cache
def expression_of_condition(key: str) -> ast.expr | None:
    """Return the expression whose text a fact has; None for a key that stands for none, such as that of a `try`."""
    try:
        return ast.parse(key, mode="eval").body
    except SyntaxError:
        return None


def _merge_facts(parts: Iterable[dict[str, object]]) -> dict[str, object]:
    return {key: value for part in parts for key, value in part.items()}
