"""Change the imports of one module from Apex to the adapter: text in, text and findings out."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ampcompare.source.amp_names import ADAPTER, APEX, STARS, is_unknown_to_every_apex, public_full_name
from ampcompare.source.edits import Edits
from ampcompare.source.migrate.adapter.mark import INNER, ITSELF, OFFERED
from ampcompare.source.migrate.read.apex_callers import find_apex_callers
from ampcompare.source.migrate.read.apex_guards import (
    FINDERS,
    apex_text_of,
    findings_of_texts_naming_apex,
    is_only_tested_for_presence,
    is_table_of_loaded_modules,
    places_replacing_apex,
)
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE, Finding, UnsureRewrite
from ampcompare.source.migrate.read.library_requests import findings_of_library_requests
from ampcompare.source.migrate.read.names import ModuleImports
from ampcompare.source.migrate.read.replacement_table import LAYER_OPTIONS, OPTIMIZERS
from ampcompare.source.migrate.replacements import (
    DDP,
    NEVER_THERE,
    REDUCTIONS,
    UNUSED,
    ApexUseRewriter,
    ddp_may_lack_gradients,
    is_in_annotation,
    is_in_type_test,
    is_only_used_as_type,
)
from ampcompare.source.migrate.rewrite import (
    Migration,
    may_use_apex,
    remove_try_of_imports,
    torch_name_and_place,
)
from ampcompare.source.module import Module
from ampcompare.source.syntax import (
    DefinitionNode,
    ImportNode,
    argument,
    catches_missing_module,
    is_literal,
    last_name,
    root_name,
    walk,
)

TEMPLATE = Path(__file__).with_name(f"{ADAPTER}.py.txt")
# What the adapter lacks and torch has, by calls alone.
OF_TORCH = frozenset({
    "apex.fp16_utils.to_python_float", "apex.optimizers.FusedAdagrad", "apex.normalization.FusedRMSNorm",
    "apex.parallel.create_syncbn_process_group", "apex.parallel.ReduceOp",
})  # fmt: skip
# Options of Apex's that layers of the adapter, which are torch's, do not take.
LACKING = dict.fromkeys(("FusedLayerNorm", "SyncBatchNorm"), LAYER_OPTIONS)
# The only ones that its optimizers take.
TAKEN = {
    "FusedAdam": frozenset(OPTIMIZERS["FusedAdam"].arguments) - {"amsgrad", "set_grad_none"},
    "FusedSGD": frozenset(OPTIMIZERS["FusedSGD"].arguments) - frozenset(OPTIMIZERS["FusedSGD"].dropped),
}
# Functions that look a module up by its name, which is their first argument.
LOOKUPS = frozenset({"find_spec", "import_module", "__import__", "find_loader"})
OF_EVERY_MODULE = frozenset({"__name__", "__file__", "__doc__", "__dict__"})
VERSIONS = frozenset({"get_distribution", "version", "distribution"})
GUARDED = "the adapter has no {}: what stands in this `try` runs only where Apex is there, as before"
MISSING = "the adapter has no {}, so this stays; Apex is needed for it"
NO_OPTION = "{0} of the adapter has no option {1}, which is Apex's alone; leave it out"
NO_BIAS = "FusedAdam of the adapter, as torch's Adam, always corrects the bias, and raises an error here"
NO_STATE = "_amp_state of the adapter has no {0}; change or remove this"
STATE = frozenset({"", "opt_properties", "loss_scalers", "verbosity"})  # what `_amp_state` has of Apex's
NO_CLASS = "FusedAdam of the adapter is a function that makes torch.optim.AdamW or Adam, so it is no type; name these"
NO_BUFFERS = "DistributedDataParallel of the adapter keeps no allreduce_buffers"
INSTALLED = "the installed Apex, so the file stays on it"
LEFT = "the adapter has no {}, so the file stays as it is, on Apex"
ALWAYS_THERE = (
    "this asks whether Apex is there; the adapter always is, so what ran where Apex is missing does no longer"
)
STILL_ASKS = (
    "this still asks whether Apex is there, by an import of what the adapter has not ({0}): where Apex is missing, "
    "what runs without it does here, while other files have the adapter"
)
REPLACED = (
    "this puts another module in the place of Apex, which no file that takes the adapter asks for any more"
)
PART = (
    "what is taken from {0} here is that of the adapter, which has a part of it alone: a name that only a run knows "
    "may be missing"
)
ASKS = "this asks for the installed package apex, which the adapter is not; change or remove it"


def adapter_text() -> str:
    """Return the text of the adapter."""
    return TEMPLATE.read_text(encoding="utf-8")


def name_in_adapter_of(full_name: str) -> str | None:
    """Return the name in the adapter for a full name of Apex: "" for a module, None for what the adapter lacks."""
    if full_name in INNER:
        return INNER[full_name]
    parts = full_name.split(".")
    if parts[0] != "apex":
        return None
    if len(parts) == 1 or (len(parts) == 2 and parts[1] in OFFERED):
        return ""
    if parts[-1] in OF_EVERY_MODULE:
        return parts[-1]
    offered = OFFERED.get(parts[1], frozenset())
    if len(parts) == 2:
        return None
    if parts[2] in offered and not (len(parts) > 3 and parts[3] in offered):
        return parts[2]
    if len(parts) > 3 and parts[3] in offered:  # of the module that defines it, as apex.parallel.distributed
        return parts[3]
    return None


@dataclass(frozen=True)
class _ImportChange:
    """What becomes of an import: the new statements, and what of it stays."""

    new: list[str]
    kept: list[ast.alias]


def adapt_text(
    text: str,
    adapter: str = ADAPTER,
    *,
    depth: int | None = None,
    exports: bool = False,
    is_imported: bool = True,
    is_of_project: Callable[[str], object] = lambda full: None,
) -> Migration:
    """Return a module that imports the adapter in the place of Apex.

    Args:
        text: of the module.
        adapter: full name of the adapter's module.
        depth: how many folders below that of the adapter, in its package, the module lies; None outside of a package.
            A module whose own imports are relative so far up imports the adapter so, and finds it however it is run.
        exports: whether other modules may have any name from this one, so that none is dropped as unused.
        is_imported: whether other modules import this one. In a script, an import of Apex that nothing uses goes: that
            of the adapter would run the package in which that lies.
        is_of_project: returns whether a full name is one of the project, not of another package.

    Raises:
        SourceInvalid: it is not Python 3, or nested too deeply.
    """
    if not may_use_apex(text):
        return Migration(text, [])
    module = Module(text)
    names = ModuleImports(module)
    edits = Edits(module)
    if callers := _findings_on_packages_calling_apex(module, is_of_project):
        return Migration(text, callers, len(names.uses), len(names.uses))
    missing = [(node, full) for node, full in names.uses if name_in_adapter_of(full) is None]
    guarded = [
        each
        for each in missing
        if not is_unknown_to_every_apex(each[1]) and _runs_with_apex_alone(names, each[0])
    ]
    missing = [each for each in missing if each not in guarded]
    if holding := _uses_keeping_apex(missing):
        found = {Finding.of_node(node, BY_HAND, LEFT.format(full)) for node, full in holding}
        return Migration(text, sorted(found), len(names.uses), len(names.uses))
    findings, replaced = _replace_missing_with_torch(module, names, edits, missing)
    missing = [each for each in missing if each[0] not in replaced]
    findings += _findings_of_missing_names(missing)
    gone = {_root_node(each) for each in replaced}
    used = {each.id for each in module.nodes if isinstance(each, ast.Name) and each not in gone}
    findings += [Finding.of_node(node, NOTE, GUARDED.format(full)) for node, full in guarded]
    name = (
        "." * (depth + 1) + ADAPTER
        if depth is not None and _relative_import_level(module) > depth
        else adapter
    )
    unneeded = set() if exports or is_imported else _find_unneeded_imports(module, names, used)
    always = _change_imports_and_find_tries(
        names, edits, name, [*missing, *guarded], used if not exports else None, unneeded
    )
    _redirect_apex_lookups(module, edits, adapter)
    findings += _apex_availability_question_findings(module, always) + findings_of_texts_naming_apex(module)
    findings += findings_of_library_requests(module)
    findings += (
        _ddp_limit_notes(module, names)
        + _apex_option_findings(module, names)
        + _missing_amp_state_findings(names)
    )
    return Migration(
        edits.edited_text() if edits else text, sorted(set(findings)), len(names.uses), len(missing)
    )


def _find_unneeded_imports(module: Module, names: ModuleImports, used: set[str]) -> set[str]:
    """Return the names that imports of Apex outside of `try` and classes bind, and no code or text of a module has."""
    bound = {
        alias.asname or alias.name.split(".")[0]
        for statement, alias in names.imports
        if not isinstance(module.parent(statement), (ast.Try, ast.ClassDef))  # of a class, an attribute
    }
    texts = [each.value for each in module.nodes if isinstance(each, ast.Constant)]
    written = {word for each in texts if isinstance(each, str) for word in re.findall(r"\w+", each)}
    return bound - used - written


def _findings_on_packages_calling_apex(
    module: Module, is_of_project: Callable[[str], object]
) -> list[Finding]:
    """Return what keeps a file on the installed Apex, since another package calls that."""
    return [
        Finding.of_node(each.node, BY_HAND, each.message_naming_apex(INSTALLED))
        for each in find_apex_callers(module)
        if not (each.full and is_of_project(each.full))
    ]


def _redirect_apex_lookups(module: Module, edits: Edits, adapter: str) -> None:
    """Let strings by which a module looks for Apex name the adapter."""
    for node, full in _apex_lookups(module):
        if name_in_adapter_of(full) is not None:
            edits.replace(node, repr(adapter).replace("'", '"'))


def _findings_of_missing_names(missing_uses: list[tuple[ast.Name | ast.Attribute, str]]) -> list[Finding]:
    """Return what is said of each thing that the adapter lacks: by hand, unless no version of Apex has it."""
    never = [
        Finding.of_node(node, NOTE, NEVER_THERE.format(full))
        for node, full in missing_uses
        if is_unknown_to_every_apex(full)
    ]
    lacking = [(node, full) for node, full in missing_uses if not is_unknown_to_every_apex(full)]
    return never + [Finding.of_node(node, BY_HAND, MISSING.format(full)) for node, full in lacking]


def _uses_keeping_apex(
    missing_uses: list[tuple[ast.Name | ast.Attribute, str]],
) -> list[tuple[ast.Name | ast.Attribute, str]]:
    """Return what of the things that the adapter lacks keeps the whole file on Apex.

    What an imported name alone means stays with its import; the rest of `amp` must be of one kind. `FP16_Optimizer`
    steps the optimizers of Apex alone, which must stay with it.
    """
    through_amp = [
        each
        for each in missing_uses
        if each[1].startswith("apex.amp.") and isinstance(each[0], ast.Attribute)
    ]
    return through_amp or [each for each in missing_uses if each[1].endswith("FP16_Optimizer")]


def _runs_with_apex_alone(names: ModuleImports, use: ast.Name | ast.Attribute) -> bool:
    """Return whether a use stands with its import in a `try` that goes on without Apex, and that the adapter is not in.

    Where Apex is installed, what is between them must be of one kind.
    """
    module = names.module
    for statement, alias in names.imports:
        hiding = _find_try_that_hides_failure(module, statement)
        if hiding is None or root_name(use) != (alias.asname or alias.name.split(".")[0]):
            continue
        raises = any(isinstance(each, ast.Raise) for handler in hiding.handlers for each in walk(handler))
        inside = {each for outer in hiding.body for each in walk(outer)}
        if not raises and use in inside:
            return not any(
                node in inside and name_in_adapter_of(full) is not None for node, full in names.uses
            )
    return False


def _ddp_limit_notes(module: Module, names: ModuleImports) -> list[Finding]:
    """Note each DistributedDataParallel of the adapter, which is torch's, that may meet parameters without gradient."""
    found = []
    for node, full in names.uses:
        if name_in_adapter_of(full) == DDP.rpartition(".")[2] and isinstance(node.ctx, ast.Load):
            outer = module.parent(node)
            call = outer if isinstance(outer, ast.Call) and outer.func is node else None
            if ddp_may_lack_gradients(call) and not is_only_used_as_type(module, node):
                found.append(Finding.of_node(call or node, NOTE, UNUSED.format("delay_allreduce=True")))
            kept = None if call is None else argument(call, "retain_allreduce_buffers", 5)
            if kept is not None and not is_literal(kept, False):
                found.append(Finding.of_node(kept, NOTE, NO_BUFFERS))
    return found


