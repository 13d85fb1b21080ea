"""Migrate one module: text in, text and findings out."""

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ampcompare.source.amp_names import APEX, CORE, public_name
from ampcompare.source.edits import Edits, on_own_lines
from ampcompare.source.migrate.core.core import MAY_BE_APEX, rewrite_core
from ampcompare.source.migrate.core.internals import AMP_STATE, INTERNALS, NO_EQUIVALENT, find_internals
from ampcompare.source.migrate.finding import BY_HAND, MARK, NOTE, Finding, origins_of_lines
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.neighbors import ALONE, Around
from ampcompare.source.migrate.read.sites import Unsure
from ampcompare.source.migrate.replacement_table import IMPORTED, LAYERS, REMOVED
from ampcompare.source.migrate.replacements import Replacements
from ampcompare.source.module import Block, Module
from ampcompare.source.object_kinds import ObjectKinds
from ampcompare.source.syntax import SourceInvalid, argument, last_name

WORD = re.compile(r"\bapex\b|\bamp_C\b|\bapex_C\b|\bamp\.scale_loss\(")

PROBE = (
    "the answer is yes now, whether Apex is there or not, since migrated files ask it; a file that asks it and still "
    "imports Apex fails without"
)
MARKS = (".scale(", ".unscale_(", ".scale_loss(", ".get_scale()", "clip_grad")
PHRASES = (
    (re.compile(r"\b(?:NVIDIA|NVidia|nvidia|Nvidia)(?:'s)? [Aa](?:pex|PEX)(?: (?:amp|AMP))?\b"), "torch.amp"),
    (re.compile(r"\b[Aa](?:pex|PEX)[ .](?:amp|AMP)\b"), "torch.amp"),
    (re.compile(r"https://nvidia\.github\.io/apex/amp\.html"), "https://docs.pytorch.org/docs/stable/amp.html"),
)
CAUGHT = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
# By name: what O1 does, what autocast does.
_DIFFERENT = {
    "gelu": ("fp32", "the type of the input"),
    "std": ("fp32", "the type of the input"),
    "var": ("fp32", "the type of the input"),
    "softmax": ("the type of the input", "fp32"),
    "log_softmax": ("the type of the input", "fp32"),
    "log1p": ("the type of the input", "fp32"),
    "logsumexp": ("the type of the input", "fp32"),
    "cdist": ("the type of the input", "fp32"),
    "square": ("the type of the input", "fp32"),  # a pow, to autocast
    "einsum": ("the type of the input", "fp16"),
    "scaled_dot_product_attention": ("the type of the input", "fp16"),
}
ONLY_FUNCTIONAL = ("gelu",)
NOT_FUNCTIONAL = ("softmax", "log_softmax")  # O1 lists those of torch.nn.functional, and no others


@dataclass(frozen=True)
class Migration:
    """The result for a module."""

    text: str
    findings: list[Finding]
    uses: int = 0
    left: int = 0


def may_use_apex(text: str) -> bool:
    """Return whether a text is worth parsing."""
    return WORD.search(text) is not None or INTERNALS.search(text) is not None


