"""Arms that certainly cannot train a script, with line and reason, before any cell starts.

Only what no branch of the script can change is refused here. Everything else is refused by the cell, at the call.

Only a literal counts, in a call that no branch leaves out: the rest is refused by the cell, when the trainer is made.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ampcompare.backends.apex_levels import apex_level
from ampcompare.backends.arm import Arm
from ampcompare.runs.settings.script import ScriptConfig
from ampcompare.source.document import read_document
from ampcompare.source.module import Module
from ampcompare.source.syntax import argument, dotted

__all__ = ["why_refused"]

MAX_FILES = 200
# Installed packages that never use mixed precision on their own.
PLAIN_PACKAGES = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "numpy", "scipy", "sklearn", "pandas", "matplotlib", "PIL", "cv2"),
        *("apex", "amp_C", "ampcompare", "tqdm", "yaml", "tabulate", "wandb", "mlflow", "tensorboardX", "psutil"),
        *("termcolor", "scikit-learn", "packaging", "einops", "h5py", "seaborn", "colorama", "requests"),
    }
)
# They run code that no import names.
OPAQUE_MODULES = frozenset({"importlib", "imp", "runpy", "subprocess"})
OPAQUE_CALLS = frozenset({"__import__", "exec", "eval"})
APEX = {"apex", "ampcompare", "fp16_utils", "FP16_Optimizer"}
TORCH = {"autocast", "GradScaler"}
ENTRIES = {"initialize", "init"}
LIGHTNING = ("lightning", "lightning.pytorch", "pytorch_lightning")
LIGHTNING_PACKAGES = {"lightning", "pytorch_lightning", "lightning_fabric"}
CONSTRUCTORS = {
    **{f"{package}.Trainer": "lightning" for package in LIGHTNING},
    **{f"{package}.Fabric": "lightning" for package in ("lightning", "lightning.fabric", "lightning_fabric")},
    "accelerate.Accelerator": "accelerate",
    "transformers.TrainingArguments": "transformers",
    "transformers.Seq2SeqTrainingArguments": "transformers",
    "deepspeed.initialize": "deepspeed",
}
# What a keyword begins with, by library; "" stands for anything but nothing, such as a plugin.
MIXED = 'take precision="16-mixed" or "bf16-mixed"'
KEYWORDS = {
    "lightning": {
        "strategy": {"deepspeed": 'take strategy="ddp"', "fsdp": 'take strategy="ddp"', "xla": 'take strategy="ddp"'},
        "precision": {"64": MIXED, "transformer-engine": MIXED},
    },
    "accelerate": {
        "mixed_precision": {"fp8": 'take mixed_precision="bf16"'},
        "deepspeed_plugin": {"": "leave it out"},
        "fsdp_plugin": {"": "leave it out"},
        "megatron_lm_plugin": {"": "leave it out"},
    },
    "transformers": {"deepspeed": {"": "leave it out"}, "fsdp": {"": "leave it out"}},
    "deepspeed": {},
}
STRATEGIES = {"DeepSpeedStrategy": "deepspeed", "FSDPStrategy": "fsdp", "XLAStrategy": "xla"}
# Arguments of a script that mean the same wherever they are known, with what their values begin with; "" is any value.
ARGUMENTS = {
    "deepspeed": {"": "leave it out"},
    "deepspeed_config": {"": "leave it out"},
    "use_deepspeed": {"": "leave it out"},
    "use_fsdp": {"": "leave it out"},
    "use_megatron_lm": {"": "leave it out"},
    "fsdp": dict.fromkeys(("full_shard", "shard_grad_op", "hybrid_shard"), "leave it out"),
    "mixed_precision": {"fp8": "leave it out"},
}
# Those of LightningCLI and Hydra, such as `--trainer.strategy=fsdp`; without `trainer.` for a script of Lightning only.
TRAINER_ARGUMENTS = KEYWORDS["lightning"]
BRANCHES = (ast.If, ast.IfExp, ast.Try, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.BoolOp, ast.ExceptHandler)
NAMES = {
    "initialize": ("apex.amp.initialize", "ampcompare.apex.amp.initialize"),
    "init": ("apex.amp.init", "ampcompare.apex.amp.init"),
}
KINDS = {full: kind for kind, names in NAMES.items() for full in names}
WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True, eq=False)
class _SourceFiles:
    """What was found.

    Attributes:
        files: the script first, by their paths.
        complete: whether these files are all code that can reach mixed precision.
    """

    files: dict[Path, Module]
    complete: bool


def _read_files(script: Path, root: Path) -> _SourceFiles:
    """Read a script and what it imports, as far as it is Python source.

    Args:
        root: the first folder in which its imports are looked up.
    """
    found: dict[Path, Module] = {}
    waiting, complete = [script], True
    while waiting:
        path = waiting.pop(0)
        if path in found:
            continue
        if len(found) == MAX_FILES:
            return _SourceFiles(found, complete=False)
        try:
            module = Module(read_document(path).text)
        except (OSError, ValueError):  # the errors of both are of these kinds
            complete = False
            continue
        found[path] = module
        for name in _imported(module, path, root):
            files = _files_of(name, root)
            waiting += files
            head = name.partition(".")[0]
            if not files and (head in OPAQUE_MODULES or head not in {*sys.stdlib_module_names, *PLAIN_PACKAGES}):
                complete = False
        complete = complete and not any(map(_is_opaque, module.calls))
    return _SourceFiles(found, complete)


def _is_opaque(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in OPAQUE_CALLS


def _imported(module: Module, path: Path, root: Path) -> Iterator[str]:
    """Yield the full names of modules that a file imports; `from a import b` may import `a.b`."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                folder = path.parents[node.level - 1]
                parts = folder.relative_to(root).parts if folder.is_relative_to(root) else ()
                base = ".".join([*parts, *filter(None, [node.module])])
            if base:
                yield base
            for alias in node.names:
                name = ".".join(filter(None, [base, alias.name]))
                if _files_of(name, root):
                    yield name


