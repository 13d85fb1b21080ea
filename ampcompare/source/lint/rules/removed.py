"""Rules about names that were removed, are deprecated, or never were."""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TypeGuard

from ampcompare.source.amp_names import CORE
from ampcompare.source.branches import never_run_together
from ampcompare.source.edits import Edit
from ampcompare.source.lint.read.module import (
    EXITS,
    Finding,
    LintModule,
    Mistake,
    dotted_text_of,
    register_rule,
)
from ampcompare.source.syntax import ImportNode, catches_missing_module, last_name

REMOVED = ("amp", "parallel", "fp16_utils", "RNN", "reparameterization", "pyprof")
OF_APEX = {"init", *CORE, "disable_casts"}
OF_APEX |= {f"{how}{what}_function" for how in ("", "register_") for what in ("half", "float", "promote")}
PACKAGES = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
CALLED = ("autocast", "GradScaler")
DECORATORS = ("custom_fwd", "custom_bwd")
AUTOCAST = ("enabled", "dtype", "cache_enabled")  # the arguments of `torch.cuda.amp.autocast`
OLD_TF32 = (
    "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32", "torch.backends.cudnn.flags",
    "torch.set_float32_matmul_precision", "torch.get_float32_matmul_precision",
)  # fmt: skip
TF32_NAMES = {"fp32_precision", *(name.rpartition(".")[2] for name in OLD_TF32)}
OF_VERSIONS = re.compile(r"(?i)version|greater|hasattr|is_torch|torch_?\d|digit")
QUERIES = {
    "torch.get_autocast_gpu_dtype": 'get_autocast_dtype("cuda"',
    "torch.get_autocast_cpu_dtype": 'get_autocast_dtype("cpu"',
    "torch.set_autocast_gpu_dtype": 'set_autocast_dtype("cuda"',
    "torch.set_autocast_cpu_dtype": 'set_autocast_dtype("cpu"',
    "torch.is_autocast_cpu_enabled": 'is_autocast_enabled("cpu"',
    "torch.set_autocast_cpu_enabled": 'set_autocast_enabled("cpu"',
}


def _is_import_guarded(module: LintModule, node: ast.AST) -> bool:
    """Return whether a statement stands under a condition, or in a `try` whose handlers let the script go on."""
    for below, outer in pairwise([node, *module.ancestors(node)]):
        if isinstance(outer, ast.If):
            return True
        if isinstance(outer, ast.Try) and below in outer.body and not _handler_ends_script(outer):
            return True
        if isinstance(outer, ast.Try) and below not in (*outer.body, *outer.orelse, *outer.finalbody):
            return True
    return False


def _handler_ends_script(statement: ast.Try) -> bool:
    """Return whether the handler of a failed import ends the script: it raises, or calls `sys.exit`."""
    for handler in statement.handlers:
        if catches_missing_module(handler):
            last = handler.body[-1]
            called = last.value if isinstance(last, ast.Expr) else None
            exits = isinstance(called, ast.Call) and EXITS.search(dotted_text_of(called.func)) is not None
            return isinstance(last, ast.Raise) or exits
    return True  # none catches it


