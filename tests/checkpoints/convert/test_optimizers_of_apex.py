"""State of the fused optimizers: training from a converted file equals training without a break, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampcompare.apex.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from ampcompare.checkpoints.convert.fp32_weights import ConvertedCheckpoint
from tests.checkpoints.convert.small_scripts import APEX, SCALER, build, loss_of

BEFORE, AFTER = 4, 5


class Script:
    """A training in fp32, so that only what a file holds can make a difference."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.model, _ = build()
        self.optimizer = kind(self.model.parameters(), **{"lr": 1e-2, **options})

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            loss = loss_of(self.model, step)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def load(self, path: Path) -> None:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def convert_between(
    tmp_path: Path, first: Script, second: Script, to: Any
) -> tuple[list[float], ConvertedCheckpoint]:
    """Train, convert, and continue in the second script; return its losses."""
    first.train(0, BEFORE)
    precision = {"amp": APEX} if to == "native" else {"scaler": SCALER}
    state = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict(), **precision}
    torch.save(state, tmp_path / "a.pt")
    result = convert_file(
        tmp_path / "a.pt", tmp_path / "b.pt", to, static_scale=True if to == "native" else None
    )
    second.load(tmp_path / "b.pt")
    return second.train(BEFORE, AFTER), result


@pytest.mark.parametrize(
    ("kind", "options"),
    [(FusedLAMB, {}), (FusedLAMB, {"bias_correction": False}), (FusedNovoGrad, {}),
     (FusedAdam, {"bias_correction": False}), (FusedSGD, {"momentum": 0.9})],
    ids=["LAMB", "LAMB without correction", "NovoGrad", "Adam without correction", "SGD"],
)  # fmt: skip
def test_what_a_migrated_script_keeps_resumes_as_it_was(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    """`migrate` leaves these optimizers: they read `step` and `bias_correction` in their groups."""
    whole = Script(kind, **options)
    whole.train(0, BEFORE)
    losses, result = convert_between(tmp_path, Script(kind, **options), Script(kind, **options), "native")
    assert losses == whole.train(BEFORE, AFTER)
    assert not any("optimizer" in line for line in result.lost)
    is_listed = any(line.startswith("optimizer: the state of Fused") for line in result.changed)
    assert is_listed == (kind is not FusedSGD)


@pytest.mark.parametrize(
    ("kind", "becomes", "options"),
    [(FusedAdam, torch.optim.AdamW, {"weight_decay": 0.01}), (FusedAdagrad, torch.optim.Adagrad, {}),
     (FusedSGD, torch.optim.SGD, {"momentum": 0.9})],
)  # fmt: skip
@pytest.mark.parametrize("to", ["native", "apex"])
def test_what_migrate_replaces_resumes_in_torch_and_back(
    tmp_path: Path, kind: Any, becomes: Any, options: dict[str, Any], to: str
) -> None:
    """The state of one runs in the other, and the first loss after the break is that of both."""
    first, second = (kind, becomes) if to == "native" else (becomes, kind)
    whole = Script(first, **options)
    whole.train(0, BEFORE)
    losses, _ = convert_between(tmp_path, Script(first, **options), Script(second, **options), to)
    expected = whole.train(BEFORE, AFTER)
    assert losses[0] == expected[0]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_step_count_goes_to_fused_adam_and_back() -> None:
    """AdamW's count lies in the group too, for FusedAdam, and a second conversion takes it out again."""
    script = Script(torch.optim.AdamW)
    script.train(0, BEFORE)
    state = {"model": script.model.state_dict(), "optimizer": script.optimizer.state_dict(), "scaler": SCALER}
    there = convert_state(state, "apex").state
    (group,) = there["optimizer"]["param_groups"]
    assert (group["step"], group["bias_correction"]) == (BEFORE, True)
    back = convert_state(there, "native").state["optimizer"]["param_groups"]
    assert back == state["optimizer"]["param_groups"]


def _with_bias_of(size: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer.state_dict()


@pytest.mark.parametrize(
    "others",
    [
        {"normalize": {"mean": torch.rand(3), "std": torch.rand(3)}},
        {"stats": {"mean": torch.rand(2, 1), "std": torch.rand(4)}},
        {"model_ema": {"w": torch.rand(2), "b": torch.rand(2), "c": torch.rand(2)}},
        {"prior": {"p": torch.rand(6), "q": torch.rand(1, 2)}},
    ],
)
@pytest.mark.parametrize("with_weights", [True, False])
def test_elements_that_add_up_are_no_sign_of_flat_state(others: dict[str, Any], with_weights: bool) -> None:
    """Tensors of any entry may have together as many elements as a bias of 6: its state is that of one parameter."""
    net, optimizer = _with_bias_of(6)
    weights = net.state_dict() if with_weights else {"head": torch.rand(2, 2), "tail": torch.rand(2)}
    result = convert_state({"model": weights, "optimizer": optimizer, "amp": APEX, **others}, "native")
    _assert_equal(result.state["optimizer"], optimizer)
    assert not any("flat" in line for line in (*result.changed, *result.lost))


def _lbfgs(net: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    for _ in range(2):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(2, 4)).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return optimizer.state_dict()


def _blockwise(optimizer: dict[str, Any]) -> dict[str, Any]:
    """State of Adam in 8 bits, as bitsandbytes saves it: with tables of one dimension."""
    entries = {
        number: {
            "step": entry["step"],
            **{key: torch.zeros(entry["exp_avg"].shape, dtype=torch.uint8) for key in ("state1", "state2")},
            **{key: torch.rand(256) for key in ("qmap1", "qmap2")},
            **{key: torch.rand(1) for key in ("absmax1", "absmax2")},
        }
        for number, entry in optimizer["state"].items()
    }
    return {**optimizer, "state": entries}


@pytest.mark.parametrize("kind", ["LBFGS", "8 bits", "Adafactor"])
def test_vectors_in_the_state_are_no_flat_parameters(kind: str) -> None:
    """LBFGS keeps vectors over all weights, 8-bit state its tables, Adafactor rows: all of it is carried as it is."""
    net, optimizer = _with_bias_of(6)
    if kind == "LBFGS":
        optimizer = _lbfgs(net)
    elif kind == "8 bits":
        optimizer = _blockwise(optimizer)
    else:
        adafactor = torch.optim.Adafactor(net.parameters())
        adafactor.step()
        optimizer = adafactor.state_dict()
    result = convert_state({"model": net.state_dict(), "optimizer": optimizer, "amp": APEX}, "native")
    _assert_equal(result.state["optimizer"], optimizer)
    assert not any(line.startswith("optimizer") for line in (*result.changed, *result.lost))


def _assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype is other.dtype
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            _assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            _assert_equal(mine, theirs)
    else:
        assert one == other


def test_state_of_flat_groups_becomes_that_of_their_weights() -> None:
    """Two flat groups, one of them of a single matrix, whose fp32 copies tell which weights lie in them."""
    net, optimizer = _with_bias_of(6)
    names = list(net.state_dict())
    full = net.state_dict()
    half = {name: value.half() for name, value in full.items()}
    groups = ([1, 2, 3], [0])

    def flatten(key: str, numbers: list[int]) -> torch.Tensor:
        return torch.cat([optimizer["state"][number][key].flatten() for number in numbers])

    state = {
        at: {"step": 1, **{key: flatten(key, numbers) for key in ("exp_avg", "exp_avg_sq")}}
        for at, numbers in enumerate(groups)
    }
    group = optimizer["param_groups"][0]
    wrapped = {
        "dynamic_loss_scale": True, "cur_scale": 64.0, "cur_iter": 3, "last_overflow_iter": -1, "scale_window": 1000,
        "scale_factor": 2.0, "fp32_groups_flat": [
            torch.cat([full[names[number]].flatten() for number in numbers]) for numbers in groups
        ],
        "optimizer_state_dict": {
            "state": state, "param_groups": [{**group, "params": [0]}, {**group, "params": [1]}],
        },
    }  # fmt: skip
    made = convert_state({"model": half, "optimizer": wrapped}, "native").state
    held = made["optimizer"]["state"]
    for at, number in enumerate(number for numbers in groups for number in numbers):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(held[at][key], optimizer["state"][number][key])
    assert [entry["params"] for entry in made["optimizer"]["param_groups"]] == [[0, 1, 2], [3]]
    assert all(torch.equal(made["model"][name], value) for name, value in full.items())
