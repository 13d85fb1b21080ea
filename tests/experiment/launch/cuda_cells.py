"""Train whole cells on "cuda" in one process, on the package's CUDA stand-in, and note what they ask of it.

Usage: cuda_cells.py FOLDER CELLS. CELLS is a JSON object of names and configurations; standard output gets one of names
and notes: status and error of the record, device, host reads and calls of list operations by phase.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.script.legacy import cpu_device as cuda_stand_in
from ampcompare.script.legacy.cpu_device import is_cuda, redirect_cuda_to_cpu

# What a GPU of compute capability 8.0 says of itself.
cuda_stand_in.FUNCTIONS.update(
    {"is_bf16_supported": lambda *_, **__: True, "get_device_capability": lambda *_: (8, 0)}
)
redirect_cuda_to_cpu(quiet=True)


class Autocast(torch.autocast):
    """Autocast that reaches the tensors which stand for those of a GPU."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if is_cuda(device_type) else device_type, *args, **kwargs)


torch.autocast = Autocast  # type: ignore[misc]

import ampcompare.training.build_loop as build_loop  # noqa: E402
import ampcompare.training.loop as training_loop  # noqa: E402  what it binds must be the stand-ins
from ampcompare.apex.amp import _amp_state  # noqa: E402
from ampcompare.apex.amp._engine import device_skip  # noqa: E402
from ampcompare.experiment.launch.worker import cell  # noqa: E402
from ampcompare.settings.config import RunConfig  # noqa: E402
from ampcompare.training.ema import ModelEma  # noqa: E402
from ampcompare.training.precision import shared_scales  # noqa: E402
from ampcompare.training.session import TrainingSession  # noqa: E402

assert "cuda" in device_skip._DEVICE_TYPES
device_skip._DEVICE_TYPES = frozenset({"cpu"})  # flags stay on what stands for a GPU
shared_scales._round_by_powers_of_two = lambda *_: None  # as away from the CPU, where it would read


class Ledger(TorchDispatchMode):
    """Counts what would wait for a GPU, and list operations over several dtypes, by what the run is doing."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "other"
        self.updates = 0
        self.reads: Counter[str] = Counter()
        self.mixed: set[str] = set()
        self.devices_set: list[str] = []
        self.collectives_before_device: list[str] = []

    def read(self) -> None:
        self.reads[self.phase] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.read()
        elif name.startswith(("_foreach_", "_amp_foreach_", "_fused_")):
            if len({tensor.dtype for tensor in args[0]}) > 1:
                self.mixed.add(
                    f"{self.phase}: {name} over {sorted({str(tensor.dtype) for tensor in args[0]})}"
                )
        return func(*args, **(kwargs or {}))


ledger = Ledger()


def _count_reads(owner: Any, name: str, *, only: Any = lambda *args: True) -> None:
    original = getattr(owner, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if only(*args, *kwargs.values()):
            ledger.read()
        return original(self, *args, **kwargs)

    setattr(owner, name, counted)


# What the dispatcher does not see of a tensor that lies on the CPU anyway.
for method in ("tolist", "numpy", "cpu"):
    _count_reads(Tensor, method)
_count_reads(Tensor, "to", only=lambda *args: any(isinstance(arg, str) and arg == "cpu" for arg in args))


def _in_phase(owner: Any, name: str, phase: str) -> None:
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        before, ledger.phase = ledger.phase, phase
        ledger.updates += name == "update" and owner is build_loop
        try:
            return original(*args, **kwargs)
        finally:
            ledger.phase = before

    setattr(owner, name, noted)


_in_phase(build_loop, "update", "step")  # where a loop is given it
_in_phase(TrainingSession, "_evaluate_trained_weights", "evaluation")
_in_phase(training_loop.Loop, "_drain_steps", "drain")
_in_phase(ModelEma, "update", "average")


def set_device(device: Any) -> None:
    """Refuse what torch refuses, and note the device."""
    place = torch.device(device) if isinstance(device, str) else device
    if isinstance(place, torch.device):
        if not is_cuda(place) or place.index is None:
            raise ValueError(
                f"Expected a torch.device with a specified index or an integer, but got: {place}"
            )
        place = place.index
    ledger.devices_set.append(f"cuda:{place}")


torch.cuda.set_device = set_device


def _after_set_device(name: str) -> None:
    original = getattr(dist, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not ledger.devices_set:
            ledger.collectives_before_device.append(name)
        return original(*args, **kwargs)

    setattr(dist, name, noted)


for name in ("init_process_group", "all_gather_object", "broadcast_object_list", "all_reduce", "broadcast"):
    _after_set_device(name)


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one cell and return the notes."""
    folder.mkdir()
    ledger.__init__()  # type: ignore[misc]
    with ledger:
        record = cell.train_cell_and_write_record(RunConfig.model_validate(config), folder)
    _amp_state.close()
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    return {
        "status": record.status, "error": record.error, "device": record.environment.get("device"),
        "device_name": record.environment.get("device_name"), "half": record.half, "steps": record.summary.num_steps,
        "updates": ledger.updates, "reads": dict(ledger.reads), "mixed": sorted(ledger.mixed),
        "devices_set": ledger.devices_set, "collectives_before_device": ledger.collectives_before_device,
        "evaluations": len(record.summary.epochs),
        "images": record.summary.epochs[-1].per_sample is not None if record.summary.epochs else None,
        "averaged": record.summary.ema_metric_final is not None,
    }  # fmt: skip


def main() -> None:
    """Train all cells."""
    folder, cells = Path(sys.argv[1]), json.loads(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr
    notes = {name: train(config, folder / str(place)) for place, (name, config) in enumerate(cells.items())}
    answers.write(json.dumps(notes))


if __name__ == "__main__":
    main()