def migrate_text(text: str, around: Around = ALONE) -> Migration:
    """Return the module for `torch.amp`.

    Args:
        around: what other modules have to do with this one.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
        RecursionError: an expression is nested too deeply.
    """
    if not may_use_apex(text):
        return Migration(text, [])
    module = Module(text)
    names = Names(module, around.running(module))
    kinds = ObjectKinds(module)
    called = [
        call
        for call, each in module.methods("step", "backward")
        if kinds.of(each, module.scope_of[call]) != "scheduler"
    ]
    used = [node for node, _ in names.uses] + called
    crowded = [
        each for each in map(module.statement, used) if not module.is_alone(each) and not isinstance(each, ast.With)
    ]
    if names.uses and crowded and (apart := on_own_lines(module, crowded)) != text:
        return _of_other_lines(text, apart, around)
    edits, findings, core, unsure = Edits(module), [], None, None
    if not names.imports and not names.uses:
        if any(full.partition(".")[0] == "ampcompare" for _, _, full in module.imports):
            return Migration(text, [])
        findings = [Finding.at(node, BY_HAND, NO_EQUIVALENT.format(name)) for node, name in find_internals(module)]
        for call, _ in module.methods("scale_loss"):  # mxnet has one too
            if not (module.resolve(call.func) or "").startswith("mxnet."):
                findings.append(Finding.at(call, BY_HAND, MAY_BE_APEX.format("scale_loss")))
        _mark(module, edits, findings)
        return Migration(edits.result() if edits else text, findings)
    torch, above = _torch_name(module)
    try:
        core = rewrite_core(module, names, edits, torch, around)
        findings += [] if core is None else core.findings
    except Unsure as error:
        unsure = error
        edits = Edits(module)
        findings.append(Finding.at(error.node, BY_HAND, str(error)))
    if core is None and unsure is None:
        findings += [Finding.at(node, BY_HAND, NO_EQUIVALENT.format(name)) for node, name in find_internals(module)]
    replacements = Replacements(module, names, edits, torch, whole=unsure is None)
    kept: list[ast.AST] = []
    for node, meaning in names.uses:
        if _is_of_core(meaning):
            if unsure is not None:
                kept.append(node)
            continue
        try:
            if not replacements.rewrite(node, meaning):
                kept.append(node)
        except Unsure as error:
            kept.append(node)
            findings.append(Finding.at(error.node, BY_HAND, str(error)))
    findings += replacements.findings
    needed = {_root(node) for node in kept}
    findings += _keep_for_others(module, names, around, needed, replacements.imports)
    _rewrite_imports(module, names, edits, needed, replacements.imports)
    findings += _probes(module, names, edits)
    if unsure is None:
        _rewrite_texts(module, edits, names)
        findings += _cast_notes(module, names)
    findings = sorted(set(findings))
    of_torch = rf"(?<!from )(?<![\w.]){re.escape(torch)}\."
    if edits and above is not None and re.search(of_torch, edits.new_text()) is not None:
        edits.before(above, [f"import {torch}"])
    if edits and "functools." in edits.new_text():
        _import_functools(module, edits)
    _mark(module, edits, findings)
    if edits.shared:
        return _of_other_lines(text, on_own_lines(module, edits.shared), around)
    new = _join_branches(edits.result()) if edits else text
    return Migration(new, findings, len(names.uses), len(kept))


def _of_other_lines(text: str, apart: str, around: Around) -> Migration:
    """Return the migration of a module of which some statements got lines of their own, with the lines it had."""
    lines = origins_of_lines(text, apart)
    result = migrate_text(apart, around)
    return replace(result, findings=sorted({replace(each, line=lines[each.line]) for each in result.findings}))


def _probes(module: Module, names: Names, edits: Edits) -> list[Finding]:
    """Return notes on a module that only says whether Apex is there, and says so always from now on."""
    if names.uses:
        return []
    found = []
    for statement in dict.fromkeys(each for each, _ in names.imports):
        around = module.parent(statement)
        answers = (ast.Assign, ast.Return)
        if isinstance(around, ast.Try) and any(isinstance(each, answers) for each in (*around.body, *around.orelse)):
            if edits.is_removed(statement):
                found.append(Finding.at(statement, NOTE, PROBE))
    return found


def _is_of_core(meaning: str) -> bool:
    return meaning.startswith(AMP_STATE) or (meaning.startswith("apex.amp.") and meaning.split(".")[2] in CORE)


def _mark(module: Module, edits: Edits, findings: list[Finding]) -> None:
    """Put a comment above each statement that is left by hand, unless it is there already."""
    done: set[ast.stmt] = set()
    for finding in findings:
        if finding.kind == NOTE:
            continue
        statement = _statement_at(module, finding)
        if statement is None or statement in done:
            continue
        done.add(statement)
        line = module.first_line(statement)
        above = module.line_text(line - 1).strip() if line > 1 else ""
        if not above.startswith(MARK.strip()) and module.begins_line(statement) and not module.is_elif(statement):
            edits.before(statement, [f"{MARK}{finding.message}"])


def _statement_at(module: Module, finding: Finding) -> ast.stmt | None:
    for node in module.nodes:
        if getattr(node, "lineno", None) == finding.line and getattr(node, "col_offset", None) == finding.column:
            return module.statement(node)
    return None