def _apex_option_findings(module: Module, names: ModuleImports) -> list[Finding]:
    """Return what calls of the adapter's functions and classes give them that only Apex's take, and other such uses."""
    found = []
    for node, full in names.uses:
        call, name = module.parent(node), name_in_adapter_of(full) or ""
        is_type = isinstance(call, ast.ClassDef) or is_in_type_test(module, node)
        if name == "FusedAdam" and is_type and not is_in_annotation(module, node):
            found.append(Finding.of_node(node, BY_HAND, NO_CLASS))
        if not (isinstance(call, ast.Call) and call.func is node):
            continue
        for each in call.keywords:
            is_unknown = each.arg is not None and name in TAKEN and each.arg not in TAKEN[name]
            if is_unknown or each.arg in LACKING.get(name, ()):
                found.append(Finding.of_node(each.value, BY_HAND, NO_OPTION.format(name, each.arg)))
        bias = argument(call, "bias_correction", 2) if name == "FusedAdam" else None
        if bias is not None and is_literal(bias, False):
            found.append(Finding.of_node(bias, BY_HAND, NO_BIAS))
    return found


def _missing_amp_state_findings(names: ModuleImports) -> list[Finding]:
    """Return the reads of what the adapter's `_amp_state` does not have."""
    found = []
    for node, full in names.uses:
        # the object has the name of its module
        path = full.partition("._amp_state")[2].removeprefix("._amp_state").removeprefix(".")
        name = path.partition(".")[0]
        if isinstance(node, ast.Name) and name_in_adapter_of(full) == name:
            continue  # a function of the module, by its own name
        if name not in STATE and isinstance(node.ctx, ast.Load):
            found.append(Finding.of_node(node, BY_HAND, NO_STATE.format(name)))
    return found


