"""No function of the package takes more decisions than a reader can follow."""

import ast
import re

import pytest

from tests.modules import modules_of_package, parsed, statements

# One process of pytest reads all files, instead of each.
pytestmark = pytest.mark.xdist_group("architecture")
MAX_COMPLEXITY = 25
# Each decision has one of these words, so that most functions need no count.
WORDS = re.compile(r"\b(?:if|for|while|and|or|except|else|elif|case|assert)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def complexity(function: Function) -> int:
    """Return the cyclomatic complexity of a function as radon counts it; functions and classes inside count apart."""
    count = 1
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, (ast.If, ast.IfExp, ast.Assert)):
            count += 1
        elif isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            count += 1 + bool(node.orelse)
        elif isinstance(node, ast.Try):
            count += len(node.handlers) + bool(node.orelse)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.Match):
            last = node.cases[-1].pattern
            count += len(node.cases) - (isinstance(last, ast.MatchAs) and last.pattern is None)
        if not isinstance(node, ast.Assert):  # whose condition is no decision of the program
            waiting.extend(ast.iter_child_nodes(node))
    return count


def complex_functions(texts: dict[str, str], limit: int = MAX_COMPLEXITY) -> dict[str, int]:
    """Return the complexity of the functions of modules that is above a limit, by module and line."""
    found = {}
    for name, text in texts.items():
        lines = text.splitlines()
        for node in statements(parsed(text).body):
            if isinstance(node, Function):
                own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if len(WORDS.findall(own)) >= limit and (count := complexity(node)) > limit:
                    found[f"{name}:{node.lineno} {node.name}"] = count
    return found


def test_no_function_is_above_the_limit() -> None:
    """Each function of the package has a cyclomatic complexity of 25 at most."""
    found = complex_functions({name: path.read_text("utf-8") for name, path in modules_of_package().items()})
    assert not found


def test_each_decision_counts() -> None:
    """A function with each kind of decision has the complexity that radon 6 gives it, and those inside count apart."""
    text = """
class Kept:
    def outer(self, rows):
        assert rows or None
        found = [row for row in rows if row if row.ok and row.left]
        for row in rows:
            found.append(1 if row else 2)
        else:
            found.clear()
        while found and rows or self:
            try:
                found.pop()
            except KeyError:
                pass
            except (OSError, ValueError):
                pass
            else:
                break
        match found:
            case []:
                return lambda: 1 if rows else 2
            case [1, *_]:
                return 2
            case _:
                pass

        def inner():
            return rows if found else None

        return inner if found else None
"""
    assert complex_functions({"module": text}, limit=1) == {"module:3 outer": 19, "module:27 inner": 2}