def _join_branches(text: str) -> str:
    """Return a rewritten module without the `if` statements whose two branches scale a loss and are equal."""
    while any(mark in text for mark in MARKS):
        try:
            module = Module(text)
        except SourceInvalid:  # which is no fault of the script, and is reported as such
            break
        equal = [node for node in module.nodes if isinstance(node, ast.If) and _is_equal(module, node)]
        if not equal:
            break
        edits = Edits(module)
        for branch in equal:
            if not any(outer in equal for outer in module.ancestors(branch)):
                edits.unwrap(branch, branch.orelse)
        text = edits.result()
    return text


def _is_equal(module: Module, node: ast.If) -> bool:
    if not node.orelse or any(isinstance(each, (ast.Call, ast.NamedExpr)) for each in ast.walk(node.test)):
        return False
    if module.is_elif(node) or len(node.body) != len(node.orelse):
        return False
    if isinstance(node.orelse[0], ast.If) and module.is_elif(node.orelse[0]):
        return False
    if not any(mark in module.source(node.body[0]) for mark in MARKS):
        return False
    return [ast.dump(each) for each in node.body] == [ast.dump(each) for each in node.orelse]


def _rewrite_texts(module: Module, edits: Edits, names: Names) -> None:
    """Name torch.amp instead of Apex in the help of `add_argument` and of click options."""
    if not any(meaning.startswith("apex.amp") for _, meaning in names.uses):
        return
    for call in module.calls:
        words = argument(call, "help") if last_name(call.func) in ("add_argument", "option", "argument") else None
        if words is not None:
            old = new = module.source(words)
            for pattern, text in PHRASES:
                new = pattern.sub(text, new)
            if new != old:
                edits.replace(words, new)


def _torch_name(module: Module) -> tuple[str, ast.stmt | None]:
    """Return the name by which a module knows torch, and the statement above which to import it, if any."""
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch" or (alias.name.startswith("torch.") and alias.asname is None):
                    return alias.asname or "torch", None
    body = [each for each in module.tree.body if not _is_prologue(each)]
    return "torch", body[0] if body else None


def _import_functools(module: Module, edits: Edits) -> None:
    """Import functools at the top of a module that has not."""
    body = [each for each in module.tree.body if not _is_prologue(each)]
    imported = {alias.asname or alias.name for each in body if isinstance(each, ast.Import) for alias in each.names}
    if "functools" not in imported:
        edits.before(body[0], ["import functools"])


def _is_prologue(statement: ast.stmt) -> bool:
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def _keep_for_others(
    module: Module, names: Names, around: Around, needed: set[str], twins: dict[tuple[ast.stmt, str], str]
) -> list[Finding]:
    """Keep the names that other modules import from this one; layers of torch with the same arguments take their place.

    Args:
        needed: names of Apex that remain, which gets more.
        twins: full names in torch of what is imported, by statement and name in Apex's module, which gets more.
    """
    own = {
        alias.asname or alias.name: (statement, alias)
        for statement, alias in names.imports
        if module.scope_of[statement] is module.top and alias.name != "*"
    }
    waiting = {
        name for name, (statement, alias) in own.items() if name not in needed and (statement, alias.name) not in twins
    }
    lists = (each for each in module.top.values.get("__all__", []) if isinstance(each, (ast.List, ast.Tuple)))
    listed = {one.value for each in lists for one in each.elts if isinstance(one, ast.Constant)}
    is_amp = {name for name in waiting if {"apex", "apex.amp"} & set(module.top.imports.get(name, ()))}
    found = {
        **{name: Path("__all__") for name in waiting & listed},
        **around.importers(waiting - is_amp, star=True),
        **around.importers(is_amp, star=False),
    }
    findings = []
    for name, other in found.items():
        statement, alias = own[name]
        full = alias.name if isinstance(statement, ast.Import) else public_name(f"{statement.module}.{alias.name}")
        if full in LAYERS:
            twins[(statement, alias.name)] = IMPORTED[full]
            continue
        needed.add(name)
        if full.startswith(REMOVED):
            message = f"{other.name} has {name} from here; migrate it, then remove this"
            findings.append(Finding.at(statement, BY_HAND, message))
        else:
            findings.append(Finding.at(statement, NOTE, f"{full} stays: {other.name} has it from here, as {name}"))
    return findings