def _files_of(name: str, root: Path) -> list[Path]:
    """Return the files of a module below `root`, those of its parents first; none if it is not there."""
    files: list[Path] = []
    place = root
    for part in name.split("."):
        place /= part
        package, module = place / "__init__.py", place.with_name(f"{place.name}.py")
        if package.is_file():
            files.append(package)
        elif module.is_file():
            files.append(module)
        elif not place.is_dir():
            return [] if place.parent == root else files
    return files


NO_SOURCE = _SourceFiles({}, complete=False)


def why_refused(script: ScriptConfig, arm: Arm) -> str:
    """Return why an arm certainly cannot train a script, with its line; "" where that is not certain."""
    path = _path_of(script)
    source = None
    if path is not None:
        source = _source(path, Path() if script.is_module else path.parent, script.sha256)
    if arm.backend != "script" and (why := _foreign_precision(source or NO_SOURCE, script.arguments)):
        return why
    uses = _uses(source) if source is not None and source.complete else None
    if uses is None:
        return ""
    uses_apex, uses_torch = bool(uses.words & APEX), bool(uses.words & TORCH)
    if uses_apex and uses_torch:
        return ""  # which of both depends on branches
    if uses_apex and uses.words & ENTRIES:
        return _for_apex(uses, arm)
    return _for_closures(uses, arm)