def _change_imports_and_find_tries(
    names: ModuleImports,
    edits: Edits,
    adapter: str,
    missing_uses: list[tuple[ast.Name | ast.Attribute, str]],
    used_names: set[str] | None,
    unneeded_names: set[str],
) -> list[ast.Try]:
    """Let imports and chains of attributes name the adapter; what it lacks keeps its import.

    Returns each `try` of an import that may have failed and cannot any more.

    Args:
        missing_uses: what it lacks.
        used_names: names that the module uses; None if all of them are.
        unneeded_names: names that imports outside of a `try` bind for nothing.
    """
    offered = {
        root_name(node)
        for node, full in names.uses
        if name_in_adapter_of(full) is not None and isinstance(node, ast.Attribute)
    }
    roots = {root_name(node) for node, full in missing_uses if isinstance(node, ast.Attribute)}
    in_try: dict[ast.Try, dict[ast.stmt, list[str]]] = {}
    for statement in dict.fromkeys(statement for statement, _ in names.imports):
        is_inner = isinstance(names.module.parent(statement), (ast.Try, ast.ClassDef))
        unneeded = set() if is_inner else unneeded_names
        lines = _change_of_import(statement, adapter, used_names, roots, offered, unneeded)
        if len(lines.kept) == len(statement.names) and not lines.new:
            continue
        new = [*lines.new, *_import_of_kept_names(statement, lines.kept)]
        hiding = None if lines.kept else _find_try_that_hides_failure(names.module, statement)
        if hiding is not None:
            in_try.setdefault(hiding, {})[statement] = list(dict.fromkeys(new))
        if new:
            edits.replace_statement(statement, list(dict.fromkeys(new)))
        else:
            edits.remove(statement)
    for hiding, changed in in_try.items():  # an adapter that is not found must be an error
        gone = {each for each in hiding.body if each in changed or edits.is_removed(each)}
        new = list(dict.fromkeys(line for lines in changed.values() for line in lines))
        if not remove_try_of_imports(edits, hiding, gone) and new:
            edits.insert_above(hiding, new)
    for node, full in names.uses:
        if (name := name_in_adapter_of(full)) is not None and isinstance(node, ast.Attribute):
            _rename_attribute_chain(edits, node, name, is_root_kept=root_name(node) in roots)
    return list(in_try)


