"""What happens inside the process of a cell."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.experiment.launch.forked import ForkedLauncher
from ampcompare.experiment.launch.worker.cell import device_facts, record_of_failure
from ampcompare.settings.config import RunConfig
from ampcompare.training.process.device import resolve_device

MakeConfig = Callable[..., RunConfig]


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA asked for on a machine without it is a fault of the environment, with the reason and both remedies."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        EnvironmentUnfit, match=r"torch is built without CUDA; use --device cpu, or install torch"
    ):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    with pytest.raises(EnvironmentUnfit, match="torch sees no GPU"):
        resolve_device("cuda:0")
    assert resolve_device("auto") == torch.device("cpu")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index beyond the GPUs is refused with their number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EnvironmentUnfit, match="device cuda:2 was requested, but there are 2 GPUs"):
        resolve_device("cuda:2")
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 1)


def test_other_accelerators_are_taken_where_torch_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there is refused with what would bring it; a first one has the index 0."""
    with pytest.raises(
        EnvironmentUnfit, match=r"device mps .*an Apple GPU\), but torch sees none; .*macOS 14"
    ):
        resolve_device("mps")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert (resolve_device("xpu"), resolve_device("xpu:1")) == (
        torch.device("xpu", 0),
        torch.device("xpu", 1),
    )
    with pytest.raises(
        EnvironmentUnfit, match="device xpu:2 was requested, but there are 2 such devices, starting at xpu:0"
    ):
        resolve_device("xpu:2")
    assert resolve_device("auto") == torch.device("cpu")


def test_what_torch_cannot_tell_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question about the GPU at which torch raises has the error as its answer, and the others have theirs."""

    def raises(*args: object) -> None:
        raise RuntimeError("you are using the new API\nof torch")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", raises)
    facts = device_facts(torch.device("cuda", 1), RunConfig())
    assert (facts["device"], facts["device_name"], facts["capability"]) == ("cuda:1", "A GPU", [9, 0])
    assert facts["cudnn"] == "unknown: you are using the new API"
    assert (facts["tf32_matmul"], facts["tf32_convolution"]) == (False, True)


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        ({"recipe": {"data": {"name": "imagefolder:/nonexistent"}}}, 2),
        ({"arm": "apex:O1,engine=nvidia"}, 4),
        ({"arch": "launched:raises_in_forward"}, 3),
    ],
)
def test_a_failure_keeps_its_exit_code(
    launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path, options: dict[str, str], exit_code: int
) -> None:
    """The record of a failure says whether input, environment or the arm itself was the cause."""
    config = make_config(**options)
    if "nvidia" in config.arm and _has_nvidia_apex():
        pytest.skip("the real Apex is installed")
    record = launcher.launch(config, tmp_path)
    assert (record.status, record.environment["exit_code"]) == ("failed", exit_code)
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def _has_nvidia_apex() -> bool:
    from ampcompare.base.environment.apex import find_installed_apex

    return find_installed_apex().has_amp


@pytest.mark.parametrize("size", [2**46, 2**60])
def test_a_cpu_without_memory_is_out_of_memory(size: int) -> None:
    """What torch's CPU allocator raises is called by the words that a GPU's error has; other errors keep their name."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(size)
    record = record_of_failure(RunConfig(), refused.value)
    assert record.error is not None
    assert record.error.startswith("out of memory: [enforce fail at alloc_cpu.cpp")
    assert (record_of_failure(RunConfig(), MemoryError()).error or "").startswith("out of memory")
    assert (record_of_failure(RunConfig(), RuntimeError("shapes")).error or "") == "RuntimeError: shapes"


def test_tf32_is_refused_on_a_cpu(launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path) -> None:
    """Arm and switch fail as something that this machine lacks; switched off, TF32 is what a CPU has anyway."""
    for name, options in (("arm", {"arm": "fp32:tf32"}), ("switch", {"tf32": "on"})):
        record = launcher.launch(make_config(**options), tmp_path / name)
        assert (record.status, record.environment["exit_code"]) == ("failed", 4)
        assert "compute capability 8.0" in (record.error or "")
    assert launcher.launch(make_config(tf32="off"), tmp_path / "off").status == "completed"


def test_compiled_fp16_is_not_emulated(
    launcher: ForkedLauncher, make_config: MakeConfig, tmp_path: Path
) -> None:
    """torch.compile cannot see into emulation, so that a compiled cell computes fp16 natively, and says so."""
    recipe = {
        "compile": "eager",
        "max_steps": 2,
        "data": {"train_size": 32, "val_size": 16},
        "batch_size": 16,
    }
    record = launcher.launch(make_config(arm="half", arch="mlp", recipe=recipe), tmp_path)
    assert record.status == "completed", record.error
    assert record.half == "fp16 native"
