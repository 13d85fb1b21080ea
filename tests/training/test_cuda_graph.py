"""A recorded step, repeated from a tape of its operations on the same memory, goes on as one that is run."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.base.errors import EnvironmentUnfit, UnsupportedCombination
from ampcompare.settings.config import RunConfig
from ampcompare.training.build_loop import WARM_UP, StepGraph, move_rates_to_device, refuse_cuda_graph
from ampcompare.training.loop import update
from ampcompare.training.parallel.replication import SingleProcess
from ampcompare.training.precision.base import make_precision

CPU = torch.device("cpu")


class Tape(TorchDispatchMode):
    """A recorder for a CPU: writes down each operation with its tensors, and does them again on the same storages."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, Any]] = []
        self.recorded = self.replays = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.entries.append((func, args, kwargs or {}, result))
        return result

    def warm_up_code(self, code: Callable[[], Any]) -> Any:
        return code()

    def record_kernels(self, code: Callable[[], Any]) -> Any:
        self.entries = []
        self.recorded += 1
        with self:
            return code()

    def replay_kernels(self) -> None:
        self.replays += 1
        if self.replays == 1:  # recording ran the code once, which a graph does not
            return
        with torch.no_grad():
            for func, args, kwargs, result in self.entries:
                again = func(*args, **kwargs)
                given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
                for old, new in zip(tensors(result), tensors(again), strict=True):
                    if old.untyped_storage().data_ptr() not in given and "empty" not in func._schema.name:
                        old.copy_(new)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the engine's flags on the device, and close its session afterwards."""
    amp = sys.modules.get("ampcompare.apex.amp") or __import__("ampcompare.apex.amp", fromlist=["amp"])
    device_skip = importlib.import_module("ampcompare.apex.amp._engine.device_skip")
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu", "cuda"}))
    yield
    amp._amp_state.close()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of 6, of which the eighth overflows and the tenth is smaller."""
    generator = torch.Generator().manual_seed(3)
    made = [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(count)
    ]
    made[7][0][0, 0] = float("inf")
    made[9] = (made[9][0][:3], made[9][1][:3])
    return made


def loss_of(models: Any, batch: Any) -> Tensor:
    return (models[0](batch[0]).float() - batch[1]).square().mean() / 256  # small enough for half gradients


def train(arm: str, kind: str, *, graph: bool, growth: int = 4) -> tuple[Any, Any]:
    """Train 14 steps, and return what was recorded of each, and the tape."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    options = {"momentum": 0.9, "weight_decay": 1e-3} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, fused=True, **options)
    precision = make_precision(arm)
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    for scaler in getattr(precision, "_scalers", ()):
        scaler._scale_seq_len = growth
    move_rates_to_device([optimizer], CPU)
    tape = Tape()
    assert precision.why_no_cuda_graph([optimizer]) is None
    make = StepGraph(update, tape) if graph else update
    seen = []
    outcomes = []
    for step, batch in enumerate(batches(14)):
        optimizer.param_groups[0]["lr"].fill_(0.05 / (1 + step))
        losses, norm, outcome = make([model], [optimizer], precision, SingleProcess(), loss_of, [batch], 10.0)
        outcomes.append(outcome)
        weights = [param.detach().clone() for param in model.parameters()]
        seen.append([losses[0].item(), norm.item(), *[w.float().view(torch.int32).tolist() for w in weights]])
    read = [(outcome.applied, outcome.loss_scales) for outcome in outcomes]
    sys.modules["ampcompare.apex.amp"]._amp_state.close()
    return (repr(seen), read, precision.state_dict() if arm.startswith("native") else None), tape


ARMS = ["fp32", "half:loss_scale=8", "native:fp16", "native:bf16", "apex:O1", "apex:O2", "apex:O3"]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("arm", ARMS)
def test_repetitions_go_on_as_steps_do(arm: str, kind: str) -> None:
    """Losses, norms, weights, outcomes and scales have the same bits, over an overflow, growth and a smaller batch."""
    arm = f"{arm},engine=compat" if arm.startswith("apex") else arm
    expected, _ = train(arm, kind, graph=False)
    found, tape = train(arm, kind, graph=True)
    assert found == expected
    assert (tape.recorded, tape.replays) == (1, 14 - WARM_UP - 1)
    scaled = arm.startswith(("native:fp16", "apex:O1", "apex:O2"))
    assert [applied for applied, _ in found[1]].count((False,)) == (1 if scaled else 0)