@register_rule(
    Mistake(
        "AMP301",
        "apex-removed",
        "an Apex module that was removed in May 2025 is imported, and nothing catches the ImportError to go on",
        "the script fails at the import with any later Apex",
        "move to `torch.amp` with `ampcompare migrate`, or run the script with `ampcompare exec`",
        """
from apex import amp  # AMP301  # wrong
from apex.normalization import FusedLayerNorm  # right

try:  # right
    from apex import amp  # right
except ImportError:  # right
    amp = None  # right
""",
    ),
    Mistake(
        "AMP304",
        "no-such-name",
        "a name of Apex is looked up in `torch.amp` or `torch.cuda.amp`, which do not have it",
        "an AttributeError or ImportError when the line runs",
        "use `autocast` and `GradScaler`, or import `amp` from Apex",
        """
import torch

with torch.cuda.amp.scale_loss(loss, optimizer) as scaled_loss:  # AMP304  # wrong
    scaled_loss.backward()  # wrong
with torch.cuda.amp.common.amp_definitely_not_available():  # right
    pass  # right
""",
    ),
    Mistake(
        "AMP308",
        "fp16-optimizer-moved",
        "`FP16_Optimizer` is imported from `apex.optimizers`",
        "it was removed from that module in 2019: an ImportError",
        "move to `torch.amp`; `ampcompare exec` runs it as it is",
        """
from apex.optimizers import FP16_Optimizer  # AMP308  # wrong
from apex.optimizers import FusedAdam  # right
""",
    ),
    Mistake(
        "AMP404",
        "star-import",
        "`from apex.fp16_utils import *`",
        "it hides which names are used, often only `to_python_float`",
        "import the names that are used",
        """
try:
    from apex.fp16_utils import *  # AMP404  # wrong
    from apex.fp16_utils import to_python_float  # right
except ImportError:
    pass
""",
    ),
    needs=("apex|amp", "apex|init|initialize|scale_loss|master_params|state_dict|disable_casts|_function"),
)
def removed_imports(module: LintModule) -> Iterator[Finding]:
    """Imports of what was removed or moved."""
    for node, _, name in module.imports:
        package, _, last = name.rpartition(".")
        parts = name.split(".")
        if (
            parts[0] == "apex"
            and len(parts) > 1
            and parts[1] in REMOVED
            and not _is_import_guarded(module, node)
        ):
            yield module.make_finding("AMP301", node, f"`apex.{parts[1]}` was removed from Apex in May 2025")
        elif name == "apex.optimizers.FP16_Optimizer":
            yield module.make_finding("AMP308", node, "`apex.optimizers` has no `FP16_Optimizer`")
        elif package in ("torch.cuda.amp", "torch.amp") and last in OF_APEX:
            yield module.make_finding("AMP304", node, f"`{package}` has no `{last}`")
        if name == "apex.fp16_utils.*":
            yield module.make_finding("AMP404", node, "the names used from `apex.fp16_utils` are not visible")


@register_rule(
    Mistake(
        "AMP120",
        "bare-except-import",
        "the import of Apex is inside a `try` with a bare `except:`",
        "every installation error is swallowed, and the script silently trains in fp32",
        "catch `ImportError`, and report that Apex is missing",
        """
try:
    from apex import amp
except:  # AMP120  # wrong
except ImportError:  # right
    use_amp = False
""",
        fixable=True,
    ),
    needs=("apex", "except"),
)
def bare_except_around_apex(module: LintModule) -> Iterator[Finding]:
    """A bare `except:` around an import of Apex."""
    for node in module.nodes:
        if isinstance(node, ast.Try) and any(_imports_apex_amp(module, statement) for statement in node.body):
            for handler in node.handlers:
                if handler.type is None and not _handler_raises_or_logs(handler):
                    start = module.offset(handler.lineno, handler.col_offset)
                    written = module.text[start : start + len("except:")] == "except:"
                    edits = (Edit(start, start + len("except:"), "except ImportError:"),) if written else ()
                    yield module.make_finding(
                        "AMP120", handler, "any error from the import of Apex is swallowed", edits
                    )


def _imports_apex_amp(module: LintModule, node: ast.stmt) -> bool:
    """Return whether a statement imports the part of Apex that mixed precision needs."""
    names = [each.full.split(".") for each in module.imports if each.statement is node]
    if any(parts[0] == "apex" and parts[1:2] in (["amp"], ["fp16_utils"]) for parts in names):
        return True
    return ["apex"] in names and module.code_mentions_pattern(r"\bapex\.amp\b")


