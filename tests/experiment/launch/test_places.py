"""How a machine is shared out among cells: pretended GPUs by a pretended nvidia-smi, and the cores of this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ampcompare.base.environment.gpus import cores_near_device, visible_gpus
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.formatting import format_ranges
from ampcompare.experiment.launch import places as module
from ampcompare.experiment.launch.places import ANYWHERE, Place, places_for_cells
from ampcompare.settings.config import RunConfig

GPU = RunConfig(device="cuda")
CPU = RunConfig(device="cpu")
Pretend = Callable[..., None]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the pretended nvidia-smi is a shell script")


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Put an nvidia-smi on the path that lists some GPUs: names, used MiB, processes and MIG profiles of each."""

    def make(
        count: int = 4,
        *,
        names: tuple[str, ...] = (),
        used: dict[int, int] | None = None,
        processes: dict[int, int] | None = None,
        mig: dict[int, int] | None = None,
    ) -> None:
        of = [names[n] if names else "NVIDIA H200" for n in range(count)]
        query = [
            f"{n}, GPU-aa{n}, {of[n]}, 00000000:{n:02X}:00.0, {(used or {}).get(n, 4)}" for n in range(count)
        ]
        apps = [f"GPU-aa{n}, {pid}" for n, pid in (processes or {}).items()]
        listed = []
        for n in range(count):
            listed.append(f"GPU {n}: {of[n]} (UUID: GPU-aa{n})")
            instances = range((mig or {}).get(n, 0))
            listed += [f"  MIG 1g.18gb     Device  {i}: (UUID: MIG-aa{n}-{i})" for i in instances]
        script = ["#!/bin/sh", 'case "$1" in']
        for pattern, lines in (("--query-gpu*", query), ("--query-compute-apps*", apps), ("-L", listed)):
            script += [f"{pattern}) cat <<'END'", *lines, "END", ";;"]
        (tmp_path / "nvidia-smi").write_text("\n".join([*script, "esac", ""]))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def _tokens(jobs: int | str | None = "auto", gpus: str | None = None, config: RunConfig = GPU) -> list[str]:
    return [place.environment["CUDA_VISIBLE_DEVICES"] for place in places_for_cells([config], jobs, gpus).all]


def test_one_cell_for_each_gpu(pretend: Pretend) -> None:
    """Each cell sees one GPU, as its cuda:0; a cell of two processes sees two; disjoint cores go with them."""
    pretend(4)
    assert _tokens() == ["GPU-aa0", "GPU-aa1", "GPU-aa2", "GPU-aa3"]
    assert _tokens(config=RunConfig(device="auto")) == _tokens()
    pair = RunConfig(device="cuda", processes=2)
    assert _tokens(config=pair) == ["GPU-aa0,GPU-aa1", "GPU-aa2,GPU-aa3"]
    found = places_for_cells([GPU], "auto")
    cores = [core for place in found.all for core in place.cores]
    assert len(set(cores)) == len(cores)
    assert found.can_time_cells
    assert [str(place) for place in found.all] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]


def test_named_gpus(pretend: Pretend) -> None:
    """--gpus names them as torch counts; one that does not exist, twice, or for a CPU, is refused with a sentence."""
    pretend(4)
    assert _tokens(None, "0,2-3") == ["GPU-aa0", "GPU-aa2", "GPU-aa3"]
    assert _tokens(1, "2") == ["GPU-aa2"]
    for text, words in (
        ("7", "names GPU 7, but 4 are visible"),
        ("1,1", "twice"),
        ("a", "cannot be read"),
        ("3-1", "cannot"),
    ):
        with pytest.raises(ConfigError, match=words):
            places_for_cells([GPU], "auto", text)
    with pytest.raises(ConfigError, match="the device is cpu"):
        places_for_cells([CPU], "auto", "0")
    with pytest.raises(EnvironmentUnfit, match=r"8 processes were requested, but 4 GPU\(s\)"):
        places_for_cells([RunConfig(device="cuda", processes=8)], "auto")


