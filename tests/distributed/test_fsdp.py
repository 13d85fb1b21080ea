"""Training with weights in shards: two ranks are one rank, and a run survives stops and another number of ranks."""

import copy
import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampcompare.backends import fp8
from ampcompare.base.errors import AmpCompareError
from ampcompare.base.tensors.tree import first_difference_text
from ampcompare.checkpoints.store.file import read_checkpoint
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.training.hashes import weights_sha256
from ampcompare.training.other_precisions import evaluate_in_other_precisions
from ampcompare.training.precision.base import make_precision
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.run_summary import RunMetrics
from tests.distributed.sessions import CPU, make_session

APART = ("train_seconds", "eval_seconds", "resumed")
BF16 = "fsdp:bf16"
FP16 = "fsdp:fp16,init_scale=1048576,growth_interval=2"
Run = Callable[..., list[Any]]


TASKS = {
    "classification": {"data": {"name": "synthetic", "val_size": 17, "image_size": 8}},
    "lm": {
        "data": {"name": "sentences", "val_size": 17, "sequence_length": 40},
        "model": {"args": {"width": 8, "heads": 2, "depth": 1}},
    },
}


def configuration(
    arm: str,
    kind: str | None,
    processes: int,
    arch: str = "mlp",
    optimizer: str = "adam",
    task: str = "classification",
    evaluated_in: str = "",
    width: int | None = None,
    saving: Mapping[str, Any] | None = None,
    size: int = 32,
) -> RunConfig:
    """Four updates in two epochs with accumulation and clipping, and 17 samples to evaluate, 9 and 8 on two ranks."""
    recipe: dict[str, Any] = {
        "task": task,
        "model": {"arch": arch, "args": {} if width is None else {"width": width}},
        **TASKS[task],
        "optimizer": {"name": optimizer, "lr": 0.05 if optimizer == "sgd" else 0.002},
        "global_batch_size": 16,
        "grad_accum_steps": 2,
        "clip_grad": 0.5,
        "epochs": 2,
    }
    recipe["data"] = {**TASKS[task]["data"], "train_size": size}
    parallel = {} if kind is None else {"kind": kind}
    values = {"recipe": recipe, "arm": arm, "processes": processes, "parallel": parallel, "drain_every": 1}
    values |= {"eval_precision": evaluated_in, "saving": saving or {}}
    return RunConfig.model_validate(values)


def trained(config: RunConfig, folder: str | None = None, stop: int | None = None) -> dict[str, Any]:
    """Train to the end or to a stop, from the newest checkpoint of the folder if there is one."""
    session = make_session(config, folder, stop)
    assembly, tally = session.assembly, session.stateful["tally"]
    assert isinstance(tally, RunMetrics)
    loaded = copy.deepcopy(session.state_dict()) if session.resumed else None
    steps: list[StepRecord] = []
    epochs: list[EpochResult] = []
    with choose_cpu_half_mode_and_context(config.cpu_half, session.precision.half_dtype, CPU)[1]:
        for event in session.train_and_yield_events():
            if isinstance(event, EpochResult):
                tally.add_epoch(event)
                epochs.append(event)
            else:
                tally.add_steps(event)
                steps += event
        others = evaluate_in_other_precisions(session, nullcontext())
    params = list(assembly.replicas[0].parameters())
    return {
        "losses": [step.loss for step in steps],
        "norms": [step.grad_norm for step in steps],
        "applied": [step.applied for step in steps],
        "scales": [step.loss_scales for step in steps],
        "others": [other.model_dump() for other in others],
        "loss": epochs[-1].loss if epochs else None,
        "counts": [epoch.counts for epoch in epochs],
        "per_sample": [epoch.per_sample for epoch in epochs],
        "state": session.state_dict(),
        "loaded": loaded,
        "hash": weights_sha256(assembly.replicas),
        "dtypes": sorted({str(param.dtype) for param in params}),
        "held": sum(
            param.to_local().numel() if hasattr(param, "to_local") else param.numel() for param in params
        ),
        "size": sum(param.numel() for param in params),
        "wrapper": type(assembly.models[0]).__name__,
    }


def on_ranks(arm: str, kind: str | None = None, folder: str | None = None, **options: Any) -> dict[str, Any]:
    stop = options.pop("stop", None)
    with mock.patch.object(torch, "compile", lambda function, **_: function):  # torchao compiles its step
        return trained(configuration(arm, kind, dist.get_world_size(), **options), folder, stop)


def alone(ranks: Run, **options: Any) -> dict[str, Any]:
    """Train on one rank."""
    return ranks(1, on_ranks, **options)[0]  # type: ignore[no-any-return]


def flat(result: dict[str, Any]) -> torch.Tensor:
    weights = result["state"]["model"]
    return torch.cat([value.double().flatten() for value in weights.values()])


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float((flat(one) - flat(other)).norm() / flat(other).norm())


