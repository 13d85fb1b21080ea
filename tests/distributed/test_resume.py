"""Runs of two ranks that stop at a random step and go on, on as many ranks and on another number of them."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex.amp import _amp_state
from ampcompare.backends import fp8
from ampcompare.base.errors import CheckpointError
from ampcompare.base.tensors.tree import first_difference_text
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.settings.config import RunConfig
from ampcompare.training.parallel.ranks import ProcessGroup
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.run_summary import RunMetrics
from tests.distributed.sessions import CPU, make_session

APART = ("train_seconds", "eval_seconds", "resumed")
STEPS = 4
LACKS = fp8.LIBRARY.why_missing()
needs_torchao = pytest.mark.skipif(bool(LACKS), reason=LACKS or "-")
Run = Callable[..., list[Any]]


def configuration(arm: str, kind: str, processes: int, every: int | None = None) -> RunConfig:
    """Two epochs of two updates; accumulation, clipping, an average, and dropout that each rank draws for itself."""
    recipe = {
        "data": {"name": "synthetic", "train_size": 32, "val_size": 17, "image_size": 8},
        "model": {"arch": "convnet", "args": {"width": 4}},
        "global_batch_size": 16,
        "grad_accum_steps": 2,
        "clip_grad": 0.5,
        "ema_decay": 0.9,
        "epochs": 2,
    }
    values = {
        "recipe": recipe,
        "arm": arm,
        "processes": processes,
        "parallel": {"kind": kind},
        "drain_every": 1,
    }
    return RunConfig.model_validate({**values, "saving": {"every_steps": every, "keep_last": STEPS}})


def noisy(model: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Draw from the generator of this rank at each forward pass, as dropout does."""
    return (args[0] + 0.1 * torch.rand(args[0].shape),)


def trained(config: RunConfig, folder: str, stop: int | None) -> tuple[list[Any], Any, list[str]]:
    """Go on from what the folder holds, train to the end or to where it is told to stop.

    Returns what was trained, the state at the end, and what a record says of it.
    """
    try:
        session = make_session(config, folder, stop)
        precision, tally, is_first = session.precision, session.stateful["tally"], not session.resumed
        assert isinstance(tally, RunMetrics)
        if precision.key == "amp":  # a scale that changes while the run goes on
            for scaler in precision._scalers:  # type: ignore[attr-defined]
                scaler._scale_seq_len = 2
                if is_first and scaler.dynamic:
                    scaler._loss_scale = 2.0**24
            session.loop.reload_loss_scales()
        session.assembly.replicas[0].register_forward_pre_hook(noisy, prepend=True)  # type: ignore[arg-type]
        if is_first:
            torch.manual_seed(session.assembly.ranks.rank)  # ranks whose generators are not alike
        events = []
        _, context = choose_cpu_half_mode_and_context(config.cpu_half, precision.half_dtype, CPU)
        with context:
            for event in session.train_and_yield_events():
                if isinstance(event, EpochResult):
                    tally.add_epoch(event)
                    events.append(event.model_dump(exclude={"train_seconds", "eval_seconds"}))
                else:
                    tally.add_steps(event)
                    events += [step._replace(seconds=0.0, data_seconds=0.0) for step in event]
        notes = [note for resumption in session.resumed for note in resumption.notes]
        return events, session.state_dict(), notes
    finally:
        _amp_state.close()


def on_ranks(
    arm: str, kind: str, processes: int, folder: str, stop: int | None, every: int | None = None
) -> tuple[list[Any], Any, list[str]]:
    return trained(configuration(arm, kind, processes, every), folder, stop)


