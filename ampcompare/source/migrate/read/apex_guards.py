"""Questions whether Apex is installed, or imported, which nothing answers with yes once no file imports it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ampcompare.source.amp_names import APEX
from ampcompare.source.edits import Edits
from ampcompare.source.find import absolute_path
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE, Finding
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.options import expression_as_bool
from ampcompare.source.migrate.read.rebinding import names_bound_by_string
from ampcompare.source.migrate.read.replacement_table import IMPORTED
from ampcompare.source.module import Module
from ampcompare.source.project import ImportIndex
from ampcompare.source.syntax import SourceInvalid, dotted_name, is_literal, last_name, root_name

ANSWERED = (
    "this asked for Apex, which the result does not import; the answer is yes now, also where Apex is missing"
)
ASKS = "this asks for Apex, which the result does not import: the part that it guards would never run"
# Names by which packages say whether Apex is installed, such as `transformers.utils.is_apex_available`.
AVAILABILITY = re.compile(
    r"_?(?:(?:is|has|have)_apex\w*|apex_(?:is_)?(?:available|installed|found))", re.IGNORECASE
)
ASKS_ANOTHER = (
    "{0} asks for the installed package apex, which the result does not import: where it is missing, what this guards "
    "does not run; take the question out"
)
NAMED_BY_TEXT = "this text names {0}: what is imported by it is of the installed Apex, as before"
FULL_NAME = re.compile(r"apex\.(?:\w+\.)+\w+")
FINDERS = ("find_spec", "find_loader", "find_module")
IMPORTERS = ("import_module", "__import__", "get_distribution", "version", "is_package_available", "require")
# The answers stand in a rewritten text under these names until `simplify_constant_conditions` takes them out.
YES, NO = "__apex_is_there__", "__apex_is_not_there__"
ANSWERS = {YES: True, NO: False}
PASSED_ON = "{0} is used as a value here, and where it goes is not followed"
SWITCHED = (
    "{0} is bound to something else here, in runs that the script itself lets do without Apex, so it also says which "
    "runs these are"
)


def answer_apex_availability_with_yes(module: Module, edits: Edits) -> list[Finding]:
    """Answer questions whether Apex is there with yes; return what is said about them."""
    findings = []
    for node in module.nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.partition(".")[0] == "apex"
        ):
            answer = _find_question_and_its_answer(module, node)
            if answer is None:
                if _is_argument_of_import_function(module, node):
                    findings.append(Finding.of_node(node, BY_HAND, ASKS))
                continue
            question, value = answer
            edits.replace(question, YES if value else NO)
            findings.append(Finding.of_node(question, NOTE, ANSWERED))
    return findings


def findings_of_texts_naming_apex(module: Module) -> list[Finding]:
    """Return a finding for each text that is the full name of something in a module of Apex, as a registry has it."""
    return [
        Finding.of_node(node, NOTE, NAMED_BY_TEXT.format(node.value))
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and FULL_NAME.fullmatch(node.value)
        and not isinstance(module.parent(node), (ast.Expr, ast.Subscript))
        and _find_question_and_its_answer(module, node) is None
        and not _is_argument_of_import_function(module, node)
    ]


def library_apex_availability_findings(path: Path, text: str, imports: ImportIndex) -> list[Finding]:
    """Return a finding for each use of what a package outside of the project says of Apex.

    Args:
        path: of the module.
        text: as it is before it is changed.
        imports: of the project.
    """
    if AVAILABILITY.search(text) is None:  # before it is parsed
        return []
    module, own = Module(text), absolute_path(path)
    findings = []
    for node in module.nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or not AVAILABILITY.fullmatch(last_name(node)):
            continue
        full = module.resolve(node, follow=False) or ""
        is_imported = "." in full and isinstance(node.ctx, ast.Load) and full.partition(".")[0] not in APEX
        if is_imported and imports.find_file_and_name_of_definition(own, full) is None:
            findings.append(Finding.of_node(node, BY_HAND, ASKS_ANOTHER.format(full)))
    return findings


def _find_question_and_its_answer(module: Module, name: ast.Constant) -> tuple[ast.expr, bool] | None:
    """Return the expression that asks for a module by its name, and its value where that is there."""
    parent = module.parent(name)
    if isinstance(parent, ast.Compare) and parent.left is name and len(parent.ops) == 1:
        if (dotted_name(parent.comparators[0]) or "").endswith("modules"):
            return parent, isinstance(parent.ops[0], ast.In)
    if not isinstance(parent, ast.Call) or last_name(parent.func) not in FINDERS:
        return None
    outer = module.parent(parent)
    if isinstance(outer, ast.Compare) and outer.left is parent and is_literal(outer.comparators[0], None):
        return outer, isinstance(outer.ops[0], (ast.IsNot, ast.NotEq))
    return parent, True


def _is_argument_of_import_function(module: Module, name: ast.Constant) -> bool:
    """Return whether a string is an argument of a function that imports or finds a module."""
    parent = module.parent(name)
    return isinstance(parent, ast.Call) and last_name(parent.func) in IMPORTERS


def is_only_tested_for_presence(module: Module, node: ast.AST) -> bool:
    """Return whether a name is only asked whether it is there, as in `if amp:` or `amp is not None`."""
    parent = module.parent(node)
    if isinstance(parent, ast.Compare):
        return (
            parent.left is node
            and is_literal(parent.comparators[0], None)
            and _is_identity_or_equality_test(parent)
        )
    while isinstance(parent, (ast.BoolOp, ast.UnaryOp)):
        if isinstance(parent, ast.UnaryOp):
            return isinstance(parent.op, ast.Not)
        node, parent = parent, module.parent(parent)
    return getattr(parent, "test", None) is node


def apex_text_of(node: ast.AST) -> str:
    """Return a constant string that names Apex or a module of it, else ""."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and value.split(".")[0] == "apex" else ""


