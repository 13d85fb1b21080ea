"""Run a script for some steps in this process and keep what it trained: the child process of `migrate --verify`.

The modules that the script imports from its own folder are rewritten as they are imported, if the script is: for torch,
or for the adapter. There is no Apex then, whatever is installed: not by `import`, `sys.modules` or `find_spec`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ampcompare.apex._install import KERNELS, STANDALONE, ApexFinder
from ampcompare.base.environment.packages import is_in_site_folder
from ampcompare.base.processes.start import add_working_directory_first
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.target import (
    Target,
    digests_of_apex_files_elsewhere,
    loaded_apex_files_in_folder,
)
from ampcompare.script.process.execute import execute
from ampcompare.script.process.prepare import PreparedProcess, prepare_process
from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import TEMPLATE, adapt_text, adapter_text
from ampcompare.source.migrate.adapter.mark import has_adapter_mark
from ampcompare.source.migrate.project import migrate_file

if TYPE_CHECKING:
    from ampcompare.script.beginning.first_weights import FirstWeightsFollower
    from ampcompare.script.recording.recorder import RecordedSteps
    from ampcompare.script.watch.cell_facts import FirstBatchesHashWatch

SEED = 20250508
MOVED = "moved.json"  # in the folder of a run: what becomes of files, by their paths
# How a script is rewritten.
FOR_TORCH, FOR_ADAPTER = "torch", "adapter"
# Relative: half a unit in the last place of an fp16 weight, up or down, is what a rounding makes at most.
UNIT = 2.0**-11
MAX_READS = 10_000


def main() -> int:
    """Run what `sys.argv[1]`, a JSON object, says; write the rows and weights into its folder."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    add_working_directory_first()
    folder = Path(request["folder"])
    trace = _RewriteTraceRecorder(
        request["steps"], twin=request["twin"], first_weights=request["first_weights"]
    )

    def prepare(given: ExecSettings) -> PreparedProcess:
        prepared = prepare_process(given)
        assert prepared.rows is not None
        trace.begin(prepared.rows)
        return prepared

    texts = json.loads((folder / MOVED).read_text(encoding="utf-8"))
    settings = ExecSettings(
        opt_level=request["opt_level"],
        record=str(folder / "record.jsonl"),
        device="cpu",
        compat_torch=True,
        guards="off",
        name=request["script"],
        arguments=tuple(request["arguments"]),
    )
    status = execute(
        _SeededTarget(request["script"], list(request["arguments"]), request["rewrite"], texts),
        settings,
        prepare,
    )
    trace.write_trace(folder, request["script"])
    return status


class RewrittenTarget(Target):
    """A script that is rewritten, with the modules of its folder as they are imported.

    Args:
        how: for "torch", or the "adapter".
        texts: what becomes of files, new ones too, by their paths: as if they had been written. Without it the modules
            of the folder are rewritten as they are imported, and the adapter is found from everywhere.
    """

    def __init__(
        self, name: str, arguments: list[str], how: str, texts: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, arguments, is_module=False)
        self._files = _MigratedFiles(how, texts)

    def load_code_and_main(self) -> tuple[CodeType, ModuleType]:
        """Return the rewritten code and its `__main__`; there is no Apex from here on."""
        sys.dont_write_bytecode = True
        path = Path(self.name).resolve()
        _hide_apex_from_imports()
        sys.meta_path.insert(0, _RewritingFinder(path.parent, self._files))
        _, main = super().load_code_and_main()
        return compile(self._files.migrated_text_of(path), str(path), "exec", dont_inherit=True), main


class _SeededTarget(Target):
    """A script that starts with fixed seeds, and rewritten if it is to be."""

    def __init__(
        self, name: str, arguments: list[str], rewrite: str | None, texts: Mapping[str, str]
    ) -> None:
        super().__init__(name, arguments, is_module=False)
        self._rewritten = None
        if rewrite is not None:
            self._rewritten = RewrittenTarget(name, arguments, rewrite, texts)

    def load_code_and_main(self) -> tuple[CodeType, ModuleType]:
        """Return the code and its `__main__`."""
        from ampcompare.script.arm_process import (
            seed_all_generators,  # which imports torch, and is not to find the script's files
        )

        seed_all_generators(SEED)
        return (
            super().load_code_and_main() if self._rewritten is None else self._rewritten.load_code_and_main()
        )