def _path_of(script: ScriptConfig) -> Path | None:
    """Return the file of a script, or of a module below this folder."""
    if not script.is_module:
        return Path(script.name)
    base = Path(*script.name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__main__.py") if path.is_file()), None)


@functools.lru_cache(maxsize=8)
def _source(path: Path, root: Path, _sha256: str | None) -> _SourceFiles:
    return _read_files(path, root)


@functools.lru_cache(maxsize=8)
def _uses(source: _SourceFiles) -> _Uses:
    return _find_uses(source)


def _for_closures(uses: _Uses, arm: Arm) -> str:
    """Return why an arm cannot run the closures of a script that lacks `apex.amp`."""
    if not uses.closures or uses.steps or not _unscales(arm):
        return ""
    place = uses.closures[0].place
    if "GradScaler" in uses.words:
        return (
            f"{place}: scaler.step is called with a closure, which this arm does not support, since a step may have to "
            "be skipped; call it without one"
        )
    if "LBFGS" in uses.words:
        return (
            f"{place}: LBFGS runs its closure several times in one step, and this arm unscales gradients once per "
            "step; compare fp32 or native:bf16"
        )
    return ""


def _for_apex(uses: _Uses, arm: Arm) -> str:
    calls = uses.calls["initialize"]
    if calls and all(use.enabled is False for use in calls) and not _is_fp32(arm):
        return (
            f"{calls[0].place}: amp.initialize has enabled=False, so no arm has any effect; run the script with "
            f"amp enabled"
        )
    if uses.calls["init"] and "initialize" not in uses.words and arm.backend != "apex":
        return (
            f"{uses.calls['init'][0].place}: amp.init has no models and optimizers, which this arm prepares; call "
            "amp.initialize instead"
        )
    if uses.closures and not uses.steps and (arm.backend in ("native", "half") or arm.options.get("opt_level") == "O2"):
        return (
            f"{uses.closures[0].place}: optimizer.step is called with a closure, which this arm does not support, "
            f"since a step may have to be skipped; call step() without one"
        )
    return ""


def _unscales(arm: Arm) -> bool:
    """Return whether an arm unscales gradients, or moves them to master weights, once per step."""
    if arm.backend == "native":
        return bool(arm.options.get("dtype") == "float16")
    if arm.backend == "half":
        return bool(arm.options.get("master_weights") or arm.options.get("loss_scale"))
    if arm.backend != "apex":
        return False
    level = apex_level(arm.options)
    return level.patch_torch_functions or bool(level.master_weights) or level.loss_scale != 1.0


def _is_fp32(arm: Arm) -> bool:
    return arm.backend == "fp32" or arm.options.get("opt_level") == "O0"


def _foreign_precision(source: _SourceFiles, arguments: Sequence[str]) -> str:
    """Return why no arm but `script` can train a script, with the place; "" where that is not certain."""
    is_lightning = any(
        each.full.partition(".")[0] in LIGHTNING_PACKAGES for module in source.files.values() for each in module.imports
    )
    for number, text in enumerate(arguments):
        name, has_value, value = text.partition("=")
        key = name.lstrip("-+").replace("-", "_")
        known = ARGUMENTS.get(key, {}) if name.startswith("--") else {}
        if key.startswith("trainer.") or (is_lightning and name.startswith("--")):
            known = TRAINER_ARGUMENTS.get(key.removeprefix("trainer.").removesuffix(".class_path"), known)
        given = value if has_value else next(iter(arguments[number + 1 : number + 2]), "")
        given = given.strip("'\"")
        for begins, advice in known.items():
            if STRATEGIES.get(given.rpartition(".")[2], given).startswith(begins):
                shown = f"{name} {given}" if begins else name
                return _refusal(f"the argument {shown}", advice)
    found = [one for path, module in source.files.items() for one in _constructed(module, path)]
    if found and all(what for _, what in found):
        return f"{found[0][0]}: {found[0][1]}"
    return ""


def _refusal(what: str, advice: str) -> str:
    return f"{what} has its own precision and steps, which this arm cannot replace; {advice}, or compare script only"


def _constructed(module: Module, path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place of each trainer that a file makes, and why it is refused; "" where it may train."""
    for call, name in module.resolved:
        library = CONSTRUCTORS.get(name)
        if library is not None:
            what = "" if _is_in_branch(module, call) else _why(library, call)
            yield f"{path}:{call.lineno}", what


def _why(library: str, call: ast.Call) -> str:
    if library == "deepspeed":
        return _refusal("DeepSpeed", "let the script train without it")
    for keyword in call.keywords:
        begins = KEYWORDS[library].get(keyword.arg or "")
        value = None if begins is None else _literal(keyword.value)
        if begins is None or value is None:
            continue
        for begin, advice in begins.items():
            if value.startswith(begin):
                return _refusal(f"{keyword.arg}={ast.unparse(keyword.value)} of {library}", advice)
    return ""


def _literal(value: ast.expr) -> str | None:
    """Return what a keyword is given; None where that is not certain, or nothing."""
    if isinstance(value, ast.Constant):
        return str(value.value) if value.value else None
    if isinstance(value, ast.Call):
        name = (dotted(value.func) or "").rpartition(".")[2]
        return STRATEGIES.get(name, name if name.endswith("Plugin") else None)
    return "a dictionary" if isinstance(value, ast.Dict) and value.keys else None


def _is_in_branch(module: Module, call: ast.Call) -> bool:
    return any(
        isinstance(outer, BRANCHES) and not (isinstance(outer, ast.If) and "__main__" in ast.unparse(outer.test))
        for outer in module.ancestors(call)
    )


@dataclass(frozen=True)
class _Use:
    """One call.

    Attributes:
        place: as `train.py:12`.
        enabled: the literal value of the argument of that name; None where it is missing or no literal.
    """

    place: str
    enabled: bool | None = None


@dataclass
class _Uses:
    """What the files of a script do.

    Attributes:
        words: all names and words in the text, comments included: what is not among them is not used.
        calls: by kind, see `NAMES`.
        closures: steps with a closure.
        steps: whether an optimizer may be stepped without one.
    """

    words: set[str] = field(default_factory=set)
    calls: dict[str, list[_Use]] = field(default_factory=lambda: {kind: [] for kind in NAMES})
    closures: list[_Use] = field(default_factory=list)
    steps: bool = False


def _find_uses(source: _SourceFiles) -> _Uses:
    """Return what all files of a script do."""
    uses = _Uses()
    for path, module in source.files.items():
        uses.words.update(WORD.findall(module.text))
        for call in module.calls:
            kind = KINDS.get(module.resolve(call.func) or "")
            if kind is not None:
                uses.calls[kind].append(_use(path, call))
            elif isinstance(call.func, ast.Attribute) and call.func.attr == "step":
                if _has_closure(module, call):
                    uses.closures.append(_use(path, call))
                elif "sched" not in (dotted(call.func) or "").lower():
                    uses.steps = True
    return uses


def _use(path: Path, call: ast.Call) -> _Use:
    given = argument(call, "enabled")
    enabled = given.value if isinstance(given, ast.Constant) and isinstance(given.value, bool) else None
    return _Use(f"{path}:{call.lineno}", enabled)


def _has_closure(module: Module, call: ast.Call) -> bool:
    return any(_is_function(module, call, value) for value in call.args) or argument(call, "closure") is not None


def _is_function(module: Module, call: ast.Call, value: ast.expr) -> bool:
    if isinstance(value, ast.Lambda):
        return True
    scopes = module.scope_of[call].enclosing()
    return isinstance(value, ast.Name) and any(value.id in scope.functions for scope in scopes)
