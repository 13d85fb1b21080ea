"""Whole cells of other libraries' arms and of packed activations: their records, their twins, and a resumed run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ampcompare.apex.amp import _amp_state
from ampcompare.backends.arm import Arm
from ampcompare.experiment.launch.worker.cell import train_cell_and_write_record
from ampcompare.results.analysis.pairing.declared import why_not_as_declared
from ampcompare.results.records.run import RunRecord
from ampcompare.settings.config import RunConfig

MakeConfig = Callable[..., RunConfig]
TWINS = {
    "accelerate:bf16": "native:bf16",
    "fabric:bf16-mixed": "native:bf16",
    "fabric:16-true": "half",
    "mmengine:fp32": "fp32",
}


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """Leave no amp session behind: a run has a process of its own, tests share one."""
    yield
    _amp_state.close()


@pytest.fixture
def train(make_config: MakeConfig, tmp_path: Path) -> Callable[..., RunRecord]:
    """Train 8 steps of an arm in this process, with accumulation, clipping and an average, in a folder of its own."""

    def cell(arm: str, name: str = "cell", **saving: Any) -> RunRecord:
        library = Arm.parse(arm).spec.library
        if library is not None and library.why_missing():
            pytest.skip(library.why_missing())
        folder = tmp_path / f"{name} {arm.replace(':', ' ')}"
        folder.mkdir(exist_ok=True)
        recipe = {"epochs": 2, "grad_accum_steps": 2, "clip_grad": 0.5, "ema_decay": 0.9}
        # Accelerate hands fp32 outputs to the loss. With the casts of CUDA our loop's cross entropy rounds logarithms
        # of 16-bit outputs; the CPU's lists cast the whole loss, so that twins have the same bits.
        config = make_config(
            arm=arm, recipe=recipe, drain_every=1, warmup_steps=0, saving=saving, autocast_lists="cpu"
        )
        return train_cell_and_write_record(config, folder)

    return cell


WHOLE: dict[str, RunRecord] = {}  # of arms, from the first step to the last


def whole(train: Callable[..., RunRecord], arm: str) -> RunRecord:
    """Train an arm without a stop, once for all tests."""
    if arm not in WHOLE:
        WHOLE[arm] = train(arm, "whole")
    return WHOLE[arm]


@pytest.mark.parametrize(
    ("arm", "twin"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] != "accelerate:bf16"))
        for pair in TWINS.items()
    ],
)
def test_a_cell_is_that_of_its_twin(train: Callable[..., RunRecord], arm: str, twin: str) -> None:
    """Losses and averaged weights are those of our arm of that precision to the last bit; the record names both."""
    record, ours = whole(train, arm), whole(train, twin)
    assert (record.status, record.error) == ("completed", None)
    assert record.summary.losses_sha256 == ours.summary.losses_sha256
    assert record.summary.ema_metric_final == ours.summary.ema_metric_final
    assert record.half == ours.half
    assert why_not_as_declared([record]) == ""
    library = Arm.parse(arm).spec.library
    assert library is not None
    found = library.find_module_distribution_and_version()
    assert found is not None
    assert (record.training_library_text, ours.training_library_text) == (" ".join(found[1:]), "")


@pytest.mark.slow
def test_a_cell_in_fp8_says_that_it_was_emulated(train: Callable[..., RunRecord]) -> None:
    """The record has how fp8 was computed, the layers that had none, and the library; a resumed one ends the same."""
    record = train("fp8:rowwise,align=8")
    if record.environment.get("device", "cpu") != "cpu":
        pytest.skip("there is a GPU")
    assert (record.status, record.half) == ("completed", "fp8 emulated")
    assert record.training_library_text.startswith("torchao ")
    (note,) = record.notes
    assert note.startswith("fp8 is not in: ")


@pytest.mark.parametrize(
    "arm",
    [
        "accelerate:bf16",
        pytest.param("fabric:16-true", marks=pytest.mark.slow),
        pytest.param("mmengine:fp32", marks=pytest.mark.slow),
        pytest.param("actnn:bits=4,over=native:bf16", marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_was_stopped_goes_on(train: Callable[..., RunRecord], arm: str) -> None:
    """A run that was stopped in the middle of an epoch ends as one that was not, rounding of activations included."""
    assert train(arm, stop_at_step=3).status == "interrupted"
    second = train(arm, resume="auto")
    assert (second.status, [resumption.step for resumption in second.resumed]) == ("completed", [3])
    assert second.summary.losses_sha256 == whole(train, arm).summary.losses_sha256


@pytest.mark.parametrize(
    ("source", "target", "scale"),
    [
        ("native:fp16,init_scale=1024", "actnn:bits=8,over=native:fp16", 1024),
        pytest.param(
            "actnn:bits=8,over=native:fp16+init_scale=1024",
            "apex:O2,engine=compat",
            1024,
            marks=pytest.mark.slow,
        ),
        pytest.param("fabric:bf16-mixed", "native:bf16", None, marks=pytest.mark.slow),
        ("native:bf16", "accelerate:bf16", None),
    ],
)
def test_a_run_moves_from_one_arm_to_another(
    train: Callable[..., RunRecord], tmp_path: Path, source: str, target: str, scale: float | None
) -> None:
    """A checkpoint of our own arm goes on in another library's and back, with its loss scale where both have one."""
    assert train(source, stop_at_step=3).status == "interrupted"
    (checkpoint,) = tmp_path.glob("cell */checkpoints/step-*.pt")
    record = train(target, "moved", resume=str(checkpoint), resume_into_other_arm=True)
    assert (record.status, record.error) == ("completed", None)
    assert [(resumption.step, resumption.arm) for resumption in record.resumed] == [(3, source)]
    assert record.summary.final_loss_scale == scale