def is_table_of_loaded_modules(node: ast.AST) -> bool:
    """Return whether an expression is `sys.modules`, or its keys."""
    node = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
    return isinstance(node, ast.Attribute) and node.attr == "modules" and root_name(node) == "sys"


def places_replacing_apex(module: Module) -> Iterator[ast.Subscript]:
    """Yield where a module puts another one in the place of Apex, as by `sys.modules["apex"] = fake`."""
    for each in module.nodes:
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            if is_table_of_loaded_modules(each.value) and apex_text_of(each.slice):
                yield each


def places_taking_apex_by_string(module: Module) -> Iterator[tuple[ast.expr, str]]:
    """Yield what takes Apex out of `sys.modules`, or imports it, by a text, for more than to ask for it.

    With that text.
    """
    for node in module.nodes:
        text = ""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            text = apex_text_of(node.slice) if is_table_of_loaded_modules(node.value) else ""
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, (ast.Name, ast.Attribute)):
            is_lookup = isinstance(node.func, ast.Attribute) and is_table_of_loaded_modules(node.func.value)
            is_taken = (
                last_name(node.func) in ("get", "__getitem__") if is_lookup else _imports_by_string(node)
            )
            text = apex_text_of(node.args[0]) if is_taken else ""
        if text and isinstance(node, ast.expr) and not isinstance(module.parent(node), ast.Expr):
            if not is_only_tested_for_presence(module, node):
                yield node, text


def _imports_by_string(call: ast.Call) -> bool:
    return last_name(call.func) in ("import_module", "__import__")


def tests_only_apex_presence(module: Module, test: ast.expr) -> bool:
    """Return whether a test asks for nothing but whether Apex is there, as `amp is not None` does."""
    node = test.left if isinstance(test, ast.Compare) else test
    return module.resolve(node, follow=False) in ("apex", "apex.amp") and is_only_tested_for_presence(
        module, node
    )


def _is_identity_or_equality_test(compare: ast.Compare) -> bool:
    return isinstance(compare.ops[0], (ast.Is, ast.IsNot, ast.Eq, ast.NotEq))


def answer_availability_question_yes(module: Module, edits: Edits, node: ast.AST) -> list[Finding]:
    """Answer a question of `is_only_tested_for_presence` with yes; return what is said about it: nothing where
    it must hold."""
    parent = module.parent(node)
    if isinstance(parent, ast.Compare):
        edits.replace(parent, YES if isinstance(parent.ops[0], (ast.IsNot, ast.NotEq)) else NO)
    else:
        edits.replace(node, YES)
    return (
        []
        if isinstance(module.statement_around(node), ast.Assert)
        else [Finding.of_node(node, NOTE, ANSWERED)]
    )


def apex_names_rebound_by_choice(module: Module, names: ModuleImports) -> dict[str, ast.AST]:
    """Return the names of Apex that a script binds to something else by its own choice, each with the place.

    What is bound where an import fails, or above such an import, stands for a missing Apex; what has the twin of torch
    stands for that.
    """
    found: dict[str, ast.AST] = {}
    for node, meaning in names.uses:
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store):
            continue
        theirs = names.full_name_of(getattr(module.statement_around(node), "value", None))
        is_twin = theirs is not None and theirs in (meaning, IMPORTED.get(meaning))
        if is_twin or _is_default_without_apex(module, names, node):
            continue
        found.setdefault(node.id, node)
    own = {name for name, full in module.top.imports.items() if any(map(_is_of_apex, full))}
    for place, name in (*names_bound_by_string(module), *_names_bound_by_global_statements(module)):
        if name in own:
            found.setdefault(name, place)
    return found


def _is_of_apex(full_name: str) -> bool:
    return full_name.partition(".")[0] in APEX


