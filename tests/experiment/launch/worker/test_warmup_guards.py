"""Guards of our own loop: silent for our backends, awake for code of others, gone before the timed steps."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer

from ampcompare.apex import amp
from ampcompare.experiment.launch.contract import Progress
from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import iter_steps
from ampcompare.settings.config import RunConfig
from ampcompare.training.precision.base import StepOutcome
from ampcompare.training.precision.native import Native

RECIPE = {
    "data": {"name": "synthetic", "train_size": 64, "val_size": 16, "image_size": 8}, "model": {"arch": "mlp"},
    "epochs": 2, "batch_size": 16, "grad_accum_steps": 2, "clip_grad": 1.0,
}  # fmt: skip


def config_of(arm: str = "fp32", **settings: object) -> RunConfig:
    return RunConfig(arm=arm, recipe=RECIPE, device="cpu", warmup_steps=3, drain_every=1, **settings)


class Twice(Native):
    """A backend of another package, with the mistake of the seeds."""

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        outcome = super().step(*optimizers)
        for optimizer in optimizers:
            optimizer.step()
        return outcome


@pytest.fixture(autouse=True)
def end_session() -> Iterator[None]:
    """Take back what an O1 cell patches in this process."""
    yield
    amp._amp_state.close()


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> str:
    """Train with the backend of another package; the answer is the start of its finding."""
    monkeypatch.setattr(
        "ampcompare.experiment.launch.worker.cell.make_precision",
        lambda arm, device, **_: Twice(device=device),
    )
    monkeypatch.chdir(Path(__file__).parent)
    lines, first = inspect.getsourcelines(Twice)
    line = next(number for number, text in enumerate(lines, start=first) if "optimizer.step()" in text)
    return (
        f"guard step-twice: {Path(__file__).name}:{line}: optimizer.step() again after scaler.step(optimizer)"
    )


@pytest.mark.parametrize(
    "arm",
    [
        *("native:fp16", "apex:O1", "apex:O2"),
        *(
            pytest.param(arm, marks=pytest.mark.slow)
            for arm in ("fp32", "native:bf16", "half", "apex:O0", "apex:O3")
        ),
    ],
)
def test_our_own_backends_are_right(arm: str, tmp_path: Path) -> None:
    """No backend of ours gives a finding, with accumulation, clipping and first overflows, where guards are strict."""
    record = train_cell_and_write_record(config_of(arm, guards="strict"), tmp_path)
    assert record.status in ("completed", "diverged"), record.error
    assert record.guards == []


def test_a_backend_of_others_is_watched(
    twice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The mistake of another package's backend is in the record and in the log, once, with its own line."""
    record = train_cell_and_write_record(config_of("native:fp16"), tmp_path)
    assert record.status == "completed"
    (finding,) = record.guards
    assert finding.startswith(twice)
    assert capsys.readouterr().err == f"ampcompare {finding}\n"
    assert RunRecord.model_validate_json((tmp_path / "record.json").read_text()).guards == [finding]


def test_strict_guards_fail_the_cell(twice: str, tmp_path: Path) -> None:
    record = train_cell_and_write_record(config_of("native:fp16", guards="strict"), tmp_path)
    assert record.status == "failed"
    assert record.environment["exit_code"] == 3
    assert record.error is not None
    assert record.error.startswith(twice)


def test_timed_steps_run_what_they_would_run_without(tmp_path: Path) -> None:
    """During the warm-up torch's functions are watched; with the last step of it they are torch's own again."""
    functions = (torch.autograd, "backward"), (torch.optim.SGD, "step"), (torch.optim.Optimizer, "zero_grad")
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    before = [vars(owner)[name] for owner, name in functions]
    own: dict[int, bool] = {}

    def look(progress: Progress) -> None:
        own.setdefault(progress.steps, [vars(owner)[name] for owner, name in functions] == before)

    train_cell_and_write_record(config_of(), tmp_path, look)
    assert list(own) == list(range(9))
    assert list(own.values())[1:] == [False, False, True, True, True, True, True, True]


def test_guards_change_no_number(tmp_path: Path) -> None:
    """Losses and weights are the same with and without guards, and so is the name of the cell."""
    configs = [config_of("apex:O2", guards=mode) for mode in ("warn", "off")]
    steps = []
    for number, config in enumerate(configs):
        (tmp_path / str(number)).mkdir()
        train_cell_and_write_record(config, tmp_path / str(number))
        steps.append(
            [(step.loss, step.loss_scales) for step in iter_steps(tmp_path / str(number) / "steps.jsonl")]
        )
    assert steps[0] == steps[1]
    assert configs[0].digest() == configs[1].digest()
