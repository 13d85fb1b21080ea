"""Language modelling over ranks: lines of unequal length weigh as in one process, whether or not blocks run again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ampcompare.base.tensors.sharded import gather_whole
from ampcompare.results.records.evaluation import EpochResult
from ampcompare.settings.config import RunConfig
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from tests.distributed.sessions import CPU, make_session

Run = Callable[..., list[Any]]


def configuration(arm: str, processes: int = 1, kind: str = "none", **options: Any) -> RunConfig:
    """Three updates of twelve sentences, of which two ranks have unequal numbers of bytes."""
    recipe = {
        "task": "lm",
        "data": {"name": "sentences", "train_size": 36, "val_size": 7, "sequence_length": 40},
        "model": {"args": {"width": 8, "heads": 2, "depth": 1}},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "epochs": 1,
        "global_batch_size": 12,
        **options,
    }
    values = {"recipe": recipe, "arm": arm, "processes": processes, "parallel": {"kind": kind}}
    return RunConfig.model_validate(values)


def outcome(config: RunConfig) -> dict[str, Any]:
    """Train to the end, and return what can be compared."""
    session = make_session(config)
    _, arithmetic = choose_cpu_half_mode_and_context(config.cpu_half, session.precision.half_dtype, CPU)
    with arithmetic:
        events = list(session.train_and_yield_events())
    weights = [
        gather_whole(parameter.detach()).flatten() for parameter in session.assembly.replicas[0].parameters()
    ]
    return {
        "losses": [step.loss for event in events if not isinstance(event, EpochResult) for step in event],
        "values": [event.values["bits per byte"] for event in events if isinstance(event, EpochResult)],
        "weights": torch.cat(weights),
    }


def train(arm: str, kind: str, **options: Any) -> dict[str, Any]:
    return outcome(configuration(arm, dist.get_world_size(), kind=kind, **options))


@pytest.mark.parametrize("kind", ["ddp", "apex-ddp", "fsdp"])
def test_lines_on_ranks_are_those_of_one_process(ranks: Run, kind: str) -> None:
    """Two ranks, each in micro-batches, end with the weights and the metric of one process with the whole batch."""
    alone = outcome(configuration("fp32"))
    both = ranks(2, train, arm="fp32", kind=kind, grad_accum_steps=3)
    assert len(alone["losses"]) == 3
    assert torch.equal(both[0]["weights"], both[1]["weights"])
    torch.testing.assert_close(both[0]["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert both[0]["values"] == pytest.approx(alone["values"], rel=1e-5)


@pytest.mark.parametrize(("arm", "kind"), [("apex:O1,engine=compat", "apex-ddp"), ("native:bf16", "ddp")])
def test_activations_computed_again_change_nothing(ranks: Run, arm: str, kind: str) -> None:
    """Both wrappers reduce the same gradients, to the last bit, when blocks run again in the backward pass."""
    plain, again = (
        ranks(2, train, arm=arm, kind=kind, checkpoint_activations=checkpoint)[0]
        for checkpoint in (False, True)
    )
    assert torch.equal(plain["weights"], again["weights"])
    assert plain["losses"] == again["losses"]
