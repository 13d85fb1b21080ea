"""The state that an optimizer keeps of a parameter, asked of a copy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampcompare.apex.optimizers import FusedAdam
from ampcompare.training.state.check_checkpoint import StateProbe

SHAPE = torch.Size([4, 6])


def kept(probe: StateProbe, dtype: torch.dtype = torch.float32) -> dict[str, tuple[torch.dtype, list[int]] | None]:
    """The dtype and shape of each state; None for a plain number."""
    state = probe.state_of(0, SHAPE, dtype)
    return {name: None if value is None else (value.dtype, list(value.shape)) for name, value in state.items()}


def test_tensors_have_the_shape_of_the_parameter_and_their_own_dtype() -> None:
    """Adam keeps moments like its parameter and a count; FusedAdam keeps fp32 moments of fp16 weights."""
    params = [nn.Parameter(torch.zeros(SHAPE))]
    full = (torch.float32, [4, 6])
    assert kept(StateProbe(torch.optim.Adam(params))) == {
        "step": (torch.float32, []),
        "exp_avg": full,
        "exp_avg_sq": full,
    }
    assert kept(StateProbe(FusedAdam(params)), torch.float16) == {"exp_avg": full, "exp_avg_sq": full}


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has no Adafactor")
def test_state_of_another_shape_is_asked_of_a_parameter_of_that_shape() -> None:
    """Adafactor keeps a row and a column of a matrix."""
    state = kept(StateProbe(torch.optim.Adafactor([nn.Parameter(torch.zeros(SHAPE))])))
    assert {name: value[1] for name, value in state.items() if value} == {
        "step": [],
        "row_var": [4, 1],
        "col_var": [1, 6],
    }


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_of_matrices_is_probed_with_one() -> None:
    """Muon refuses vectors, and its probe is none."""
    assert kept(StateProbe(torch.optim.Muon([nn.Parameter(torch.zeros(SHAPE))]))) == {
        "momentum_buffer": (torch.float32, [4, 6])
    }


def test_moments_in_8_bits_are_asked_of_an_optimizer_with_the_same_blocks() -> None:
    """The size of a block is no setting of a group, and the probe has it; it makes its step without a compiler."""
    optim = pytest.importorskip("torchao.optim")
    shape = torch.Size([64, 64])
    probe = StateProbe(optim.AdamW8bit([nn.Parameter(torch.zeros(shape))], block_size=512))
    state = probe.state_of(0, shape, torch.float32)
    assert state["exp_avg"]["tensors"]["scale"].shape == torch.Size([8])
    assert state["exp_avg"]["tensors"]["codes"].device.type == "meta"
    assert list(probe.kinds) == [state["exp_avg"]["tensor_class"]] == ["torchao.optim.subclass_8bit.OptimState8bit"]
