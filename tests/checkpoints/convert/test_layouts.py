"""Weights, fp32 copies and loss scales in the layouts of other programs, found by what they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConversionError
from ampcompare.checkpoints.convert.convert import convert_file, convert_state
from ampcompare.checkpoints.convert.detect import contents_by_kind
from ampcompare.checkpoints.convert.inspect import inspect_file

GRADSCALER = {
    "scale": 8.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 5,
}
FACTS = {"cur_iter": 120, "last_overflow_iter": 40, "scale_factor": 2.0, "scale_window": 1000}


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2), nn.LayerNorm(2))
    with torch.no_grad():
        for number, param in enumerate(net.parameters()):
            param.add_(torch.rand_like(param) * 1e-2 if number < 2 else 1e-4 * (number + 1))
    return net


class Case:
    """The parts of a checkpoint: fp16 weights, their fp32 values, and Adam's state over all of them."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        net = model()
        self.full = {name: value.clone() for name, value in net.state_dict().items()}
        self.half = {name: value.to(dtype) for name, value in self.full.items()}
        self.masters = list(self.full.values())
        self.flat = torch.cat([master.flatten() for master in self.masters])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        self.optimizer = optimizer.state_dict()
        entries = self.optimizer["state"].values()
        moments = {
            key: torch.cat([entry[key].flatten() for entry in entries]) for key in ("exp_avg", "exp_avg_sq")
        }
        group = {**self.optimizer["param_groups"][0], "params": [0]}
        self.flat_optimizer = {"state": {0: {"step": 1, **moments}}, "param_groups": [group]}

    def contrib(self, **copies: Any) -> dict[str, Any]:
        inner = self.flat_optimizer if "fp32_groups_flat" in copies else self.optimizer
        state = {
            "dynamic_loss_scale": True,
            "cur_scale": 4096.0,
            **FACTS,
            "optimizer_state_dict": inner,
            **copies,
        }
        return {"model": self.half, "optimizer": state}

    def megatron(self) -> dict[str, Any]:
        embedding, *rest = self.half
        nested = {"language_model": {"embedding": {"words": {embedding: self.half[embedding]}}}}
        nested["language_model"]["encoder"] = {name: self.half[name] for name in rest}  # type: ignore[assignment]
        scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 79, "hysteresis_tracker": 2}
        optimizer = {
            "optimizer": self.optimizer,
            "grad_scaler": scaler,
            "fp32_from_fp16_params": [self.masters],
        }
        return {"checkpoint_version": 3.0, "iteration": 9, "model": nested, "optimizer": optimizer}


LAYOUTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "contrib": lambda case: case.contrib(fp32_groups=[case.masters[:3], case.masters[3:]]),
    "flat": lambda case: case.contrib(fp32_groups_flat=[case.flat]),
    "flat, padded": lambda case: case.contrib(fp32_groups_flat=[torch.cat([case.flat, torch.zeros(6)])]),
    "Megatron": lambda case: case.megatron(),
    "a list of its own": lambda case: {
        "net": case.half,
        "opt": case.optimizer,
        "master params": case.masters,
    },
    "last group first": lambda case: {"net": case.half, "copies": [case.masters[4:], case.masters[:4]]},
    "a dict of its own": lambda case: {
        "net": case.half,
        "full": {f"module.{k}": v for k, v in case.full.items()},
    },
    "a flat tensor of its own": lambda case: {"net": case.half, "flat": case.flat, "ema": case.flat * 1.5},
    "in the state of the optimizer": lambda case: {
        "net": case.half,
        "opt": {
            "state": {
                number: {**entry, "kept": case.masters[number]}
                for number, entry in case.optimizer["state"].items()
            },
            "param_groups": case.optimizer["param_groups"],
        },
    },
    "fp32 weights with fp16 values": lambda case: {
        "net": {name: value.half().float() for name, value in case.full.items()},
        "copies": case.masters,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_copies_become_the_weights(layout: str, tmp_path: Path) -> None:
    """Whatever they are called, every weight is written with the bits of its copy, and no rounded one is left."""
    case = Case()
    torch.save(LAYOUTS[layout](case), tmp_path / "a.pt")
    found = inspect_file(tmp_path / "a.pt")
    assert sum(row["entries"] for row in found.rows if row["kind"] == "fp32 masters") == len(case.masters)
    assert not any("no masters" in trap or "no fp32 master" in trap for trap in found.traps)
    for to in ("native", "apex") if found.scales else ("native",):
        result = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", to)  # type: ignore[arg-type]
        weights: dict[str, Tensor] = {}
        for held in contents_by_kind(result.state).models.values():
            weights |= held
        for name, value in case.full.items():
            assert weights[name].dtype is torch.float32
            assert torch.equal(weights[name], value), name
        assert not any("without masters" in line or "tell their names" in line for line in result.lost)


@pytest.mark.parametrize("layout", ["contrib", "flat", "flat, padded", "Megatron"])
def test_scale_and_optimizer_of_a_wrapper_are_found(layout: str, tmp_path: Path) -> None:
    """Scale and count become a GradScaler's, and AdamW over the weights takes the state, flat or not."""
    case = Case()
    torch.save(LAYOUTS[layout](case), tmp_path / "a.pt")
    (scale,) = inspect_file(tmp_path / "a.pt").scales
    assert (scale["scale"], scale["clean_steps"], scale["growth_interval"]) == (4096.0, 79, 1000)
    state = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native").state
    assert (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]) == (4096.0, 79)
    torch.amp.GradScaler("cpu").load_state_dict(state["scaler"])
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(state["optimizer"])
    for number, param in enumerate(net.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key], case.optimizer["state"][number][key])