def _rewrite_imports(
    module: Module, names: Names, edits: Edits, needed: set[str], twins: dict[tuple[ast.stmt, str], str]
) -> None:
    """Rewrite the imports."""
    stars = any(alias.name == "*" for _, alias in names.imports) and bool(needed)
    gone: set[ast.stmt] = set()
    for statement in dict.fromkeys(statement for statement, _ in names.imports):
        lines, complete = _rewrite_import(statement, needed, twins, stars)
        if complete and not lines:
            gone.add(statement)
            edits.remove(statement)
        elif lines is not None:
            edits.replace_statement(statement, lines)
            if complete:
                gone.add(statement)
    for node in module.nodes:
        if isinstance(node, ast.Try):
            _settle_try(edits, node, gone)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _rewrite_import(
    statement: ast.Import | ast.ImportFrom, needed: set[str], twins: dict[tuple[ast.stmt, str], str], stars: bool
) -> tuple[list[str] | None, bool]:
    """Return the statements instead of an import (None: as it is), and whether Apex is gone from it."""
    kept: list[ast.alias] = []
    lines: list[str] = []
    for alias in statement.names:
        local = alias.asname or alias.name.split(".")[0]
        twin = twins.get((statement, alias.name))
        if isinstance(statement, ast.Import) and alias.name.split(".")[0] not in APEX:
            kept.append(alias)
        elif twin is not None:
            package, _, name = twin.rpartition(".")
            lines.append(f"from {package} import {name}" + (f" as {local}" if local != name else ""))
        elif (alias.name == "*" and stars) or local in needed:
            kept.append(alias)
    foreign = isinstance(statement, ast.Import) and all(each.name.split(".")[0] not in APEX for each in kept)
    complete = not kept or foreign
    if len(kept) == len(statement.names):
        return None, False
    if kept:
        text = ", ".join(each.name + (f" as {each.asname}" if each.asname else "") for each in kept)
        if isinstance(statement, ast.Import):
            lines.append(f"import {text}")
        else:
            lines.append(f"from {'.' * statement.level}{statement.module or ''} import {text}")
    return lines, complete


def _settle_try(edits: Edits, node: ast.Try, gone: set[ast.stmt]) -> None:
    """Remove a `try` that guarded only imports of Apex; what else its body does stays."""
    if not any(each in gone for each in node.body) or node.finalbody or node.orelse:
        return
    if not all(_catches_import_error(handler) for handler in node.handlers):
        return
    if not all(each in gone or _cannot_fail(each) for each in node.body):
        if all(edits.is_removed(each) for each in node.body):
            edits.remove(node)
        return
    body: Block = [each for each in node.body if not edits.is_removed(each)]
    if body:
        edits.unwrap(node, node.body)
    else:
        edits.remove(node)


def _cannot_fail(statement: ast.stmt) -> bool:
    """Return whether a statement is a flag such as `has_apex = True`."""
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Assign) and isinstance(statement.value, (ast.Constant, ast.Name))
    )


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in CAUGHT for kind in kinds)


def _cast_notes(module: Module, names: Names) -> list[Finding]:
    """Return one note for each function with other casts, at its first call."""
    if not any(meaning == "apex.amp.initialize" for _, meaning in names.uses):
        return []
    found: dict[str, Finding] = {}
    for node, _ in module.methods(*_DIFFERENT):
        name = last_name(node.func)
        if name in found:
            continue
        meaning = names.meaning(node.func) or ""
        functional = meaning.startswith("torch.nn.functional.")
        if (name in ONLY_FUNCTIONAL and not functional) or (name in NOT_FUNCTIONAL and functional):
            continue
        if not meaning.startswith("torch.") and name in ("std", "var", "einsum", "cdist", "square"):
            continue  # may be of numpy
        before, after = _DIFFERENT[name]
        found[name] = Finding.at(node, NOTE, f"{name}: O1 computes it in {before}, autocast in {after}")
    return list(found.values())
