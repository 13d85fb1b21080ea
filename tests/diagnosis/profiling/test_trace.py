"""The account of a step, from recorded events of a CPU and of a GPU."""

from typing import Any

import pytest

from ampcompare.diagnosis.profiling.trace import (
    MODULE,
    PHASE,
    STEP,
    TraceTotals,
    totals_of_trace,
    trace_of_all_arms,
)


def _event(name: str, start: float, duration: float, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    thread = {"pid": 0, "tid": 7} if category in ("kernel", "gpu_memcpy") else {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args, **thread}


def _range(name: str, start: float, duration: float) -> dict[str, Any]:
    return _event(name, start, duration, "user_annotation")


def _typed(*types: str) -> dict[str, Any]:
    return {"Input type": list(types)}


CPU = [
    _range(STEP, 0, 1000),
    _range(f"{PHASE}data", 0, 100),
    _range(f"{PHASE}forward", 100, 400),
    _range(f"{MODULE}head", 110, 300),
    _event("aten::linear", 120, 200, **_typed("float"), **{"Sequence number": 5}),
    _event("aten::_to_copy", 130, 40, **_typed("float"), **{"Sequence number": 5}),
    _event("aten::addmm", 180, 120, **_typed("c10::BFloat16"), **{"Sequence number": 5}),
    _range(f"{PHASE}backward", 500, 300),
    _event("autograd::engine::evaluate_function: AddmmBackward0", 510, 200, **{"Sequence number": 5}),
    _event("aten::mm", 520, 150, **_typed("c10::BFloat16")),
    _range(f"{PHASE}optimizer", 800, 200),
    _event("aten::add_", 810, 90, **_typed("float")),
]


def _parts(account: TraceTotals) -> dict[tuple[str, str], int]:
    return {key: round(seconds * 1e6) for key, seconds in account.parts.items() if round(seconds * 1e6)}


def test_a_step_on_a_cpu_is_the_sum_of_its_parts() -> None:
    """Every microsecond belongs to the innermost operation, or to the host, and to one phase."""
    account = totals_of_trace(CPU)
    assert account.steps == 1
    assert _parts(account) == {
        ("data", "host"): 100,
        ("forward", "host"): 200,
        ("forward", "product"): 160,
        ("forward", "cast"): 40,
        ("backward", "host"): 150,
        ("backward", "product"): 150,
        ("optimizer", "host"): 110,
        ("optimizer", "pointwise"): 90,
    }
    assert sum(account.parts.values()) == pytest.approx(account.seconds)


def test_a_layer_has_its_backward_pass() -> None:
    """The sequence number of autograd leads from a backward operation to the module of its forward pass."""
    account = totals_of_trace(CPU)
    assert account.layers["head"] * 1e6 == pytest.approx(100 + 160 + 40 + 50 + 150)
    assert account.fp32_layers["head"] * 1e6 == pytest.approx(40)


def test_a_product_that_is_emulated_is_told_from_its_emulation() -> None:
    """The fp32 product inside a 16-bit one is the product; the copies around it are emulation, not casts."""
    events = [
        _range(STEP, 0, 100),
        _range(f"{PHASE}forward", 0, 100),
        _event("aten::mm", 0, 100, **_typed("c10::Half")),
        _event("PythonDispatchMode", 10, 85),
        _event("aten::_to_copy", 12, 20, **_typed("c10::Half")),
        _event("aten::mm", 40, 30, **_typed("float")),
        _event("aten::_to_copy", 75, 15, **_typed("float")),
    ]
    assert _parts(totals_of_trace(events)) == {("forward", "emulation"): 70, ("forward", "product"): 30}


def test_a_range_that_outlives_what_it_began_in_keeps_its_length() -> None:
    """A range opened inside the event of a dispatch mode is not cut off at the end of that event."""
    events = [
        _event("PythonDispatchMode", 0, 10),
        _range(STEP, 5, 100),
        _event("aten::mm", 20, 50, **_typed("float")),
    ]
    account = totals_of_trace(events)
    assert account.seconds * 1e6 == pytest.approx(100)
    assert _parts(account) == {("other", "host"): 50, ("other", "product"): 50}


def test_communication_of_gloo_counts_where_the_host_waits_for_it() -> None:
    """What runs behind operations is hidden; what runs where no operation does is exposed."""
    events = [
        _range(STEP, 0, 100),
        _range(f"{PHASE}backward", 0, 100),
        _event("aten::mm", 0, 60, **_typed("float")),
        {**_event("gloo:all_reduce", 40, 50), "tid": 9},
    ]
    found = {("backward", "product"): 60, ("backward", "communication"): 30, ("backward", "host"): 10}
    assert _parts(totals_of_trace(events)) == found


GPU = [
    _range(STEP, 0, 500),
    _range(f"{PHASE}data", 0, 100),
    _range(f"{PHASE}forward", 100, 200),
    _event("aten::addmm", 110, 40, **_typed("c10::Half")),
    _event("cudaLaunchKernel", 115, 10, "cuda_runtime", correlation=1),
    _event("aten::item", 160, 120, **_typed("float")),
    _event("aten::_local_scalar_dense", 165, 110, **_typed("float")),
    _event("cudaMemcpyAsync", 170, 5, "cuda_runtime", correlation=2),
    _event("cudaStreamSynchronize", 180, 90, "cuda_runtime", correlation=3),
    _range(f"{PHASE}backward", 300, 200),
    _event("aten::mm", 310, 40, **_typed("c10::Half")),
    _event("cudaLaunchKernel", 320, 10, "cuda_runtime", correlation=4),
    _event("ampere_fp16_s16816gemm", 130, 120, "kernel", correlation=1),
    _event("Memcpy DtoH", 255, 5, "gpu_memcpy", correlation=2),
    _event("ampere_fp16_s16816gemm", 335, 150, "kernel", correlation=4),
    _event("ncclDevKernel_AllReduce", 440, 60, "kernel", correlation=9),
]


def test_a_step_on_a_gpu_is_kernels_gaps_and_waits() -> None:
    """Kernels count for the phase that launched them, gaps for the phase of the host, collectives where exposed."""
    account = totals_of_trace(GPU)
    assert account.is_gpu
    assert sum(account.parts.values()) == pytest.approx(account.seconds) == pytest.approx(500e-6)
    parts = _parts(account)
    assert parts["forward", "product"] == 120
    assert parts["backward", "product"] == 150
    assert parts["data", "host"] == 100
    assert parts["backward", "communication"] == 15
    assert account.waits == pytest.approx({"aten::_local_scalar_dense": 90e-6})


def test_one_trace_holds_all_arms_from_a_common_begin() -> None:
    """Each arm is a process of its own with its name, and the first step of each begins at zero."""
    late = [{**event, "ts": event["ts"] + 12345} for event in CPU]
    merged = trace_of_all_arms(
        [("fp32", {"traceEvents": CPU}), ("bf16", {"traceEvents": late}), ("half", {})]
    )["traceEvents"]
    starts = {event["pid"]: event["ts"] for event in merged if event["name"] == STEP}
    assert list(starts.values()) == [0, 0]
    names = {event["pid"]: event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert names == dict(zip(starts, ["fp32", "bf16"], strict=True))