def test_copies_become_the_weights_under_a_grad_scaler_too() -> None:
    """16-bit weights next to a GradScaler's state are no checkpoint of torch.amp yet; the scaler stays as it is."""
    case = Case()
    entries = {
        at: {**entry, "master_param": case.masters[at]} for at, entry in case.optimizer["state"].items()
    }
    optimizer = {**case.optimizer, "state": entries}
    result = convert_state({"model": case.half, "optimizer": optimizer, "scaler": GRADSCALER}, "native")
    assert result.source == "16-bit weights"
    assert all(torch.equal(result.state["model"][name], value) for name, value in case.full.items())
    assert result.state["scaler"] == GRADSCALER
    assert result.lost == []


def test_bf16_weights_miss_no_scaler(tmp_path: Path) -> None:
    """bf16 trains without a loss scale: none is missing."""
    case = Case(torch.bfloat16)
    state = {"net": case.half, "opt": case.optimizer, "copies": case.full}
    assert convert_state(state, "native").lost == []
    torch.save(state, tmp_path / "a.pt")
    assert not any("scaler" in trap for trap in inspect_file(tmp_path / "a.pt").traps)


def test_tied_weights_get_the_one_copy_there_is() -> None:
    """Two names of one weight, in one memory or saved apart, both get the bits of its copy."""
    full = torch.rand(6, 4)
    for head in (full.half(), None):
        half = full.half()
        result = convert_state(
            {"net": {"embed": half, "head": half if head is None else head}, "kept": [full]}, "native"
        )
        assert torch.equal(result.state["net"]["embed"], full)
        assert torch.equal(result.state["net"]["head"], full)


def test_what_rounds_by_chance_is_no_copy() -> None:
    """Moments that fp16 rounds to 0, averages, and vectors of ones leave biases of zeros and norms of ones alone."""
    net = {"weight": torch.rand(4, 4).half(), "bias": torch.zeros(4).half(), "norm": torch.ones(4).half()}
    tiny = {0: {"exp_avg_sq": torch.full((4, 4), 1e-9)}, 1: {"exp_avg_sq": torch.full((4,), 1e-9)}}
    state = {
        "net": net,
        "optimizer": {"state": tiny, "param_groups": [{"params": [0, 1]}]},
        "average": {name: value.float() + 0.25 for name, value in net.items()},
        "criterion": {"class_weights": torch.ones(4), "gamma": 2.0, "alpha": 0.5},
    }
    parts = contents_by_kind(state)
    assert parts.masters == [{}]
    result = convert_state(state, "native")
    assert all(torch.equal(result.state["net"][name], value.float()) for name, value in net.items())
    assert any("without masters" in line for line in result.lost)


def test_weights_without_a_copy_are_counted() -> None:
    """Of a file that has copies of some weights, the others are named as rounded."""
    case = Case()
    parts = {"net": case.half, "copies": case.masters[:-2]}
    assert any(
        line.startswith("the last bits of 2 of the weights") for line in convert_state(parts, "native").lost
    )