def _handler_raises_or_logs(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler raises again, or says something."""
    words = ("print", "warn", "log", "exit", "info", "error")
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and any(word in dotted_text_of(node.func).lower() for word in words))
        for node in ast.walk(handler)
    )


@register_rule(
    Mistake(
        "AMP302",
        "device-amp-deprecated",
        "`autocast` or `GradScaler` of `torch.cuda.amp` or `torch.cpu.amp`",
        "deprecated since torch 2.4: a FutureWarning now, later an error",
        'write `torch.amp.autocast("cuda", ...)` and `torch.amp.GradScaler("cuda", ...)`; "cpu" for `torch.cpu.amp`',
        """
import torch

scaler = torch.cuda.amp.GradScaler()  # AMP302  # wrong
with torch.cuda.amp.autocast():  # AMP302  # wrong
scaler = torch.amp.GradScaler("cuda")  # right
with torch.autocast("cuda"):  # right
    loss = model(batch)
""",
        fixable=True,
    ),
    Mistake(
        "AMP303",
        "custom-function-deprecated",
        "`custom_fwd` or `custom_bwd` of `torch.cuda.amp`",
        "deprecated since torch 2.4: a FutureWarning now, later an error",
        'write `torch.amp.custom_fwd(device_type="cuda")`, or `custom_bwd` so',
        """
import torch


class Square(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd  # AMP303  # wrong
    @torch.amp.custom_fwd(device_type="cuda")  # right
    def forward(context, x):
        return x * x
""",
        fixable=True,
    ),
    needs=("autocast|GradScaler|custom_fwd|custom_bwd", "cuda|cpu", "amp"),
)
def deprecated_device_amp(module: LintModule) -> Iterator[Finding]:
    """Uses of `torch.cuda.amp` and `torch.cpu.amp`."""
    if module.versions.torch < (2, 4):  # which has no `torch.amp.custom_fwd`
        return
    statements = dict.fromkeys(each.statement for each in module.imports)
    groups = {
        name: edits for node in statements for name, edits in _edits_by_imported_name(module, node).items()
    }
    attributes = [
        node for node in module.nodes if isinstance(node, ast.Attribute) and _may_be_deprecated_name(node)
    ]
    of_attributes = any((module.resolve(each) or "").rpartition(".")[0] in PACKAGES for each in attributes)
    if not of_attributes and not any(each.full.rpartition(".")[0] in PACKAGES for each in module.imports):
        return  # a name means one of these by an import, or by what it is assigned
    for use in filter(_may_be_deprecated_name, module.nodes):
        full = module.resolve(use) or ""
        if (
            full.rpartition(".")[0] in PACKAGES
            and not module.has_alternative_bindings(use)
            and not is_only_fallback(module, use)
        ):
            yield from _deprecated_use_findings(module, use, full, groups)


def _may_be_deprecated_name(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    """Return whether a node reads a name, which an import may bind, or an attribute of a deprecated name."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load) and node.attr in (*CALLED, *DECORATORS)
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)


def _deprecated_use_findings(
    module: LintModule, node: ast.Name | ast.Attribute, full_name: str, groups: Mapping[str, tuple[Edit, ...]]
) -> Iterator[Finding]:
    """Yield the finding of a name of these packages, with the edits of all uses of the import that binds it."""
    package, _, last = full_name.rpartition(".")
    base = node if isinstance(node, ast.Name) else node.value
    edits = groups.get(base.id, ()) if isinstance(base, ast.Name) else ()
    if isinstance(node, ast.Attribute):
        edits = edits or _edits_renaming_device_amp(module, node, full_name)
    parent = module.parents[node]
    if last in CALLED and isinstance(parent, ast.Call):
        if parent.func is node:
            yield module.make_finding("AMP302", parent, f"`{package}.{last}` is deprecated", edits)
    elif last in DECORATORS:
        yield module.make_finding("AMP303", node, f"`{package}.{last}` is deprecated", edits)


def is_only_fallback(module: LintModule, node: ast.AST) -> bool:
    """Return whether a name is used only where something newer is missing."""
    for below, outer in pairwise([node, *module.ancestors(node)]):
        if isinstance(outer, ast.ExceptHandler):
            return True
        if isinstance(outer, (ast.If, ast.IfExp)) and outer.test is not below:
            if OF_VERSIONS.search(ast.unparse(outer.test)):
                return True
    return False


def _edits_renaming_device_amp(module: LintModule, node: ast.Attribute, full_name: str) -> tuple[Edit, ...]:
    """Return the edits of `torch.cuda.amp.NAME`, written out."""
    package, _, last = full_name.rpartition(".")
    text = dotted_text_of(node)
    if not text.endswith(f".{full_name.removeprefix('torch.')}"):
        return ()
    head = text.removesuffix(f".{full_name.removeprefix('torch.')}")
    changed = _edits_naming_device(module, node, last, PACKAGES[package])
    return () if changed is None else (*module.replacement_edits(node, f"{head}.amp.{last}"), *changed)


def _edits_naming_device(
    module: LintModule, node: ast.expr, name: str, device: str
) -> tuple[Edit, ...] | None:
    """Return the edits that name the device where a name is used; None where it is not clear how."""
    parent = module.parents[node]
    call = parent if isinstance(parent, ast.Call) and parent.func is node else None
    end = module.end_of(node)
    if name in DECORATORS:
        if call is None:
            return module.insertion_edits(end, f'(device_type="{device}")')
        if any(one.arg is None for one in call.keywords) or call.args:
            return None
        return module.insertion_edits(
            _place_after_parenthesis(module, call),
            f'device_type="{device}"' + (", " if call.keywords else ""),
        )
    if call is None or any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    given = ", " if call.args or call.keywords else ""
    changed = [*module.insertion_edits(_place_after_parenthesis(module, call), f'"{device}"{given}')]
    if name == "autocast":  # whose arguments are in another order
        starts = [module.start_of(argument) for argument in call.args]
        changed += [Edit(start, start, f"{key}=") for start, key in zip(starts, AUTOCAST, strict=False)]
    return tuple(changed)


def _place_after_parenthesis(module: LintModule, call: ast.Call) -> int:
    """Return the place behind the opening parenthesis of a call."""
    return module.text.index("(", module.end_of(call.func)) + 1


def _edits_by_imported_name(module: LintModule, node: ImportNode) -> dict[str, tuple[Edit, ...]]:
    """Return, for the names that an import binds, the edits of the import and of every use of them.

    Either names of one of the packages, or the package itself under a name of its own.
    """
    if _is_import_guarded(module, node):
        return {}
    written, alias = module.source(node), node.names[0]
    of_names = isinstance(node, ast.ImportFrom) and node.module in PACKAGES
    if isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
        package, new = node.module, written.replace(node.module, "torch.amp", 1)
        names = [one.name for one in node.names]
        if any(one.asname for one in node.names) or not set(names) <= {*CALLED, *DECORATORS}:
            return {}
    elif len(node.names) > 1:
        return {}
    elif isinstance(node, ast.ImportFrom):
        package, new = f"{node.module}.{alias.name}", written.replace(f"{node.module}", "torch", 1)
        names = [alias.asname or alias.name]
    else:
        package, new = alias.name, written.replace(alias.name, "torch.amp", 1)
        names = [alias.asname] if alias.asname else []
    if package not in PACKAGES or not names:
        return {}
    edits = list(module.replacement_edits(node, new))
    for name in module.nodes:
        if isinstance(name, ast.Name) and name.id in names:
            use = name if of_names else module.parents[name]
            if not isinstance(use, ast.Name | ast.Attribute) or not isinstance(name.ctx, ast.Load):
                return {}
            last = last_name(use)
            known = last in (*CALLED, *DECORATORS) and module.resolve(use) == f"{package}.{last}"
            changed = _edits_naming_device(module, use, last, PACKAGES[package]) if known else None
            if changed is None:
                return {}
            edits += changed
    return dict.fromkeys(names, tuple(edits))


@register_rule(
    "AMP304",
    Mistake(
        "AMP306",
        "clip-grad-norm-deprecated",
        "`clip_grad_norm` without the underscore",
        "deprecated since torch 0.4, with a warning for every step",
        "write `clip_grad_norm_`",
        """
torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)  # AMP306  # wrong
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # right
tensor.clip_grad_norm(1.0)  # right
""",
        fixable=True,
    ),
    Mistake(
        "AMP307",
        "amp-init",
        "`amp.init()`, the interface of Apex before 2019",
        "removed from Apex: an error in newer versions",
        "move to `torch.amp`; `ampcompare exec` runs it as it is",
        """
amp_handle = amp.init(enabled=True)  # AMP307  # wrong
model, optimizer = amp.initialize(model, optimizer)  # right
""",
    ),
    Mistake(
        "AMP309",
        "autocast-query-deprecated",
        "a torch function that reads or sets autocast for one fixed device",
        "deprecated since torch 2.4: a DeprecationWarning now, later an error",
        'pass the device: `torch.get_autocast_dtype("cuda")`, `torch.is_autocast_enabled("cpu")`',
        """
dtype = torch.get_autocast_gpu_dtype()  # AMP309  # wrong
dtype = torch.get_autocast_dtype("cuda")  # right
""",
        fixable=True,
    ),
    needs=(
        "apex|amp|clip_grad_norm|autocast_gpu_dtype|autocast_cpu_dtype|autocast_cpu_enabled",
        "init|initialize|scale_loss|master_params|state_dict|disable_casts|_function|clip_grad_norm|autocast_gpu_dtype|autocast_cpu_dtype|autocast_cpu_enabled",
    ),
)
def calls_of_removed_functions(module: LintModule) -> Iterator[Finding]:
    """Calls of what was renamed, removed, or is no part of the package."""
    for call, full in module.resolved_calls:
        package, _, last = full.rpartition(".")
        if (
            package in ("torch.cuda.amp", "torch.amp")
            and last in OF_APEX
            and isinstance(call.func, ast.Attribute)
        ):
            yield module.make_finding("AMP304", call, f"`{package}` has no `{last}`")
        elif full == "torch.nn.utils.clip_grad_norm":
            written = dotted_text_of(call.func).endswith("clip_grad_norm") and isinstance(
                call.func, ast.Attribute
            )
            edits = module.insertion_edits(module.end_of(call.func), "_") if written else ()
            yield module.make_finding("AMP306", call, "`clip_grad_norm` is deprecated", edits)
        elif full == "apex.amp.init":
            yield module.make_finding("AMP307", call, "`amp.init` was removed")
        elif full in QUERIES and not is_only_fallback(module, call):
            source = module.source(call.func)
            edits = ()
            if isinstance(call.func, ast.Attribute) and not call.keywords:
                opening = _place_after_parenthesis(module, call)
                new = f"{module.source(call.func.value)}.{QUERIES[full]}" + (", " if call.args else "")
                edits = (Edit(module.start_of(call), opening, new),)
            yield module.make_finding("AMP309", call, f"`{source}` is deprecated", edits)


@register_rule(
    Mistake(
        "AMP312",
        "tf32-switches-mixed",
        "TF32 is switched by `fp32_precision`, and by an older switch such as `allow_tf32` too",
        "torch raises a RuntimeError where an old switch is read after a new one was set, by the script or a library",
        'use one kind: `fp32_precision = "tf32"` from torch 2.9 on, or the older ones alone',
        """
torch.backends.cuda.matmul.fp32_precision = "tf32"  # wrong
torch.backends.cudnn.allow_tf32 = True  # AMP312  # wrong
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # right
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # right
else:  # right
    torch.backends.cuda.matmul.allow_tf32 = True  # right
""",
    ),
    needs=("fp32_precision", "allow_tf32|float32_matmul_precision|flags"),
)
def mixed_tf32_switches(module: LintModule) -> Iterator[Finding]:
    """Old switches of TF32 in a module that sets a new one, and not in its place."""
    used = [
        (node, module.resolve(node) or "")
        for node in module.nodes
        if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in TF32_NAMES
    ]
    new = [
        node for node, full in used if full.endswith(".fp32_precision") and isinstance(node.ctx, ast.Store)
    ]
    for node, full in used if new else ():
        if full in OLD_TF32 and not is_only_fallback(module, node):
            setting = next((one for one in new if not never_run_together(module, one, node)), None)
            if setting is not None and not is_only_fallback(module, setting):
                shown = f"line {setting.lineno} sets `{dotted_text_of(setting)}`"
                yield module.make_finding("AMP312", node, shown)


@register_rule(
    Mistake(
        "AMP305",
        "amp-not-imported",
        "`amp.initialize` or `amp.scale_loss` is called, but the module never binds `amp`",
        "a NameError when the line runs: the import was deleted, the calls were not",
        "delete the calls too, or import `amp`",
        """
import torch  # wrong
from apex import amp  # right

model, optimizer = amp.initialize(model, optimizer)  # AMP305  # wrong

def prepare(amp, model):  # right
    return amp.initialize(model)  # right


try:  # right
    model = amp.initialize(model)  # right
except NameError:  # right
    pass  # right
""",
    ),
    needs=("initialize|scale_loss", "amp"),
)
def amp_not_imported(module: LintModule) -> Iterator[Finding]:
    """Calls of `amp`, where nothing binds that name."""
    called = [
        each for each in module.calls if dotted_text_of(each.func) in ("amp.initialize", "amp.scale_loss")
    ]
    if not called or any(each.alias.name == "*" for each in module.imports):
        return
    if module.code_mentions_pattern(r"globals\(\)|setattr\(|exec\("):
        return
    bound = {
        name
        for scope in module.scopes
        for name in (*scope.imports, *scope.parameters, *scope.values, *scope.functions)
    }
    if "amp" in bound:
        return
    for call in called:
        if not any(isinstance(outer, ast.Try) for outer in module.ancestors(call)):
            yield module.make_finding("AMP305", call, "nothing in this module binds `amp`")