def test_bounds_hold_in_repetitions() -> None:
    """A scale that can reach its ceiling only after the recording stops there."""
    expected, _ = train("apex:O1,engine=compat,max_loss_scale=131072.0", "SGD", graph=False, growth=2)
    found, _ = train("apex:O1,engine=compat,max_loss_scale=131072.0", "SGD", graph=True, growth=2)
    assert found == expected
    assert max(scales for _, scales in found[1]) == (131072.0,)


def test_the_scale_can_be_read_between_repetitions() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 3)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    precision = make_precision("apex:O2,engine=compat")
    (model,), (optimizer,) = precision.prepare([model], [optimizer])
    move_rates_to_device([optimizer], CPU)
    precision.why_no_cuda_graph([optimizer])
    graph = StepGraph(update, Tape())
    for step, batch in enumerate(batches(10)[:9]):
        graph([model], [optimizer], precision, SingleProcess(), loss_of, [batch])
        overflowed = step >= 7
        assert precision.loss_scales() == (32768.0 if overflowed else 65536.0,)
        assert precision.state_dict()["loss_scaler0"]["unskipped"] == (step - 7 if overflowed else step + 1)


def test_a_step_that_reads_the_device() -> None:
    """What waits for the device while it is recorded ends in an error that says so."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    precision = make_precision("fp32")

    def reading(models: Any, batch: Any) -> Tensor:
        loss = loss_of(models, batch)
        return loss * (1.0 if loss.item() > 0 else 2.0)

    graph = StepGraph(update, Tape())
    made = batches(10)
    for batch in made[:WARM_UP]:
        graph([model], [optimizer], precision, SingleProcess(), reading, [batch])
    with pytest.raises(
        UnsupportedCombination, match=r"waits for the device: .* capturing; leave out --cuda-graph"
    ):
        graph([model], [optimizer], precision, SingleProcess(), reading, [made[WARM_UP]])


def test_what_cannot_be_recorded() -> None:
    """A CPU, an optimizer that counts on the host, and an arm that reads its flag there are refused with the reason."""
    model = nn.Linear(4, 3)
    host = torch.optim.Adam(model.parameters())
    fused = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    precision = make_precision("fp32")
    with pytest.raises(EnvironmentUnfit, match="CUDA device, but this run is on cpu"):
        refuse_cuda_graph(CPU, precision, [fused])
    with pytest.raises(UnsupportedCombination, match="Adam keeps the learning rate"):
        refuse_cuda_graph(torch.device("cuda"), precision, [host])
    with pytest.raises(UnsupportedCombination, match="does not support CUDA graphs"):
        refuse_cuda_graph(torch.device("cuda"), make_precision("half:dynamic"), [fused])
    apex = make_precision("apex:O2,engine=compat")
    _, (hooked,) = apex.prepare([model], [fused])
    refuse_cuda_graph(torch.device("cuda"), apex, [hooked])
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedCombination, match="a step hook"):
        refuse_cuda_graph(torch.device("cuda"), apex, [hooked])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parallel": {"kind": "ddp"}}, "parallel kind ddp"),
        ({"on_nan": "rollback"}, "on_nan rollback"),
        ({"recipe": {"compile": "eager"}}, "compile eager"),
        ({"recipe": {"optimizer": {"layer_lr": "larc"}}}, "layer_lr larc"),
    ],
)
def test_combinations_that_a_graph_excludes(options: dict[str, Any], reason: str) -> None:
    """Settings that need Python inside the step are refused when the configuration is read."""
    recipe = {**options.pop("recipe", {}), "cuda_graph": True}
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate({"recipe": recipe, **options})