def _is_apex_module(name: str) -> bool:
    return name.partition(".")[0] in {"apex", *STANDALONE, *KERNELS}


class _FinderWithoutApex(importlib.abc.MetaPathFinder):
    """Finds what another finder finds, without Apex."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        found: importlib.machinery.ModuleSpec | None = None
        if not _is_apex_module(fullname):
            found = self._finder.find_spec(fullname, path, target)
        return found

    def find_distributions(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Yield the installed packages that `importlib.metadata` finds, without Apex."""
        find = getattr(self._finder, "find_distributions", None)
        yield from () if find is None else (x for x in find(*args, **options) if x.name != "apex")


def _hide_apex_from_imports() -> None:
    """Let this process be one in which no Apex is installed, by imports, lists of modules and of packages."""
    listed = pkgutil.iter_modules

    @functools.wraps(listed)
    def iter_modules_without_apex(path: Any = None, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
        yield from (each for each in listed(path, prefix) if prefix or not _is_apex_module(each.name))

    pkgutil.iter_modules = iter_modules_without_apex
    for name in [each for each in sys.modules if _is_apex_module(each)]:
        del sys.modules[name]
    others = [each for each in sys.meta_path if not isinstance(each, ApexFinder)]
    sys.meta_path[:] = [_FinderWithoutApex(each) for each in others]


class _MigratedFiles:
    """What becomes of the files of a script; the arguments are those of `RewrittenTarget`."""

    def __init__(self, how: str, texts: Mapping[str, str] | None) -> None:
        self.how = how
        self._texts = (
            None if texts is None else {os.path.realpath(path): text for path, text in texts.items()}
        )

    def has_migrated_text_of(self, path: Path) -> bool:
        """Return whether a file is known to move."""
        return self._texts is not None and os.path.realpath(path) in self._texts

    def migrated_text_of(self, path: Path) -> str:
        """Return the text of a file behind the move."""
        if self._texts is not None:
            known = self._texts.get(os.path.realpath(path))
            return path.read_text(encoding="utf-8") if known is None else known
        if self.how == FOR_ADAPTER:
            return adapt_text(path.read_text(encoding="utf-8")).text
        result = migrate_file(path)
        if result.migration is not None:
            return result.migration.text
        return path.read_text(encoding="utf-8") if result.document is None else result.document.text

    def adapter_path_for_import(self, fullname: str, path: Sequence[str] | None) -> str | None:
        """Return the file of the adapter that an import finds; None if it finds none, or one that is written already.

        Args:
            path: of the package in which it is looked for; None for `sys.path`.
        """
        if self.how != FOR_ADAPTER or fullname.rpartition(".")[2] != ADAPTER:
            return None
        if self._texts is None:
            return str(TEMPLATE) if fullname == ADAPTER else None
        for entry in sys.path if path is None else path:
            file = os.path.join(entry or os.getcwd(), f"{ADAPTER}.py")
            if os.path.exists(file):
                return None
            if os.path.realpath(file) in self._texts:
                return file
        return None


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    """Loads a rewritten module."""

    def __init__(self, fullname: str, path: str, files: _MigratedFiles) -> None:
        super().__init__(fullname, path)
        self._files = files

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(self._files.migrated_text_of(Path(self.path)), self.path, "exec", dont_inherit=True)


class _AdapterLoader(importlib.machinery.SourceFileLoader):
    """Loads the adapter, for which there is no file yet."""

    def get_code(self, fullname: str) -> CodeType | None:
        return compile(adapter_text(), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        from ampcompare.script.imports.adapter_imports import call_adapter_followers  # which imports torch

        super().exec_module(module)
        call_adapter_followers(module)


class _RewritingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules below a folder that use Apex, those elsewhere that are moved, and the adapter."""

    def __init__(self, root: Path, files: _MigratedFiles) -> None:
        self._root = root
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        adapter = self._files.adapter_path_for_import(fullname, path)
        if adapter is not None:
            return importlib.machinery.ModuleSpec(fullname, _AdapterLoader(fullname, adapter), origin=adapter)
        if _is_apex_module(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return None
        origin = Path(spec.origin).resolve()
        is_own = origin.is_relative_to(self._root) and not is_in_site_folder(str(origin))
        if not is_own and not self._files.has_migrated_text_of(origin):
            return None
        if b"apex" not in origin.read_bytes() or has_adapter_mark(str(origin)):
            return None
        spec.loader = _RewritingLoader(fullname, spec.origin, self._files)
        return spec


class _StepsReached(SystemExit):
    """Ends the script after its last step, past every `except Exception`."""


class _RewriteTraceRecorder:
    """The parameters of each optimizer after each step, and the types in which values leave the model and the device.

    A twin's weights are changed behind its first step, each by a unit in the last place of fp16.

    Args:
        first_weights: for a run that is compared with one of another stack: the file from which it begins, or that it
            is to write, if there is none yet.
    """

    def __init__(self, steps: int, *, twin: bool = False, first_weights: str | None = None) -> None:
        self._steps = steps
        self._stored = None if first_weights is None else Path(first_weights)
        self._first: FirstWeightsFollower | None = None
        self._batches: FirstBatchesHashWatch | None = None
        self._clipped: float | None = None  # the norm that a clipping of gradients has found, before it clips
        self._is_twin = twin
        self._plain_steps = self._unchecked_steps = 0
        # ids of optimizers whose gradients wait for the step of a GradScaler
        self._unscaled: set[int] = set()
        self._in_scaler_step = False
        self._depth = 0  # of calls of modules
        self._evaluations: list[str] = []
        self._evaluation_norms: list[float] = []
        self._reads: list[str] = []
        self._digests: dict[int, list[list[str]]] = {}
        self._norms: dict[int, list[float | None]] = {}
        self._clip_norms: dict[int, list[float | None]] = {}
        self._given: dict[int, float] = {}  # norms of the gradients of steps, by the id of the optimizer
        self._passes: list[dict[str, tuple[int, int]]] = []
        self._halves: set[str] = set()  # 16-bit types of what losses are computed from
        self._policy: list[float] = []  # how the loss scale of a GradScaler grows, backs off, and how often
        self._clears: list[bool] = [False]  # whether gradients were cleared before each step
        self._final: dict[str, Any] = {}
        self._rows: RecordedSteps | None = None
        self._is_cut = self._is_inside = self._is_noting = False

    def begin(self, rows: RecordedSteps) -> None:
        """Watch every step that is recorded, and what is given to it: master weights have no gradients behind it."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from ampcompare.base.patches import Layer, PatchPoints, Subscriptions

        self._rows, rows.on_step = rows, self._note_digests_or_end_script
        events = Subscriptions(Layer.RECORD)
        events.wrap(*PatchPoints.BACKWARD, self._note_backward_result_types)
        events.wrap(*PatchPoints.FORWARD, self._note_evaluation_output)
        events.wrap(torch.amp.GradScaler, "unscale_", self._note_optimizer_unscaled)
        events.wrap(torch.amp.GradScaler, "step", self._note_scaler_step)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            events.wrap(owner, "zero_grad", self._note_cleared_gradients)
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        self._watch_reads_by_host()
        if self._stored is not None:
            from ampcompare.script.beginning.first_weights import FirstWeightsFollower
            from ampcompare.script.watch.cell_facts import FirstBatchesHashWatch

            self._first = FirstWeightsFollower(events, self._stored if self._stored.exists() else None)
            self._batches = FirstBatchesHashWatch(lambda hashes, draws: None)
            events.wrap(torch.nn.utils, "clip_grad_norm_", self._note_clipped_norm)

    def _note_clipped_norm(self, inner: Any, *args: Any, **options: Any) -> Any:
        norm = inner(*args, **options)
        self._clipped = float(norm)
        return norm

    def _before_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        if self._first is not None:
            self._first.note_step_and_is_first()
        self._plain_steps += 1
        if id(optimizer) in self._unscaled and not self._in_scaler_step:
            self._unchecked_steps += 1
        self._given[id(optimizer)] = _norm_of_step_gradients(optimizer)

    def _note_scaler_step(self, inner: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        if scaler.is_enabled():
            policy = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
            self._policy = list(map(float, policy))
        self._in_scaler_step = True
        try:
            return inner(scaler, *args, **options)
        finally:
            self._in_scaler_step = False
            self._unscaled.discard(id(args[0] if args else options.get("optimizer")))

    def _note_optimizer_unscaled(self, inner: Any, scaler: Any, optimizer: Any) -> Any:
        if scaler.is_enabled():
            self._unscaled.add(id(optimizer))
        return inner(scaler, optimizer)

    def _note_cleared_gradients(self, inner: Any, owner: Any, *args: Any, **options: Any) -> Any:
        self._clears[-1] = True
        return inner(owner, *args, **options)

    def _watch_reads_by_host(self) -> None:
        """Note in which type values come to the host; O1 replaces the same function, around this one."""
        import torch

        cpu = torch.Tensor.cpu

        @functools.wraps(cpu)
        def read(tensor: Any, *args: Any, **options: Any) -> Any:
            result = cpu(tensor, *args, **options)
            if not self._is_noting and len(self._reads) < MAX_READS and result.is_floating_point():
                self._reads.append(str(result.dtype).removeprefix("torch."))
            return result

        torch.Tensor.cpu = read  # type: ignore[method-assign, assignment]

    def _note_evaluation_output(self, inner: Any, module: Any, *args: Any, **options: Any) -> Any:
        """Note the type and the norm of what a model returns in an evaluation."""
        import torch

        self._depth += 1
        try:
            result = inner(module, *args, **options)
        finally:
            self._depth -= 1
        if not self._depth and not torch.is_grad_enabled() and len(self._evaluations) < MAX_READS:
            found = result[0] if isinstance(result, (list, tuple)) and result else result
            if isinstance(found, torch.Tensor) and found.is_floating_point():
                self._evaluations.append(str(found.dtype).removeprefix("torch."))
                self._evaluation_norms.append(self._fp64_norm_of(found))
        return result

    def _fp64_norm_of(self, tensor: Any) -> float:
        """Return the norm of a tensor in fp64, by functions that no casts of O1 reach."""
        import numpy

        self._is_noting = True
        values = tensor.detach().float().cpu().numpy()
        self._is_noting = False
        return float(numpy.linalg.norm(values.astype(numpy.float64)))

    def _note_digests_or_end_script(self, number: int) -> None:
        assert self._rows is not None
        digests = self._digests.setdefault(number, [])
        if len(digests) >= self._steps:
            self._is_cut = True
            raise _StepsReached(0)
        self._is_noting = True
        digests.append([_digest_of_tensor(each) for each in _parameters_of_optimizer(self._rows, number)])
        self._is_noting = False
        if self._is_twin:
            self._is_twin = False
            _nudge_weights_by_fp16_unit(each for one in self._rows.optimizers for each in one.param_groups)
        optimizer = self._rows.optimizers[number]
        stepped = [id(each) for each in (optimizer, getattr(optimizer, "optimizer", None))]
        norm = next((self._given[each] for each in stepped if each in self._given), None)
        self._norms.setdefault(number, []).append(norm)
        self._clip_norms.setdefault(number, []).append(norm if self._clipped is None else self._clipped)
        self._clipped = None
        self._clears.append(False)
        self._given.clear()
        if len(digests) == self._steps:
            self._keep_copy_of_last_weights()

    def _note_backward_result_types(self, inner: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        """Note the operations of a backward pass by their precision."""
        if self._is_inside:  # of a checkpoint: its operations run a second time
            return inner(tensors, *args, **options)
        counts, halves = _backward_result_counts_and_half_types(tensors)
        self._passes.append(counts)
        self._halves |= halves
        self._is_inside = True
        try:
            return inner(tensors, *args, **options)
        finally:
            self._is_inside = False

    def _keep_copy_of_last_weights(self) -> None:
        self._final = {
            f"{number}.{index}": each.detach().float().cpu().numpy().copy()
            for number in self._digests
            for index, each in enumerate(_parameters_of_optimizer(self._rows, number))
        }

    def write_trace(self, folder: Path, script: str) -> None:
        """Write digests of every step, the last weights, and which files of the script use Apex."""
        import numpy

        names: dict[str, str] = {}
        if self._digests:
            if not self._final:
                self._keep_copy_of_last_weights()
            names = _parameter_names(self._rows, list(self._digests))
            numpy.savez(folder / "weights.npz", **self._final)
        if self._first is not None and self._stored is not None and self._first.kept:
            import torch

            torch.save(self._first.kept, self._stored)
        content = {
            "is_cut": self._is_cut,
            "plain_steps": self._plain_steps,
            "unchecked_steps": self._unchecked_steps,
            "initialize": _state_of_amp_initialize(),
            "evaluations": self._evaluations,
            "evaluation_norms": self._evaluation_norms,
            "reads": self._reads,
            "files": loaded_apex_files_in_folder(script),
            "others": digests_of_apex_files_elsewhere(script),
            "digests": self._digests,
            "names": names,
            "norms": self._norms,
            "clip_norms": self._clip_norms,
            "batches": [] if self._batches is None else self._batches.hashes,
            "draws": [] if self._batches is None else self._batches.draws,
            "first_changed": 0 if self._first is None else self._first.changed,
            "passes": self._passes,
            "halves": sorted(self._halves),
            "policy": self._policy or _first_dynamic_scale_policy(),
            "clears": self._clears[:-1],
        }
        (folder / "trace.json").write_text(json.dumps(content), encoding="utf-8")


def _nudge_weights_by_fp16_unit(groups: Iterable[dict[str, Any]]) -> None:
    """Change every weight by a unit in the last place of fp16, up or down by chance, which is not that of torch."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for parameter in [each for group in groups for each in group["params"]]:
        signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
        parameter.data.add_(parameter.data * signs, alpha=UNIT)


def _state_of_amp_initialize() -> Literal["called", "disabled", ""]:
    """Return what the script did with `amp.initialize` on the engine: "called", "disabled", or "" for nothing."""
    state = sys.modules.get("ampcompare.apex.amp")
    properties = None if state is None else state._amp_state.__dict__.get("opt_properties")
    if properties is None:
        return ""
    return "called" if properties.enabled else "disabled"


def _first_dynamic_scale_policy() -> list[float]:
    """Return how the first dynamic loss scale of the engine grows, backs off, and how often; nothing without one."""
    state = sys.modules.get("ampcompare.apex.amp")
    scalers = () if state is None else state._amp_state.__dict__.get("loss_scalers", ())
    return next(([2.0, 0.5, float(each._scale_seq_len)] for each in scalers if each.dynamic), [])


def _parameters_of_optimizer(rows: Any, number: int) -> list[Any]:
    optimizer = rows.optimizers[number]
    groups = getattr(optimizer, "param_groups", [])
    return [param for group in groups for param in group["params"]]


def _digest_of_tensor(tensor: Any) -> str:
    return hashlib.blake2b(
        tensor.detach().float().cpu().contiguous().numpy().tobytes(), digest_size=8
    ).hexdigest()


def _norm_of_step_gradients(optimizer: Any) -> float:
    """Return the norm of what a step is about to use; a fused one divides by the loss scale itself."""
    gradients = [
        each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None
    ]
    values = [each._values() if each.is_sparse else each for each in gradients]
    norm: float = sum(float(each.detach().double().norm()) ** 2 for each in values) ** 0.5
    scale = getattr(optimizer, "grad_scale", None)
    return norm if scale is None else norm / float(scale)


def _backward_result_counts_and_half_types(tensors: Any) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Return how often each kind of operation below losses gave a 16-bit and a wider result, and the 16-bit types."""
    import torch

    from ampcompare.base.tensors.products import HALF_DTYPES

    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    counts: Counter[tuple[str, bool]] = Counter()
    waiting = [each.grad_fn for each in given if each.grad_fn is not None]
    seen = set(waiting)
    halves: set[str] = set()
    while waiting:
        node = waiting.pop()
        for result in node._input_metadata[:1]:
            is_half = result.dtype in HALF_DTYPES
            counts[node.name(), is_half] += 1
            halves |= {str(result.dtype).removeprefix("torch.")} if is_half else set()
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        waiting += new
    return {name: (counts[name, True], counts[name, False]) for name in {name for name, _ in counts}}, halves


def _parameter_names(rows: Any, numbers: list[int]) -> dict[str, str]:
    """Return the names of parameters, as far as a model that is alive has them."""
    from ampcompare.script.torch_amp.lifted_weights import all_modules_of_process

    known: dict[int, str] = {}
    for module in all_modules_of_process():
        for name, parameter in module.named_parameters():
            known[id(parameter)] = max(known.get(id(parameter), ""), name, key=len)
    return {
        f"{number}.{index}": known[id(parameter)]
        for number in numbers
        for index, parameter in enumerate(_parameters_of_optimizer(rows, number))
        if id(parameter) in known
    }


if __name__ == "__main__":
    sys.exit(main())
