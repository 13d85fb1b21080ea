"""What every rewrite of the cases keeps: edits have a way to Apex, and nothing unknown is left on the way to a step."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from ampcompare.source.index import Index, ProjectFunction, functions_of_callee
from ampcompare.source.migrate.rewrite import Migration, migrate_text
from ampcompare.source.module import Module, Scope
from tests.source.migrate.test_known_steps import LEFT

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
TEXTS = {path.stem: path.read_text(encoding="utf-8").partition(">>>> after\n")[0] for path in CASES}
TEXTS |= {name: f"import torch\n{text}" for name, (text, _, _) in LEFT.items()}
migrated = cache(migrate_text)


def _calls(text: str) -> Counter[str]:
    return Counter(ast.unparse(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))


def _is_of_apex(module: Module, node: ast.AST) -> bool:
    return (module.resolve(node) or "").partition(".")[0] in ("apex", "amp_C", "apex_C")


def _linked_scopes(module: Module) -> set[Scope]:
    """Return the functions that use Apex, and those that calls of the index link with them, either way."""
    index, links = Index(module), {scope: set[Scope]() for scope in module.scopes}
    for call in module.calls:
        scope = module.scope_of[call]
        for value in (call.func, *call.args, *(each.value for each in call.keywords)):
            for each in functions_of_callee(index.function_of_expression(value, scope)):
                if isinstance(each, ProjectFunction):
                    links[scope].add(each.scope)
                    links[each.scope].add(scope)
    found = {module.scope_of[statement] for statement, _, full in module.imports if full.startswith("apex")}
    found |= {
        module.scope_of[node]
        for node in module.nodes
        if isinstance(node, (ast.Name, ast.Attribute)) and _is_of_apex(module, node)
    }
    waiting = list(found)
    while waiting:
        new = links[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def unlinked_edits(before: str, after: str) -> list[str]:
    """Return the calls that an edit has changed though nothing of the index links them with Apex."""
    gone, module = _calls(before) - _calls(after), Module(before)
    linked = _linked_scopes(module)
    found = []
    for call in module.calls:
        inner = (each for each in ast.walk(call) if isinstance(each, ast.Call) and each is not call)
        if ast.unparse(call) not in gone or any(ast.unparse(each) in gone for each in inner):
            continue  # unchanged, or changed by what is in it
        if not _is_of_apex(module, call.func) and module.scope_of[call] not in linked:
            found.append(f"{call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_no_call_is_edited_without_a_way_of_the_index_to_apex(name: str) -> None:
    assert not unlinked_edits(TEXTS[name], migrated(TEXTS[name]).text)


def test_an_edit_without_such_a_way_is_seen() -> None:
    before = (
        "import torch\nfrom apex import amp\n\n\ndef other(o):\n    o.step()\n\n\namp.initialize(model)\n"
    )
    assert unlinked_edits(before, before.replace("o.step()", "scaler.step(o)")) == ["6: o.step()"]


# What nobody knows, or what reads gradients, put behind each block of `scale_loss`; `{0}` is its optimizer.
UNKNOWN = ("hooks.after({0})", "hooks.run(things=[{0}])", "for each in ({0},): hooks.after(each)")
READS = (
    "hooks.after({0}.param_groups)",
    "hooks.clip_gradients()",
    "hooks.log_gradients()",
    'hooks.after([p.grad for group in {0}.param_groups for p in group["params"]])',
    'for weight in {0}.param_groups[0]["params"]: weight.grad.clamp_(-1, 1)',
)


def _put_behind_blocks(text: str, statement: str) -> str:
    """Return a text with a statement behind each block of `scale_loss`; "" where it has none of its own lines."""
    lines, found = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.With):
            for call in (item.context_expr for item in node.items):
                if (
                    isinstance(call, ast.Call)
                    and ast.unparse(call.func).endswith("scale_loss")
                    and len(call.args) > 1
                ):
                    given = call.args[1]
                    first = (
                        given.elts[0] if isinstance(given, (ast.List, ast.Tuple)) and given.elts else given
                    )
                    found.append((node, ast.unparse(first)))
    for node, optimizer in sorted(found, key=lambda each: -each[0].lineno):
        indent = lines[node.lineno - 1][: node.col_offset]
        lines.insert(node.end_lineno or node.lineno, indent + statement.format(optimizer))
    return "import hooks\n" + "\n".join(lines) + "\n" if found else ""


def _changed(statement: str) -> Iterator[tuple[str, str, Migration]]:
    """Yield each text that is rewritten, with a statement behind its blocks, and what becomes of that."""
    for name, text in TEXTS.items():
        before = migrated(text)
        if before.whole and "scaler" in before.text and ".step(" in before.text:
            changed = _put_behind_blocks(text, statement)
            if changed:
                yield name, changed, migrate_text(changed)


def _is_unscaled(text: str, statement: str) -> bool:
    """Return whether gradients are unscaled between each statement and the backward pass above it."""
    mark = statement.partition("{0}")[0]
    parts = text.split(mark)
    behind = [each.rpartition(".backward(")[2] for each in parts[:-1]]
    return bool(behind) and all("unscale_(" in each or "_foreach_div_(" in each for each in behind)


@pytest.mark.parametrize(
    "statement",
    [pytest.param(each, marks=() if each == UNKNOWN[0] else pytest.mark.slow) for each in UNKNOWN],
)
def test_what_nobody_knows_before_a_step_keeps_a_file_from_being_rewritten(statement: str) -> None:
    found = list(_changed(statement))
    assert len(found) > 40
    assert [name for name, _, migration in found if migration.whole] == []


@pytest.mark.parametrize(
    "statement", [pytest.param(each, marks=() if each == READS[0] else pytest.mark.slow) for each in READS]
)
def test_what_reads_gradients_before_a_step_gets_them_unscaled_or_the_file_is_left(statement: str) -> None:
    found = list(_changed(statement))
    rewritten = [(name, migration.text) for name, _, migration in found if migration.whole]
    assert len(rewritten) > 15
    assert [name for name, text in rewritten if not _is_unscaled(text, statement)] == []


def _without(text: str, kind: Callable[[ast.AST], bool]) -> str:
    """Return a text without the statements of one kind."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and kind(node.value):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = lines[number][: node.col_offset] + "pass"
    return "\n".join(lines) + "\n"


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".step")


def test_a_loss_whose_step_nobody_knows_is_not_scaled() -> None:
    """Without any step in the file, a rewritten block would leave gradients scaled."""
    for name, text in TEXTS.items():
        before = migrated(text)
        if before.whole and ".step(" in before.text and "scaler.scale(" in before.text:
            stepless = _without(
                text, lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".step")
            )
            if ".step(" not in stepless and "scale_loss(" in stepless:
                assert migrate_text(stepless).text.count("scaler.scale(") == stepless.count(
                    "scaler.scale("
                ), name
