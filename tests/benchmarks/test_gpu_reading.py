"""How the check of a GPU reads traces, replays and pytest's results, on made-up ones: these branches need no GPU."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import speed
from benchmarks.gpu import tests as suites
from benchmarks.gpu.device import TENSOR_CORES, Cuda, Rehearsed, read_trace
from benchmarks.gpu.golden import bits, unlike
from benchmarks.gpu.ledger import Ledger
from benchmarks.gpu.report import Report


def test_trace_of_a_gpu() -> None:
    """Kernels, copies with their bytes, waits of the host, and the share of tensor cores are told apart."""
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32", "dur": 30},
        {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>", "dur": 10},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "dur": 1, "args": {"bytes": 4}},
        {"cat": "gpu_memset", "name": "Memset", "dur": 1, "args": {"bytes": 64}},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": 1},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 1},
        {"name": "process_name"},
    ]
    found = read_trace(events, "kernel", TENSOR_CORES)
    assert {key: found[key] for key in ("kernels", "memcpys", "memsets", "waits")} == {
        "kernels": 2, "memcpys": 1, "memsets": 1, "waits": 1,
    }  # fmt: skip
    assert (found["copied_bytes"], found["set_bytes"]) == (4, 64)
    assert found["product_share"] == pytest.approx(0.75)


def test_names_of_tensor_cores() -> None:
    """Kernels that libraries name for tensor cores are counted as such; plain fp32 products and batch norm are not."""
    tensor = [
        "ampere_fp16_s16816gemm_fp16_128x64",
        "nvjet_hsh_128x256",
        "cutlass_80_tensorop_f16",
        "sm90_gmma_f16",
    ]
    others = ["ampere_sgemm_128x64_nn", "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>"]
    assert [name for name in [*tensor, *others] if TENSOR_CORES.search(name)] == tensor


def test_ledger() -> None:
    """The ledger counts reads of the host apart from what computes, and no views."""
    x = torch.ones(8)
    with Ledger() as ledger:
        y = (x + 1).view(2, 4)
        y.sum().item()
    assert (ledger.reads, ledger.writes) == (1, 2)
    assert ledger.bytes == (32 + 32) + (32 + 4)


@pytest.mark.parametrize(
    "step, reads",
    [
        (lambda: torch.ones(2).sum().item(), 1),
        (lambda: torch.ones(2).tolist(), 1),
        (lambda: bool(torch.ones(1) > 0), 1),
        (lambda: torch.ones(2).sum(), 0),
    ],
)
def test_syncs_of_a_rehearsal(step: Any, reads: int) -> None:
    """A CPU counts what would make the host wait for a GPU: numbers, lists and decisions from tensors."""
    assert Rehearsed().syncs(step) == reads


def test_syncs_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each wait that the debug mode names is a sync, its other warnings are none, and it is off afterwards."""
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def step() -> None:
        import warnings

        prototype = (
            "Synchronization debug mode is a prototype and does not yet detect all synchronizing operations"
        )
        for text in (prototype, *["called a synchronizing CUDA operation"] * 2, "other"):
            warnings.warn(text, stacklevel=1)

    assert Cuda().syncs(step) == 2
    assert modes == ["warn", "default"]


@pytest.mark.slow
def test_a_batch_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 100}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", calls.append)

    def full() -> None:
        raise torch.cuda.OutOfMemoryError

    def broken() -> None:
        raise ValueError

    assert not Cuda().fits(full, 25)
    assert Cuda().fits(lambda: None, 25)
    assert calls == [0.25, 0.25]
    with pytest.raises(ValueError):
        Cuda().fits(broken, 25)


def test_peak_of_a_cpu() -> None:
    """The most bytes that tensors held at once are found, whatever is released afterwards."""

    def run() -> None:
        first = torch.ones(1 << 18)
        second = first + 1
        del first
        third = second * 2
        del second, third

    assert 2 << 20 <= Rehearsed().peak_bytes(run) < (2 << 20) + 4096


def _replayed(loss: float) -> dict[str, Any]:
    step = {
        **dict.fromkeys(
            ("out_dtypes", "grad_dtypes", "master_dtypes", "master_grad_dtypes", "buffer_dtypes"), ""
        ),
        **{
            "step": 0,
            "loss": [loss],
            "loss_dtypes": "f",
            "param_dtypes": "h",
            "skipped": [False],
            "scalers": [],
        },
        "params": [["sha", [1.0]]],
    }
    return {"initial": [], "steps": [step], "final": {"amp_state_dict": {}}}


def test_bits() -> None:
    """Replays of equal bits differ nowhere; others at a step and in a value of it."""
    assert bits(_replayed(1.0), _replayed(1.0)) == ""
    assert bits(_replayed(1.0), _replayed(1.5)) == "step 0: loss is [1.5], of Apex [1.0]"


def test_a_skip_that_was_not_recorded() -> None:
    """A step that is skipped where the recording applied it is named."""
    ours = _replayed(1.0)
    ours["steps"][0]["skipped"] = [True]
    assert unlike(_replayed(9.0), _replayed(1.0)) == ""
    assert unlike(_replayed(1.0), ours) == "step 0: skipped is [True], recorded [False]"
    assert "no kernel" in unlike(_replayed(1.0), {"error": "Traceback\nRuntimeError: no kernel"})


def test_results_of_pytest(tmp_path: Path) -> None:
    """Failed, skipped and passed tests are counted, and the failed ones named."""
    file = tmp_path / "junit.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="a" name="one"/><testcase classname="a" name="two"><failure/>'
        '</testcase><testcase classname="a" name="three"><skipped/></testcase></testsuite></testsuites>'
    )
    assert suites.read_junit(file) == ({"passed": 1, "failed": 1, "skipped": 1}, ["a.two"])


def test_a_slow_arm_misses_its_goal() -> None:
    """A ratio above its goal and the spread of the copies is a failed check, one within both is not."""
    times = {
        speed.FP32: [1.0, 1.0],
        speed.AA: [1.0, 1.0],
        "arm fp32": [1.05, 1.05],
        "arm apex:O0": [1.0, 1.0],
    }
    report = Report("speed")
    assert speed._judge(report, "resnet50", times) == 2
    assert [check.held for check in report.checks] == [False, True]
    wide = Report("speed")
    speed._judge(wide, "resnet50", times | {speed.AA: [1.1, 1.1]})
    assert wide.passes


def test_goals_are_of_loops_that_run() -> None:
    """Each goal names two loops that take turns in one group, and each loop its bare one."""
    for name, base, *_ in speed.GOALS:
        assert any({name, base} <= set(group) for group in speed.GROUPS.values()), (name, base)
    for group in speed.GROUPS.values():
        assert set(group.values()) <= set(group)


def test_the_last_line(tmp_path: Path) -> None:
    """The line is one line; the file is there after each check, with numbers that JSON lacks as strings."""
    report = Report("memory", says="peaks agree", folder=tmp_path)
    report.figures["x"] = float("nan")
    report.check("a", True)
    early = json.loads((tmp_path / "memory.json").read_text())
    assert (early["finished"], early["held"], early["figures"]) == (False, False, {"x": "nan"})
    report.leave_out("genuine Apex\n(no sources)")
    line = report.line("CPU")
    assert re.fullmatch(
        r"gpu-check memory: held 1 of 1 checks in \d+ s on CPU: peaks agree \| left out: genuine Apex \(no sources\)",
        line,
    )
