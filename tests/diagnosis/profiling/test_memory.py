"""What holds the peak of memory, from events of allocators that are written down."""

import time
from typing import Any

import torch

from ampcompare.diagnosis.profiling.marks import PhaseFollower
from ampcompare.diagnosis.profiling.memory import MemoryLedger
from ampcompare.diagnosis.profiling.step_profiler import BEGIN, blocks_at_peak

GPU = torch.device("cuda:1")


def _event(ts: float, size: int, address: int, kind: int = 1, number: int = 1) -> dict[str, Any]:
    """Return what torch.profiler writes of an allocator; the size is negative where a block is freed."""
    args = {"Device Type": kind, "Device Id": number, "Addr": address, "Bytes": size}
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": args}


def test_the_peak_of_a_gpu_is_that_of_its_allocator() -> None:
    """Blocks of this GPU at the peak are those of tensors, or workspace; what was freed by then, and other devices, are
    left out."""
    marks = PhaseFollower()
    ledger = MemoryLedger(marks, torch.device("cpu"))  # stands for a GPU: it holds tensors of this machine
    model = torch.nn.Linear(64, 64, bias=False)
    marks.name_modules_of_new_models([model])
    ledger.begin()
    ledger.begin_step()
    base = time.time_ns()
    marks.phase = "forward"
    kept = torch.ones(1000)
    ledger.see_operation(torch.ops.aten.ones.default, (), {}, kept)
    ledger._mark_saved_tensor(kept)
    ledger.end()
    later = (time.time_ns() - base) / 1000 + 100
    address = kept.data_ptr()
    events = [
        {"ph": "X", "cat": "user_annotation", "name": BEGIN, "ts": 0.0, "dur": 0.0},
        _event(-5.0, 2**20, 64),  # before the step, and freed before its peak
        _event(1.0, 4096, address),  # rounded up, as the allocator does
        _event(2.0, 2**30, 4096, number=0),
        _event(2.0, 2**30, 4096, kind=0, number=-1),
        _event(3.0, -(2**20), 64),
        _event(later + 1, 2**22, 512),
        _event(later + 2, -(2**22), 512),
        _event(later + 3, 4096, 1024),
    ]
    trace = {"traceEvents": events, "baseTimeNanoseconds": base}
    weights = 4 * 64 * 64
    measured = weights + 4096 + 2**22
    memory = ledger.memory_at_peak(blocks_at_peak(trace, GPU), measured, 2**25)
    assert {(held.kind, held.dtype, held.bytes) for held in memory.held} == {
        ("weights", "fp32", weights),
        ("activations", "fp32", 4000),
    }
    assert memory.rest_bytes == 2**22 + 96, "workspace, and what the allocator rounds up"
    assert (memory.measured_bytes, memory.reserved_bytes) == (measured, 2**25)