@pytest.mark.parametrize(
    "state, place, scale, clean",
    [
        ({"last_optimizer_state": {"loss_scale": 4.0}}, "last_optimizer_state.loss_scale", 4.0, 0),
        ({"meta": {"fp16": {"loss_scaler": {"cur_scale": 512.0, "mode": "dynamic", **FACTS}}}}, "meta.fp16.loss_scaler",
         512.0, 79),
        ({"own": {"loss_scale": 32.0, "scale_factor": 2.0, "scale_window": 100, "_iter": 30,
                  "_last_overflow_iter": 9}}, "own", 32.0, 20),
    ],
    ids=["fairseq", "mmcv", "a scaler of its own"],
)  # fmt: skip
def test_scales_of_other_programs(
    state: dict[str, Any], place: str, scale: float, clean: int, tmp_path: Path
) -> None:
    case = Case()
    (key,) = state
    if "last_optimizer_state" in state:
        state = {key: {**case.flat_optimizer, **state[key]}}
    torch.save({"model": case.full, "args": {"loss_scale": 128, "lr": 0.1, "dynamic_loss_scale": True}, **state},
               tmp_path / "a.pt")  # fmt: skip
    (found,) = inspect_file(tmp_path / "a.pt").scales
    assert (found["place"], found["scale"], found["clean_steps"]) == (place, scale, clean)
    parts = contents_by_kind(convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native").state)
    (scaler,) = parts.scalers.values()
    assert (scaler["scale"], scaler["_growth_tracker"]) == (scale, clean)


@pytest.mark.parametrize(
    "state, writer",
    [
        (GRADSCALER, "a GradScaler's state alone"),
        ({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}}, "a state of apex.amp alone"),
        ({"cur_scale": 2.0, **FACTS}, "a loss scaler's state alone"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))]).state_dict(), "an optimizer's state alone"),
    ],
)
def test_a_file_of_one_state_is_named(state: dict[str, Any], writer: str, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert inspect_file(tmp_path / "a.pt").writer == writer
    with pytest.raises(ConversionError, match=f"it is {writer}, and there are no weights"):
        convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native")


@pytest.mark.parametrize(
    ("kind", "scale"),
    [("amp", 0.0), ("scaler", 2.0**-140), ("scaler", float("inf")), ("contrib", float("nan"))],
)
def test_a_scale_that_no_training_survives_is_remarked_on(scale: float, kind: str, tmp_path: Path) -> None:
    case = Case()
    states: dict[str, dict[str, Any]] = {
        "amp": {"amp": {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}},
        "scaler": {"scaler": {**GRADSCALER, "scale": scale}},
        "contrib": {
            "optimizer": {**case.contrib(fp32_groups=[case.masters])["optimizer"], "cur_scale": scale}
        },
    }
    torch.save({"model": case.full, **states[kind]}, tmp_path / "a.pt")
    (trap,) = [trap for trap in inspect_file(tmp_path / "a.pt").traps if trap.startswith("the loss scale")]
    assert ("subnormal" if scale == 2.0**-140 else f"is {scale}, not a positive number") in trap
    to = "apex" if kind == "scaler" else "native"
    if scale == 2.0**-140:
        (note,) = convert_file(tmp_path / "a.pt", tmp_path / "b.pt", to).notes  # type: ignore[arg-type]
        assert note == trap
    else:
        with pytest.raises(ConversionError, match="not a usable loss scale"):
            convert_file(tmp_path / "a.pt", tmp_path / "b.pt", to)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_remarked_on(tmp_path: Path) -> None:
    case = Case()
    case.half["0.weight"][0, 0] = float("nan")
    case.half["2.bias"][0] = float("inf")
    case.optimizer["state"][1]["exp_avg"][0] = float("nan")
    torch.save({"model": case.half, "optimizer": case.optimizer}, tmp_path / "a.pt")
    weights, moments = [trap for trap in inspect_file(tmp_path / "a.pt").traps if "NaN" in trap]
    assert "2 values that are NaN or infinite (1 in 0.weight, 1 in 2.bias)" in weights
    assert "optimizer holds 1 values" in moments
    assert convert_file(tmp_path / "a.pt", tmp_path / "b.pt", "native").notes == [weights, moments]
