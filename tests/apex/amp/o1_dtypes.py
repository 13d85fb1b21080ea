"""Types and a small layer for the tests of O1's casts."""

import torch
from torch import nn

HALF, FLOAT = torch.float16, torch.float32
DTYPES = [HALF, FLOAT]


def weights() -> tuple[nn.Linear, torch.Tensor]:
    return nn.Linear(4, 4, bias=False), torch.eye(4)
