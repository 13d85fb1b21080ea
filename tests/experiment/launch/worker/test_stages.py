"""The four stages of a cell, each alone, in this process."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import CheckpointError
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.worker.cell import (
    PreparedCell,
    build_prepared_cell,
    configure_process,
    gather_record_of_cell,
    train_prepared_cell,
)
from ampcompare.settings.config import RunConfig
from ampcompare.training.hashes import parameters_sha256, weights_sha256
from ampcompare.training.parallel.ranks import Communicator

MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")


@pytest.fixture
def process_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what `configure_process` sets for the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def build_cell(make_config: MakeConfig, tmp_path: Path) -> Callable[..., PreparedCell]:
    """Build the smallest cell in `tmp_path`."""

    def make(**options: object) -> PreparedCell:
        return build_prepared_cell(make_config(drain_every=1, **options), tmp_path, CPU, Communicator())

    return make


def test_a_record_has_the_weights_in_other_precisions(build_cell: Callable[..., PreparedCell]) -> None:
    """They are evaluated after the last step, with the final weights, and the tail of the losses is kept."""
    cell = build_cell(arm="native:bf16", eval_precision="fp32,autocast:bf16")
    train_prepared_cell(cell)
    summary = gather_record_of_cell(cell, None, start_seconds=0.0, seconds=1.0).summary
    fp32, own = summary.in_precisions
    assert (fp32.precision, own.differing, own.values) == ("fp32", 0, summary.epochs[-1].values)
    assert summary.weights_sha256 == weights_sha256(cell.session.assembly.replicas)
    assert summary.loss_tail is not None


@pytest.mark.usefixtures("process_switches")
def test_configure_process_sets_what_the_settings_name(make_config: MakeConfig) -> None:
    """Threads, determinism and the switch of cuDNN are those of the configuration."""
    configure_process(make_config(recipe={"cudnn_benchmark": True}), CPU)
    assert torch.backends.cudnn.benchmark
    configure_process(make_config(), CPU)  # as one trial of `profile` follows another
    assert not torch.backends.cudnn.benchmark
    configure_process(make_config(threads=2, deterministic=True), CPU)

    assert torch.get_num_threads() == 2
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark


def test_configure_process_selects_the_gpu(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)

    configure_process(make_config(tf32="torch"), torch.device("cuda", 1))

    assert selected == [torch.device("cuda", 1)]


def test_build_changes_no_file_if_a_checkpoint_does_not_fit(
    build_cell: Callable[..., PreparedCell], tmp_path: Path
) -> None:
    """A checkpoint of another model is refused, and the steps of the earlier run are unchanged."""
    train_prepared_cell(build_cell(saving={"stop_at_step": 2}))
    steps = (tmp_path / "steps.jsonl").read_text()
    assert len(steps.splitlines()) == 2

    with pytest.raises(CheckpointError):
        build_cell(saving={"resume": "auto"}, recipe={"optimizer": {"name": "adam"}})

    assert (tmp_path / "steps.jsonl").read_text() == steps
    assert (tmp_path / "checkpoints").is_dir()


def test_run_writes_each_step_and_reports_progress(build_cell: Callable[..., PreparedCell]) -> None:
    """Training fills `steps.jsonl`, the metrics and the epochs, and reports progress after each block of steps."""
    cell = build_cell()
    received: list[Progress] = []

    train_prepared_cell(cell, received.append)

    assert [json.loads(line)["step"] for line in cell.steps_path.read_text().splitlines()] == [0, 1, 2, 3]
    assert [(progress.phase, progress.steps, progress.total_steps) for progress in received] == [
        *(("training", step, 4) for step in range(5)),
        ("evaluating", 4, 4),
    ]
    assert received[0][4:] == (None, None, 0, None)
    losses = [json.loads(line)["loss"] for line in cell.steps_path.read_text().splitlines()]
    assert [progress.loss for progress in received[1:5]] == losses
    assert all((progress.step_seconds or 0) > 0 for progress in received[1:])
    assert cell.metrics.num_steps == 4
    assert len(cell.metrics.epochs) == 1


def test_record_tells_whether_weights_moved(build_cell: Callable[..., PreparedCell], tmp_path: Path) -> None:
    """Training moves the weights, a learning rate that is rounded away does not, and their hash at the end is kept."""
    moved, again, unmoved = (build_cell(recipe={"optimizer": {"lr": lr}}) for lr in (0.05, 0.05, 1e-30))
    for cell in (moved, again, unmoved):
        train_prepared_cell(cell)
    one, two, three = (
        gather_record_of_cell(cell, None, start_seconds=0, seconds=1).summary
        for cell in (moved, again, unmoved)
    )
    assert (one.weights_moved, three.weights_moved) == (True, False)
    assert one.weights_sha256 == two.weights_sha256 != three.weights_sha256
    assert one.epochs[-1].chance is not None


def test_a_resumed_run_remembers_its_first_weights(build_cell: Callable[..., PreparedCell]) -> None:
    """Whether weights moved is asked of the whole run, not of what came after its checkpoint."""
    train_prepared_cell(build_cell(saving={"stop_at_step": 3}))
    cell = build_cell(saving={"resume": "auto"})
    before = cell.metrics.initial_parameters
    fresh = build_cell(saving={})
    assert before == fresh.metrics.initial_parameters != parameters_sha256(cell.session.assembly.replicas)
