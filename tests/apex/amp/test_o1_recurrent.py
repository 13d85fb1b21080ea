"""O1 and recurrent modules: cells, layers and packed sequences."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ampcompare.apex import amp
from tests.apex.amp.o1_dtypes import HALF


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(handle: Any, kind: Any) -> None:
    module = kind(4, 6, num_layers=2)
    packed = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
    out, _ = module(packed)
    assert out.data.dtype == HALF
    module(pack_padded_sequence(torch.randn(5, 3, 4).half(), torch.tensor([5, 3, 2])))


def test_recurrent_modules_still_check_shapes(handle: Any) -> None:
    """A wrong input size is refused as without amp, and dtypes are checked again where casts are off."""
    module = nn.LSTM(4, 6)
    with pytest.raises(RuntimeError, match="input"):
        module(torch.randn(5, 3, 7).half())
    with amp.disable_casts(), pytest.raises(ValueError, match="type"):
        module(torch.randn(5, 3, 4).half())
