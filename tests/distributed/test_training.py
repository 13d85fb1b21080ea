"""Training over several gloo ranks: they stay equal, and equal to one process that sees the whole batch."""

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampcompare.base.errors import RanksDiffer
from ampcompare.experiment.matrix import DEFAULT_ARMS
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.tasks.classification import Classification
from ampcompare.tasks.data import SampleOptions
from ampcompare.tasks.in_memory import make_memory_data
from ampcompare.training.evaluate import evaluate_models
from ampcompare.training.parallel.ranks import ProcessGroup, digest_of_weights
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.session import TrainingSession
from tests.distributed.sessions import CPU, make_session

KINDS = ("ddp", "apex-ddp")
OVERFLOWING = [("native:fp16,init_scale=1e10", kind) for kind in KINDS]
Run = Callable[..., list[Any]]


def configuration(arm: str = "fp32", *, processes: int = 1, total: int = 16, **options: Any) -> RunConfig:
    """Ten updates of `total` samples in one epoch, with 33 samples for evaluation."""
    recipe = {
        "data": {"name": "synthetic", "train_size": 160, "val_size": 33, "image_size": 8},
        "model": {"arch": options.pop("arch", "mlp")},
        "optimizer": {"lr": options.pop("lr", 0.05)},
        "epochs": options.pop("epochs", 1),
        "global_batch_size": total,
        "grad_accum_steps": options.pop("accumulation", 1),
    }
    return RunConfig.model_validate(
        {"recipe": recipe, "arm": arm, "processes": processes, "drain_every": 4, **options}
    )


def outcome(session: TrainingSession) -> dict[str, Any]:
    """Train to the end, as a cell does, and return what can be compared."""
    _, arithmetic = choose_cpu_half_mode_and_context(
        session.config.cpu_half, session.assembly.precision.half_dtype, CPU
    )
    with arithmetic:
        events = list(session.train_and_yield_events())
    steps = [step for event in events if not isinstance(event, EpochResult) for step in event]
    params = [param.detach().float().flatten() for param in session.assembly.replicas[0].parameters()]
    return {
        "losses": [step.loss for step in steps],
        "applied": [step.applied for step in steps],
        "scales": [step.loss_scales for step in steps],
        "epochs": [event for event in events if isinstance(event, EpochResult)],
        "weights": torch.cat(params),
        "digest": digest_of_weights(session.assembly.replicas),
        "diverged": session.divergence.diverged_step,
        "wrapper": type(session.assembly.models[0]).__module__,
    }


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def train(arm: str, kind: str, **options: Any) -> dict[str, Any]:
    options = {**options, "parallel": {"kind": kind, **options.get("parallel", {})}}
    return outcome(make_session(configuration(arm, processes=dist.get_world_size(), **options)))


@pytest.mark.parametrize(("arm", "kind"), [*zip(DEFAULT_ARMS, KINDS * 9, strict=False), *OVERFLOWING])
def test_every_arm_trains(ranks: Run, arm: str, kind: str) -> None:
    """Two ranks of every arm end with equal weights, and have seen the same losses, skipped steps and loss scales."""
    one, other = ranks(2, train, arm=arm, kind=kind, arch="convnet", total=32)
    assert one["digest"] == other["digest"]
    assert (one["losses"], one["applied"], one["scales"]) == (
        other["losses"],
        other["applied"],
        other["scales"],
    )
    assert len(one["losses"]) == 5
    assert one["weights"].isfinite().all()
    assert one["wrapper"].startswith("torch.nn" if kind == "ddp" else "ampcompare.apex")
    if "init_scale" in arm:
        assert not all(all(applied) for applied in one["applied"])