def _apex_availability_question_findings(
    module: Module, succeeding_tries: Iterable[ast.Try]
) -> list[Finding]:
    """Return what is said of questions for the installed package, and for whether Apex is there."""
    by_hand = [Finding.of_node(call, BY_HAND, ASKS) for call in _calls_asking_version(module)]
    kept = {each: _find_import_that_needs_apex(each) for each in succeeding_tries}
    still = [
        Finding.of_node(each, NOTE, STILL_ASKS.format(ast.unparse(one)))
        for each, one in kept.items()
        if one is not None and any(_choices_made_without_apex(module, each))
    ]
    asking = _nodes_asking_for_apex(module, [each for each in succeeding_tries if kept[each] is None])
    put = [Finding.of_node(each, NOTE, REPLACED) for each in places_replacing_apex(module)]
    put += [
        Finding.of_node(each, NOTE, PART.format(full))
        for each, full in _strings_importing_adapter_parts(module)
    ]
    return by_hand + still + put + [Finding.of_node(each, NOTE, ALWAYS_THERE) for each in asking]


def _strings_importing_adapter_parts(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the strings by which a module imports, as by `import_module`, what the adapter has a part of."""
    for node, full in _apex_lookups(module):
        call = module.parent(node)
        is_import = isinstance(call, ast.Call) and last_name(call.func) in ("import_module", "__import__")
        if is_import and full not in ("apex", "apex.amp") and name_in_adapter_of(full) is not None:
            yield node, full


def _nodes_asking_for_apex(module: Module, succeeding_tries: Iterable[ast.Try]) -> Iterator[ast.AST]:
    """Yield where a module asks whether Apex is there: by its name, or by a variable that a failed import sets.

    Args:
        succeeding_tries: statements whose import of the adapter cannot fail.
    """
    for node, full in _apex_lookups(module):
        parent = module.parent(node)
        is_asking = not isinstance(parent, ast.Call) or last_name(parent.func) in FINDERS
        is_asking = is_asking or is_only_tested_for_presence(module, parent)
        if is_asking and name_in_adapter_of(full) is not None and not isinstance(parent, ast.Subscript):
            if not isinstance(module.statement_around(node), ast.Assert):
                yield node
    for one in succeeding_tries:
        yield from _choices_made_without_apex(module, one)


def _choices_made_without_apex(module: Module, try_statement: ast.Try) -> Iterator[ast.AST]:
    """Yield what a `try` of imports does without Apex that may choose a way: what it sets, defines or leaves out."""
    for handler in try_statement.handlers:
        sets = [each for each in walk(handler) if isinstance(each, (ast.Assign, ast.AnnAssign))]
        yield from (each for each in sets if _may_import_flag_choose_branch(module, each))
        yield from (each for each in handler.body if isinstance(each, DefinitionNode))
        if _does_handler_skip_other_code(try_statement, handler):
            yield handler


def _find_import_that_needs_apex(try_statement: ast.Try) -> ast.Import | ast.ImportFrom | None:
    """Return the first import in a `try` of something of Apex that the adapter does not have; None without one."""
    for each in try_statement.body:
        if isinstance(each, ImportNode):
            package = f"{'.' * each.level}{each.module or ''}." if isinstance(each, ast.ImportFrom) else ""
            names = [f"{package}{alias.name}" for alias in each.names]
            if any(name.split(".")[0] in APEX and name_in_adapter_of(name) is None for name in names):
                return each
    return None


def _does_handler_skip_other_code(try_statement: ast.Try, handler: ast.ExceptHandler) -> bool:
    """Return whether a `try` does more than to import, and its handler goes on without that."""
    rest = [
        each for each in try_statement.body if not isinstance(each, (ast.Import, ast.ImportFrom, ast.Assign))
    ]
    leaves = any(isinstance(each, (ast.Raise, ast.Return)) for each in walk(handler))
    return bool(rest) and not leaves


def _may_import_flag_choose_branch(module: Module, setting: ast.Assign | ast.AnnAssign) -> bool:
    """Return whether what a failed import sets may choose a way, and is not only what an assertion asks for."""
    target = setting.targets[0] if isinstance(setting, ast.Assign) else setting.target
    if not isinstance(setting.value, ast.Constant) or not isinstance(target, ast.Name):
        return False
    reads = [
        each
        for each in module.nodes
        if isinstance(each, ast.Name) and each.id == target.id and isinstance(each.ctx, ast.Load)
    ]
    if setting.value.value is None:  # in the place of a module
        reads = [each for each in reads if is_only_tested_for_presence(module, each)]
    elif not reads:  # by another file, perhaps
        return True
    return any(not isinstance(module.statement_around(each), ast.Assert) for each in reads)


def _rename_attribute_chain(edits: Edits, node: ast.Attribute, name: str, *, is_root_kept: bool) -> None:
    """Let a chain of attributes lead to a name of the adapter, "" for a module.

    Args:
        edits: of the module.
        node: the chain.
        name: which the adapter has.
        is_root_kept: whether what the chain begins with still names Apex.
    """
    holder = _part_standing_for_module(node, name)
    is_shown = all(each.attr in ITSELF for each in walk(holder) if isinstance(each, ast.Attribute))
    if is_root_kept or not is_shown:
        text = ADAPTER if is_root_kept else root_name(node)
        edits.replace(_root_node(node) if is_shown else holder, text)


def _find_try_that_hides_failure(module: Module, statement: ast.stmt) -> ast.Try | None:
    """Return the `try` in whose body an import stands if it catches that a module is not there."""
    parent = module.parent(statement)
    if not isinstance(parent, ast.Try) or statement not in parent.body:
        return None
    return parent if any(map(catches_missing_module, parent.handlers)) else None


def _replace_missing_with_torch(
    module: Module,
    names: ModuleImports,
    edits: Edits,
    missing_uses: list[tuple[ast.Name | ast.Attribute, str]],
) -> tuple[list[Finding], set[ast.AST]]:
    """Replace what the adapter lacks and torch has, as rewriting does; return the notes, and what is replaced."""
    torch, above = torch_name_and_place(module)
    replacements, replaced = ApexUseRewriter(module, names, edits, torch), set[ast.AST]()
    for node, full in missing_uses:
        if public_full_name(full) in OF_TORCH or full.startswith(f"{REDUCTIONS}."):
            try:
                replaced |= {node} if replacements.rewrite_use(node, full) else set()
            except UnsureRewrite:
                continue  # which is left then, as what torch lacks is
    if above is not None and f"{torch}." in edits.inserted_text():
        edits.insert_above(above, [f"import {torch}"])
    return replacements.findings, replaced


def _part_standing_for_module(node: ast.Attribute, name: str) -> ast.AST:
    """Return the part of a chain that stands for the module of a name in it; all of it for "", a module itself.

    A chain that begins with what has the name, as `_amp_state.loss_scalers`, has no such part: its begin is returned.
    """
    part: ast.AST = node
    while name and isinstance(part, ast.Attribute) and part.attr != name:
        part = part.value
    return part.value if name and isinstance(part, ast.Attribute) else part


def _root_node(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def _change_of_import(
    statement: ImportNode,
    adapter: str,
    used_names: set[str] | None,
    roots: set[str],
    offered_modules: set[str],
    unneeded_names: set[str],
) -> _ImportChange:
    """Return what becomes of an import.

    Args:
        used_names: names that the module uses; None if all of them are.
        roots: names of modules of which it uses what the adapter lacks.
        offered_modules: names of modules of which it uses what the adapter has.
        unneeded_names: names that the import binds for nothing.
    """
    new: list[str] = []
    kept: list[ast.alias] = []
    for alias in statement.names:
        local = alias.asname or alias.name.split(".")[0]
        if isinstance(statement, ast.Import):
            full = alias.name if alias.asname is not None else alias.name.split(".")[0]
            if alias.name.split(".")[0] not in APEX:
                kept.append(alias)
                continue
        elif alias.name == "*":
            new += _lines_for_star_import(statement, adapter, used_names)
            if not new and used_names is None:
                kept.append(alias)
            continue
        else:
            full = f"{statement.module}.{alias.name}"
        name = name_in_adapter_of(full)
        if local in unneeded_names:
            continue
        if name is None or local in roots:
            is_unused = used_names is not None and local not in used_names
            if not is_unused:
                kept.append(alias)
            if local in roots & offered_modules:
                new.append(_import_of_adapter(adapter, ADAPTER))
        elif name:
            new.append(f"from {adapter} import {name}" + (f" as {local}" if local != name else ""))
        else:
            new.append(_import_of_adapter(adapter, local))
    return _ImportChange(new, kept)


def _import_of_adapter(adapter: str, local: str) -> str:
    """Return the import of the adapter, by its full or relative name, under a name of the module."""
    if adapter.startswith("."):
        name = f"from {adapter.removesuffix(ADAPTER)} import {ADAPTER}"
        return name if local == ADAPTER else f"{name} as {local}"
    return f"import {adapter}" if local == adapter else f"import {adapter} as {local}"


def _relative_import_level(module: Module) -> int:
    """Return how many folders the relative imports go up, with the module's own, that it makes in every run."""
    return max((each.level for each in module.tree.body if isinstance(each, ast.ImportFrom)), default=0)


def _lines_for_star_import(statement: ast.ImportFrom, adapter: str, used_names: set[str] | None) -> list[str]:
    """Return the imports of what a star import binds and the module uses."""
    package = statement.module or ""
    lines = []
    for name in STARS.get(package, ()):
        own = name_in_adapter_of(f"{package}.{name}")
        if own is None or (used_names is not None and name not in used_names):
            continue
        lines.append(f"from {adapter} import {own}" if own else _import_of_adapter(adapter, name))
    return lines


def _import_of_kept_names(statement: ImportNode, kept_aliases: list[ast.alias]) -> list[str]:
    if not kept_aliases:
        return []
    text = ", ".join(each.name + (f" as {each.asname}" if each.asname else "") for each in kept_aliases)
    return [
        f"import {text}" if isinstance(statement, ast.Import) else f"from {statement.module} import {text}"
    ]


def _apex_lookups(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the strings by which a module looks for Apex, with their values."""
    for node in module.nodes:
        if (
            isinstance(node, ast.Call)
            and node.args
            and last_name(node.func) in LOOKUPS
            and apex_text_of(node.args[0])
        ):
            yield node.args[0], apex_text_of(node.args[0])
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Load)
            and is_table_of_loaded_modules(node.value)
            and apex_text_of(node.slice)
        ):
            yield node.slice, apex_text_of(node.slice)
        elif (
            isinstance(node, ast.Call)
            and node.args
            and last_name(node.func) in ("get", "__getitem__")
            and is_table_of_loaded_modules(node)
            and apex_text_of(node.args[0])
        ):
            yield node.args[0], apex_text_of(node.args[0])
        elif (
            isinstance(node, ast.Compare)
            and apex_text_of(node.left)
            and is_table_of_loaded_modules(node.comparators[0])
        ):
            yield node.left, apex_text_of(node.left)


def _calls_asking_version(module: Module) -> Iterator[ast.Call]:
    for node in module.nodes:
        if (
            isinstance(node, ast.Call)
            and node.args
            and last_name(node.func) in VERSIONS
            and apex_text_of(node.args[0])
        ):
            yield node