# Two ranks add the gradients of halves of a batch, one rank takes that of the whole. A gradient is rounded to the type
# that computes it, so that the two sums differ by up to half a unit in its last place: a share of 2**-24, 2**-9 or
# 2**-12 of what six steps of SGD add to weights, which is less than a tenth of them. Weights in bf16 are rounded too.
TOLERANCE = {
    "fp32": 2.0**-22,
    "native:bf16": 2.0**-12,
    BF16: 2.0**-12,
    FP16: 2.0**-15,
    "half:bf16": 2.0**-9,
}


SIX_UPDATES = {"optimizer": "sgd", "size": 48}


class Unbroken(NamedTuple):
    """What each of two ranks returned of six updates in shards, and the folder of their checkpoints."""

    ranks: list[dict[str, Any]]
    folder: Path

    def copied(self, folder: Path) -> str:
        """Return another folder that holds the checkpoint of the fourth update, to resume from it."""
        folder.mkdir()
        shutil.copy(self.folder / "step-00000004.pt", folder)
        return str(folder)


@pytest.fixture(scope="module")
def unbroken(ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Unbroken]:
    """The run of an arm on two ranks, made once, which ends with an evaluation in fp32 and bf16."""

    @cache
    def of_arm(arm: str) -> Unbroken:
        folder = tmp_path_factory.mktemp("unbroken")
        saved = {"folder": str(folder), "saving": {"every_steps": 4, "keep_last": 9}}
        options = {"arm": arm, "kind": "fsdp", "evaluated_in": "fp32,bf16", **saved, **SIX_UPDATES}
        return Unbroken(ranks(2, on_ranks, **options), folder)

    return of_arm


@pytest.mark.parametrize("arm", TOLERANCE)
def test_two_ranks_are_one_rank(ranks: Run, unbroken: Callable[[str], Unbroken], arm: str) -> None:
    """Weights of two ranks are those of one to rounding; each holds half of them and sees the same numbers."""
    one, other = unbroken(arm).ranks
    single = alone(ranks, arm=arm, kind="fsdp", **SIX_UPDATES)
    assert distance(one, single) <= TOLERANCE[arm]
    assert one["losses"] == pytest.approx(single["losses"], rel=10 * TOLERANCE[arm])
    # Of an overflow the norm is inf or NaN, as the sums of the ranks meet.
    norms = [[norm for norm in each["norms"] if math.isfinite(norm)] for each in (one, single)]
    assert norms[0] == pytest.approx(norms[1], rel=10 * TOLERANCE[arm])
    for name in ("losses", "norms", "applied", "scales", "counts", "hash", "others"):
        assert repr(one[name]) == repr(other[name]), name  # the norm of an overflow is no number
    assert one["held"] + other["held"] == single["held"] == single["size"]
    assert abs(one["held"] - other["held"]) < 0.1 * single["size"]
    assert one["dtypes"] == (["torch.bfloat16"] if arm.startswith("half") else ["torch.float32"])
    assert one["wrapper"].startswith("FSDP")
    assert one["applied"].count((False,)) == single["applied"].count((False,)) == (3 if arm == FP16 else 0)


@pytest.mark.parametrize("arm", TOLERANCE)
def test_two_ranks_resume_to_the_last_bit(
    ranks: Run, unbroken: Callable[[str], Unbroken], arm: str, tmp_path: Path
) -> None:
    """A run from a checkpoint in its second epoch ends as the unbroken one, on both ranks."""
    whole = unbroken(arm)
    second = ranks(2, on_ranks, arm=arm, kind="fsdp", folder=whole.copied(tmp_path / "rest"), **SIX_UPDATES)
    for rank in range(2):
        assert len(second[rank]["losses"]) == 2
        assert second[rank]["losses"] == whole.ranks[rank]["losses"][4:]
    assert first_difference_text(whole.ranks[0]["state"], second[0]["state"], ignored_keys=APART) == ""


@pytest.mark.parametrize("arm", TOLERANCE)
def test_whole_weights_are_evaluated_in_other_precisions(
    unbroken: Callable[[str], Unbroken], arm: str
) -> None:
    """The precision that an arm has itself gives its own loss."""
    found = unbroken(arm).ranks[0]
    others = {other["precision"]: other for other in found["others"]}
    assert list(others) == ["fp32", "bf16"]
    assert not [other["error"] for other in others.values() if other["error"]]
    same = {FP16: None, "fp32": "fp32"}.get(arm, "bf16")
    for name, other in others.items():
        assert (other["loss"] == found["loss"]) is (name == same), name
        assert other["loss"] == pytest.approx(found["loss"], rel=0.02)


def test_fp32_in_shards_is_fp32(ranks: Run, unbroken: Callable[[str], Unbroken]) -> None:
    """Sharding itself changes no bit on one rank, and on two nothing but the order of sums; evaluation is exact."""
    plain, sharded = (alone(ranks, arm="fp32", kind=kind, arch="convnet") for kind in ("none", "fsdp"))
    assert sharded["hash"] == plain["hash"]
    assert sharded["losses"] == plain["losses"]
    assert (
        first_difference_text(sharded["state"]["optimizer"], plain["state"]["optimizer"], ignored_keys=())
        == ""
    )
    two = unbroken("fp32").ranks[0]
    ddp = ranks(2, on_ranks, arm="fp32", kind="ddp", **SIX_UPDATES)[0]
    assert distance(two, ddp) <= 1e-6
    assert two["counts"] == ddp["counts"]
    assert two["per_sample"] == ddp["per_sample"]
    assert None not in two["per_sample"]