@pytest.fixture(scope="module")
def whole() -> Callable[[str], dict[str, Any]]:
    """What one process makes of all batches in fp32 with a model of some architecture."""
    return cache(lambda arch: outcome(make_session(configuration(arch=arch))))


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("ddp", {}),
        ("apex-ddp", {}),
        ("apex-ddp", {"bucket_cap_mb": 0.001}),
        ("apex-ddp", {"delay_allreduce": True}),
    ],
)
def test_two_halves_are_a_whole(ranks: Run, whole: Any, kind: str, parallel: dict[str, Any]) -> None:
    """After ten updates in fp32, two ranks with half the batch have the weights of one process with all of it.

    Small buckets, or one reduction at the end, change nothing.
    """
    both = ranks(2, train, arm="fp32", kind=kind, parallel=parallel)[0]
    assert len(both["losses"]) == 10
    assert distance(both["weights"], whole("mlp")["weights"]) <= 1e-6
    assert both["losses"] == pytest.approx(whole("mlp")["losses"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_synchronized_batch_norm_is_batch_norm_of_the_whole(ranks: Run, whole: Any, kind: str) -> None:
    alone = whole("convnet")
    synchronized = ranks(2, train, arm="fp32", kind=kind, arch="convnet", parallel={"sync_bn": "apex"})[0]
    assert distance(synchronized["weights"], alone["weights"]) <= 1e-5
    assert synchronized["epochs"][0].counts["top-1"] == alone["epochs"][0].counts["top-1"]


def test_batch_norm_of_halves_is_not_that_of_the_whole(ranks: Run, whole: Any) -> None:
    plain = ranks(2, train, arm="fp32", kind="ddp", arch="convnet")[0]
    assert distance(plain["weights"], whole("convnet")["weights"]) > 1e-3


@pytest.mark.parametrize(("arm", "kind"), [("fp32", "ddp"), ("apex:O2,loss_scale=128", "apex-ddp")])
def test_accumulation_is_no_accumulation(ranks: Run, arm: str, kind: str) -> None:
    """Two micro-batches, of which the first is not reduced, make the update of one batch; ranks stay equal."""
    whole = ranks(2, train, arm=arm, kind=kind)[0]
    cut, other = ranks(2, train, arm=arm, kind=kind, accumulation=2)
    assert cut["digest"] == other["digest"]
    assert distance(cut["weights"], whole["weights"]) <= (1e-6 if arm == "fp32" else 2e-3)


def equal_gradients(kind: str) -> list[bool]:
    """Return after which of four micro-batches with other samples on each rank the gradients are equal."""
    session = make_session(configuration(processes=2, accumulation=4, parallel={"kind": kind}))
    loop, params = session.loop, list(session.assembly.replicas[0].parameters())
    images = torch.zeros(8, *session.assembly.task.data.sample_shape)
    labels = torch.zeros(8, dtype=torch.int64)
    equal: list[bool] = []
    for _ in range(2):  # the first backward pass of Apex's wrapper learns the order of gradients
        equal = []
        for index in range(4):
            with loop.parallel.no_sync(loop.models) if index < 3 else contextlib.nullcontext():
                loop.loss_of(loop.models, (images + dist.get_rank() + index, labels)).backward()
            grads = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
            parts = [torch.empty_like(grads) for _ in range(2)]
            dist.all_gather(parts, grads)
            equal.append(torch.equal(*parts))
        loop.optimizers[0].zero_grad()
    return equal


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_last_micro_batch_is_reduced(ranks: Run, kind: str) -> None:
    """Gradients of two ranks with different samples differ until the last micro-batch, which makes them equal."""
    assert ranks(2, equal_gradients, kind=kind) == [[False, False, False, True]] * 2


def evaluated(kind: str) -> tuple[Any, Any]:
    """Return the evaluation by all ranks, and by this one alone, of the same weights."""
    size = dist.get_world_size()
    session = make_session(
        configuration(processes=size, total=8 * size, arch="convnet", parallel={"kind": kind})
    )
    together = [event for event in session.train_and_yield_events() if isinstance(event, EpochResult)][-1]
    assembly = session.assembly
    batches = assembly.task.data.val_batches(8, device=CPU)
    return together, evaluate_models(
        assembly.task, assembly.replicas, assembly.precision, batches, CPU, indices=range(33)
    )


def test_evaluation_counts_each_sample_once(ranks: Run) -> None:
    """The counts of ranks of which one has a sample more sum to those of one process over all samples."""
    for together, alone in ranks(4, evaluated, kind="ddp"):
        assert (together.samples, alone.samples) == (33, 33)
        assert together.counts == alone.counts
        assert together.loss == pytest.approx(alone.loss, rel=1e-6)
        assert together.per_sample == alone.per_sample is not None


def evaluated_with_padding() -> Any:
    """Return the evaluation of 33 samples of which every rank gets 17, as torch's distributed sampler pads them."""
    group = ProcessGroup(CPU)
    logits, labels = torch.eye(11).repeat(3, 1), torch.arange(33) % 11
    mine = torch.arange(group.rank, 34, group.size) % 33
    batches = [(logits[part], labels[part]) for part in mine.split(5)]
    indices = range(group.rank, 33, group.size)
    part = (torch.zeros(11, 11), torch.arange(11))
    data = make_memory_data(
        "eleven", part, part, SampleOptions(0), num_classes=11, moved_share=0.0, background=0.0
    )
    return evaluate_models(
        Classification(data),
        [nn.Identity()],
        make_precision("fp32"),
        batches,
        CPU,
        group.sum,
        indices=indices,
    )


def test_padded_evaluation_has_no_images(ranks: Run) -> None:
    """Where one rank of two saw a repeated sample, neither has per-image results, and the counts stay."""
    for result in ranks(2, evaluated_with_padding):
        assert (result.samples, result.per_sample) == (34, None)


def drift(what: str) -> str:
    """Change something on rank 1 behind the others' backs, and return the error."""
    arm = "apex:O2" if what == "scale" else "fp32"
    session = make_session(configuration(arm, processes=2, parallel={"kind": "apex-ddp"}))
    events = session.train_and_yield_events()
    next(events)
    if dist.get_rank() == 1 and what == "weights":
        with torch.no_grad():
            next(session.assembly.replicas[0].parameters()).flatten()[0].add_(2.0**-10)
    if dist.get_rank() == 1 and what == "scale":
        session.precision._scalers[0]._loss_scale = 64.0  # type: ignore[attr-defined]
    try:
        list(events)
    except RanksDiffer as error:
        return str(error)
    return "no error"


def test_ranks_that_drift_apart_are_found(ranks: Run) -> None:
    """One changed bit of a weight on one rank ends every rank with an error that names that one."""
    for text in ranks(2, drift, what="weights"):
        assert text.startswith("rank 1 of 2 hold another state of training than rank 0: hash of weights is")
        assert "end of epoch 0" in text


def test_loss_scales_that_differ_are_found(ranks: Run) -> None:
    for text in ranks(2, drift, what="scale"):
        assert "rank 1" in text
        assert "loss scales" in text


def one_bad_rank(on_nan: str) -> tuple[int | None, int, int]:
    """Break the weights of rank 1 only; return where each rank saw divergence and how many steps and epochs it made."""
    session = make_session(configuration(processes=2, on_nan=on_nan, parallel={"kind": "ddp"}))
    steps, epochs = list[StepRecord](), 0
    for number, event in enumerate(session.train_and_yield_events()):
        if isinstance(event, EpochResult):
            epochs += 1
            continue
        steps += event
        if number == 0 and dist.get_rank() == 1:
            with torch.no_grad():
                next(session.assembly.replicas[0].parameters()).fill_(float("nan"))
    return session.divergence.diverged_step, len(steps), epochs


@pytest.mark.parametrize(("on_nan", "length"), [("stop", (4, 0)), ("continue", (10, 1))])
def test_ranks_stop_together(ranks: Run, on_nan: str, length: tuple[int, int]) -> None:
    """Weights that are not finite on one rank end the run, or do not, on both after the same step."""
    one, other = ranks(2, one_bad_rank, on_nan=on_nan)
    assert one == other
    assert one[1:] == length
    assert one[0] is not None


def test_a_run_that_diverges_on_all(ranks: Run) -> None:
    """A learning rate far too large diverges at the same step on both ranks."""
    one, other = ranks(2, train, arm="fp32", kind="ddp", lr=1e30)
    assert one["diverged"] == other["diverged"] is not None


def spoken() -> tuple[list[float], list[float], list[bool], list[Any]]:
    group = ProcessGroup(CPU)
    values = torch.tensor([1.0, float(group.rank)], dtype=torch.float16)
    flags = [group.any(group.rank == 1), group.any(False)]
    return group.sum(values).tolist(), group.mean(values).tolist(), flags, group.gather(("a", group.rank))


def test_what_ranks_tell_each_other(ranks: Run) -> None:
    """Sums, means, flags and plain values are the same on every rank, and what went in is left alone."""
    expected = ([3.0, 3.0], [1.0, 1.0], [True, False], [("a", 0), ("a", 1), ("a", 2)])
    assert ranks(3, spoken) == [expected] * 3