def _names_bound_by_global_statements(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the functions, classes and imports of other packages that a function binds as names of the module."""
    for scope in module.scopes:
        for name in scope.globals & scope.functions.keys():
            yield scope.functions[name].node, name
    for statement, alias, full in module.imports:
        name = alias.asname or alias.name.partition(".")[0]
        in_handler = any(isinstance(each, ast.ExceptHandler) for each in module.ancestors(statement))
        if name in module.scope_of[statement].globals and not (_is_of_apex(full) or in_handler):
            yield statement, name


def _is_default_without_apex(module: Module, names: ModuleImports, node: ast.Name) -> bool:
    """Return whether a binding is that of a run without Apex: in a handler, or a default above what may fail."""
    if any(isinstance(outer, ast.ExceptHandler) for outer in module.ancestors(node)):
        return True
    statement = module.statement_around(node)
    own = [
        each
        for each, alias in names.imports
        if node.id in (alias.asname, alias.name, alias.name.split(".")[0])
    ]
    tried = [each for each in own if isinstance(module.parent(each), ast.Try) and each.lineno > node.lineno]
    return (
        bool(own)
        and len(tried) == len(own)
        and all(module.is_in_statements(each, module.block_of(statement)) for each in own)
    )


def simplify_constant_conditions(text: str) -> str:
    """Return a rewritten text in which no condition has a part that is always true, or never, for want of a question.

    `if fp16 and YES:` becomes `if fp16:`, `assert YES` goes, `a if YES else b` becomes `a`.
    """
    while any(name in text for name in ANSWERS):
        try:
            module = Module(text)
        except SourceInvalid:  # which is no fault of the script, and is reported as such
            break
        node = next(
            (each for each in module.nodes if isinstance(each, ast.Name) and each.id in ANSWERS), None
        )
        if node is None:
            break
        edits = Edits(module)
        _replace_decided_expression(module, edits, node, ANSWERS[node.id])
        text = edits.edited_text()
    return text


def _replace_decided_expression(module: Module, edits: Edits, node: ast.expr, value: bool) -> None:
    """Take an answer out of the largest expression on which it decides."""
    parent = module.parent(node)
    while isinstance(parent, ast.UnaryOp | ast.BoolOp):
        if isinstance(parent, ast.UnaryOp):
            value = not value
        elif isinstance(parent.op, ast.And) == value:
            _drop_part_of_condition(module, edits, parent, node)
            return
        elif any(isinstance(each, ast.Call) for each in ast.walk(parent)):  # which still has to run
            break
        node, parent = parent, module.parent(parent)
    if isinstance(parent, ast.IfExp) and parent.test is node:
        edits.replace(parent, _parenthesized_source(module, parent.body if value else parent.orelse))
    elif isinstance(parent, ast.Assert) and parent.test is node and value:
        edits.remove(parent)
    elif not (
        isinstance(parent, ast.If)
        and parent.test is node
        and _replace_if_by_taken_branch(module, edits, parent, value)
    ):
        edits.replace(node, str(value))


def _drop_part_of_condition(
    module: Module, edits: Edits, joint_condition: ast.BoolOp, node: ast.expr
) -> None:
    """Leave a part out of a joint condition, on which it does not decide."""
    kept = [each for each in joint_condition.values if each is not node]
    word = " and " if isinstance(joint_condition.op, ast.And) else " or "
    text = word.join(
        _parenthesized_source(module, each, is_in_joint_condition=len(kept) > 1) for each in kept
    )
    was_value = joint_condition.values[-1] is node and not is_only_tested_for_presence(module, kept[0])
    edits.replace(joint_condition, expression_as_bool(module, text) if was_value else text)


def _parenthesized_source(module: Module, node: ast.expr, *, is_in_joint_condition: bool = False) -> str:
    """Return the text of an expression, in parentheses where it needs them in the place of another."""
    text = module.source(node)
    lowest = isinstance(node, (ast.NamedExpr, ast.Lambda)) or (
        is_in_joint_condition and isinstance(node, (ast.BoolOp, ast.IfExp))
    )
    return f"({text})" if lowest or ("\n" in text and text[-1] not in ")]}") else text


def _replace_if_by_taken_branch(module: Module, edits: Edits, node: ast.If, value: bool) -> bool:
    """Put the branch that is taken in the place of an `if`; return False where it is to stay, with a literal."""
    kept = node.body if value else node.orelse
    if module.is_elif(node):
        return value and _turn_elif_into_else(module, edits, node)
    if not kept:
        edits.remove(node)
    elif module.is_elif(kept[0]):
        edits.replace_span(module.start_of(node), module.start_of(kept[0]) + len("el"), "")
    elif module.begins_line(kept[0]) and module.begins_line(node):
        edits.replace_statement_by_body(node, kept)
    else:
        return False
    return True


def _turn_elif_into_else(module: Module, edits: Edits, node: ast.If) -> bool:
    """Turn an `elif` that is always true into the `else`; what follows it goes."""
    colon = module.text.index(":", module.end_of(node.test))
    edits.replace_span(module.start_of(node), colon, "else")
    if node.orelse:
        edits.replace_span(module.end_of(node.body[-1]), module.end_of(node), "")
    return True