def test_visible_devices_are_respected(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES chooses and orders, by index or UUID, and ends at an invalid entry as CUDA has it."""
    pretend(4)
    for text, tokens in (("3,1", ["GPU-aa3", "GPU-aa1"]), ("GPU-aa2", ["GPU-aa2"]), ("1,-1,2", ["GPU-aa1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
        assert [gpu.token for gpu in visible_gpus()] == tokens
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert _tokens(None, "1") == ["GPU-aa1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_gpu_that_others_use(pretend: Pretend) -> None:
    """It is left out with a note, or used with a note where it is named or no other is there."""
    pretend(3, processes={1: 4711}, used={2: 40_000})
    found = places_for_cells([GPU], "auto")
    assert [place.gpus[0].number for place in found.all] == [0]
    assert "GPU 1 is left out: process 4711 uses it" in found.notes[0]
    assert "39.1 GiB of its memory are in use" in found.notes[1]
    assert places_for_cells([GPU], None, "1").notes == ("GPU 1 is not free: process 4711 uses it",)
    pretend(1, processes={0: 4711})
    assert _tokens() == ["GPU-aa0"]


def test_instances_of_mig(pretend: Pretend) -> None:
    """Each instance is a device of its own, which is not timed; several processes cannot use them."""
    pretend(2, mig={0: 2})
    found = places_for_cells([GPU], "auto")
    assert _tokens() == ["MIG-aa0-0", "MIG-aa0-1", "GPU-aa1"]
    assert [place.placement_for_record().alone for place in found.all] == [False, False, True]
    assert not found.can_time_cells
    with pytest.raises(ConfigError, match="MIG"):
        places_for_cells([RunConfig(device="cuda", processes=2)], "auto")


def test_gpus_that_differ_or_are_shared_are_not_equal(pretend: Pretend) -> None:
    """Times can be compared between places on GPUs of one kind, with one cell each."""
    pretend(2, names=("NVIDIA A100", "NVIDIA H200"))
    unlike = places_for_cells([GPU], "auto")
    assert not unlike.can_time_cells
    assert "unlike GPUs (NVIDIA A100 and NVIDIA H200); --gpus can name equal ones" in unlike.about_times[0]
    pretend(1)
    assert places_for_cells([GPU], None).all == (ANYWHERE,)
    pretend(2)
    assert places_for_cells([GPU], 2).can_time_cells
    assert not places_for_cells([GPU], 3).can_time_cells
    assert _tokens(3) == ["GPU-aa0", "GPU-aa1", "GPU-aa0"]


def test_what_is_not_shared_out(pretend: Pretend) -> None:
    """One cell at a time, a device with a number and Slurm leave the machine as it is."""
    pretend(4)
    assert places_for_cells([GPU], 1).all == (ANYWHERE,)
    assert len(places_for_cells([GPU], None).all) == 4
    assert places_for_cells([CPU], None).all == (ANYWHERE,)
    assert places_for_cells([RunConfig(device="cuda:1")], "auto").all == (ANYWHERE,)
    assert places_for_cells([RunConfig(device="cuda", launcher="slurm")], "auto").all == (ANYWHERE,)


def test_cores_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells get disjoint cores, as many as their threads or more; where there are too few, none is pinned."""
    monkeypatch.setattr(module, "_available_cores", lambda: list(range(8)))
    assert [place.cores for place in places_for_cells([CPU], 2).all] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(places_for_cells([CPU], "auto").all) == 8
    four = places_for_cells([RunConfig(device="cpu", threads=2, processes=2)], "auto")
    assert [str(place) for place in four.all] == ["cores 0-3", "cores 4-7"]
    crowded = places_for_cells([RunConfig(device="cpu", threads=4)], 3).all
    assert [(place.cores, place.shared) for place in crowded] == [((), True)] * 3
    assert not places_for_cells([CPU], 2).can_time_cells, "cores share caches, memory and clock"


def test_cores_next_to_a_gpu(tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's list is read; GPUs of one node share its cores."""
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-1,8\n")
    assert cores_near_device("00000000:1B:00.0", tmp_path) == {0, 1, 8}
    assert cores_near_device("00000000:1C:00.0", tmp_path) == set()
    pretend(4)
    monkeypatch.setattr(module, "_available_cores", lambda: list(range(8)))
    near = {"00": {0, 1, 2, 3}, "01": {0, 1, 2, 3}, "02": {4, 5, 6, 7}, "03": {4, 5, 6, 7}}
    monkeypatch.setattr(module, "cores_near_device", lambda bus: near[bus[9:11]])
    assert [place.cores for place in places_for_cells([GPU], "auto").all] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    monkeypatch.setattr(module, "_available_cores", lambda: [0, 1])
    assert [place.cores for place in places_for_cells([GPU], "auto").all] == [()] * 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux pins processes")
def test_a_process_is_pinned() -> None:
    """What is started in the block runs on the cores of the place; this process does not."""
    before = os.sched_getaffinity(0)
    core = min(before)
    with Place(cores=(core,)).processes_kept_on_cores():
        code = "import os; print(sorted(os.sched_getaffinity(0)))"
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    assert shown.strip() == str([core])
    assert os.sched_getaffinity(0) == before
    assert format_ranges([3, 0, 1, 8]) == "0-1,3,8"