def whole_and_rest(train: Callable[..., Any], folder: Path, **options: Any) -> tuple[Any, Any]:
    """Train four updates and save after the third, and once more what comes after it."""
    whole = train(folder=str(folder / "whole"), saving={"every_steps": 3, "keep_last": 9}, **options)
    (folder / "rest").mkdir()
    shutil.copy(folder / "whole" / "step-00000003.pt", folder / "rest")
    return whole, train(folder=str(folder / "rest"), **options)


def assert_resumed(whole: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that the last update of four, and the state after it, are those of the unbroken run."""
    assert second["losses"] == whole["losses"][3:]
    assert len(second["losses"]) == 1
    assert first_difference_text(whole["state"], second["state"], ignored_keys=APART) == ""


def test_one_rank_resumes_to_the_last_bit(ranks: Run, tmp_path: Path) -> None:
    """Statistics of batch norm, which are not in shards, are saved with the weights."""
    assert_resumed(*whole_and_rest(partial(alone, ranks), tmp_path, arm=FP16, kind="fsdp", arch="convnet"))


LACKS = fp8.LIBRARY.why_missing()
needs_torchao = pytest.mark.skipif(bool(LACKS), reason=LACKS or "-")


def refused(**options: Any) -> str:
    """Return why a run could not be resumed or saved, as this rank says it."""
    try:
        on_ranks(**options)
    except AmpCompareError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@needs_torchao
def test_moments_in_8_bits_of_shards_are_not_saved(ranks: Run, tmp_path: Path) -> None:
    """Each rank has blocks of its own shard: one line on every rank says what to do."""
    options = {"arm": BF16, "optimizer": "torchao.optim:AdamW8bit", "kind": "fsdp", "width": 64}
    one, other = ranks(2, refused, folder=str(tmp_path), stop=2, **options)
    assert one == other
    assert one.startswith("CheckpointError: the optimizer keeps state in a few bits")


@pytest.mark.parametrize("two_first", [True, False])
def test_another_number_of_ranks_resumes(ranks: Run, two_first: bool, tmp_path: Path) -> None:
    """One rank resumes from two, and two from one, with equal weights and state, and goes on as they would have."""

    def train(folder: str, **options: Any) -> dict[str, Any]:
        on_two = two_first is folder.endswith("whole")
        return ranks(2 if on_two else 1, on_ranks, folder=folder, **options)[0]  # type: ignore[no-any-return]

    whole, second = whole_and_rest(train, tmp_path, arm=BF16)
    saved = read_checkpoint(tmp_path / "rest" / "step-00000003.pt")
    for part in ("model", "optimizer", "scaler"):
        assert (
            first_difference_text({part: saved[part]}, {part: second["loaded"][part]}, ignored_keys=()) == ""
        )
    assert second["losses"] == pytest.approx(whole["losses"][3:], rel=1e-2)


def one_shard_overflows() -> tuple[list[Any], list[Any]]:
    """Make one element of a gradient infinite on rank 1 alone, after the reduction, and step."""
    precision = make_precision("fsdp:fp16,init_scale=8", device="cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)])  # type: ignore[assignment]
    outcomes = []
    for overflows in (True, False):
        precision.backward(model(torch.ones(2, 4)).sum(), [optimizer])
        if overflows and dist.get_rank() == 1:
            next(model.parameters()).grad.to_local()[0, 0] = math.inf  # type: ignore[union-attr]
        outcomes.append(precision.step(optimizer))
        optimizer.zero_grad()
    return [outcome.applied for outcome in outcomes], [outcome.loss_scales for outcome in outcomes]


def test_an_overflow_in_one_shard_skips_the_step_on_all(ranks: Run) -> None:
    """The overflow flag of the loss scale is shared: a rank that saw none skips too, and halves its scale."""
    assert ranks(2, one_shard_overflows) == [([(False,), (True,)], [(4.0,), (4.0,)])] * 2


def gathered_weights() -> list[list[float]]:
    """Return all weights and buffers of a model that each rank has initialized otherwise, sharded."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for tensor in model.state_dict().values():
        tensor.add_(dist.get_rank())
    precision = make_precision("fsdp:bf16", device="cpu")
    (model,), _ = precision.prepare([model], [torch.optim.SGD(model.parameters(), lr=0.1)])  # type: ignore[assignment]
    values = model.state_dict().values()
    from torch.distributed.tensor import DTensor  # a second of CPU time, in every process of the tests

    return [(each.full_tensor() if isinstance(each, DTensor) else each).flatten().tolist() for each in values]


def test_all_ranks_begin_with_the_weights_of_the_first(ranks: Run) -> None:
    first, second = ranks(2, gathered_weights)
    torch.manual_seed(0)
    assert first == second
    assert first[0] == nn.Linear(3, 2).weight.flatten().tolist()
    assert first[-1] == [0]