@pytest.mark.parametrize(
    ("arm", "kind"),
    [
        ("apex:O1,engine=compat", "ddp"),
        ("apex:O2,engine=compat", "apex-ddp"),
        ("native:fp16,init_scale=16777216,growth_interval=2", "ddp"),
        ("half:bf16,masters=fp32,grads=fp32,reduce=bf16", "ddp"),
        ("half:bf16,rounding=stochastic", "apex-ddp"),
        pytest.param("fp8:rowwise,align=2", "ddp", marks=needs_torchao),
        ("gemm:nvfp4,sr,keep=none", "ddp"),
    ],
)
def test_two_ranks_go_on_to_the_last_bit(ranks: Run, arm: str, kind: str, tmp_path: Path) -> None:
    """What both ranks do after a checkpoint, between epochs or in the second, is what they did in the run that went on.

    What else an arm keeps, such as the compensations of Kahan's sum, is equal on all ranks and tested with one of them.
    """
    options = {"arm": arm, "kind": kind, "processes": 2, "stop": None}
    stop = random.Random(arm + kind).randrange(STEPS // 2, STEPS)
    whole = ranks(2, on_ranks, folder=str(tmp_path / "a"), every=stop, **options)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / f"step-{stop:08}.pt", tmp_path / "b")
    second = ranks(2, on_ranks, folder=str(tmp_path / "b"), **options)
    for rank in range(2):
        steps, rest = (
            [event for event in events[rank][0] if not isinstance(event, dict)] for events in (whole, second)
        )
        assert len(rest) == STEPS - stop
        assert repr(rest) == repr(steps[stop:])
        assert whole[rank][0][-1] == second[rank][0][-1]
    assert first_difference_text(whole[0][1], second[0][1], ignored_keys=APART) == ""
    assert second[0][2] == []


@pytest.mark.parametrize("ranks_first", [True, False])
def test_another_number_of_ranks_goes_on_with_the_same_batches(
    ranks: Run, tmp_path: Path, ranks_first: bool
) -> None:
    """A checkpoint of two ranks is gone on from by one process with the whole batch, or by two; the record says so."""

    def train(on_two: bool, folder: Path, stop: int | None) -> tuple[list[Any], Any, list[str]]:
        if not on_two:
            return trained(configuration("fp32", "none", 1), str(folder), stop)
        result: tuple[list[Any], Any, list[str]] = ranks(
            2, on_ranks, arm="fp32", kind="ddp", processes=2, folder=str(folder), stop=stop
        )[0]
        return result

    whole, _, _ = train(ranks_first, tmp_path / "a", None)
    first, _, _ = train(ranks_first, tmp_path / "b", 1)
    second, _, notes = train(not ranks_first, tmp_path / "b", None)
    sizes = (2, 1) if ranks_first else (1, 2)
    assert notes == [
        "{} processes then, {} now: the random generators of all ranks are seeded again".format(*sizes)
    ]
    assert len(first + second) == len(whole)
    losses, others = (
        [event.loss for event in events if not isinstance(event, dict)] for events in (second, whole[1:])
    )
    assert losses == pytest.approx(others, rel=0.2)  # batch norm sees halves there and wholes here


def test_another_total_batch_is_refused(ranks: Run, tmp_path: Path) -> None:
    """Positions in an epoch are counted in batches, which must be of the same samples."""
    ranks(2, on_ranks, arm="fp32", kind="ddp", processes=2, folder=str(tmp_path), stop=1)
    config = configuration("fp32", "none", 1)
    other = RunConfig.model_validate(
        {
            **config.model_dump(),
            "recipe": {**config.recipe.model_dump(), "batch_size": 8, "global_batch_size": 8},
        }
    )
    with pytest.raises(
        CheckpointError, match=r"16 samples in an update, 8 on each of 2 processes.*--global-batch-size 16"
    ):
        trained(other, str(tmp_path), None)


def from_the_first(fails: bool) -> Any:
    group = ProcessGroup(CPU)

    def make() -> dict[str, Any]:
        if fails:
            raise CheckpointError(f"no checkpoint, says rank {group.rank}")
        return {"weight": torch.full((2,), float(group.rank + 1))}

    try:
        return group.broadcast_from_rank0(make)
    except CheckpointError as error:
        return str(error)


def test_what_the_first_rank_reads_is_told_to_all(ranks: Run) -> None:
    """Both get its tensors, or both its error, so that none waits for the other."""
    assert [value["weight"].tolist() for value in ranks(2, from_the_first, fails=False)] == [[1.0, 1.0]] * 2
    assert ranks(2, from_the_first, fails=True) == ["no checkpoint, says rank 0"] * 2
