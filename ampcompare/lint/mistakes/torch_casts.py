"""Mistakes with what runs under autocast, or with the device that it is for."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP229",
        "autocast-device",
        "`torch.autocast` is called without a device type, or with a device such as `cuda:0` instead",
        "it raises a TypeError, a ValueError or a RuntimeError",
        'write `torch.autocast("cuda")`, or `torch.autocast(device.type)`',
        """
import torch

with torch.autocast("cuda:0"):  # AMP229
    loss = model(batch)
""",
        """
import torch

device = torch.device("cuda:0")
with torch.autocast(device.type):
    loss = model(batch)
""",
        fixable=True,
    ),
    Mistake(
        "AMP230",
        "bce-in-autocast",
        "`binary_cross_entropy` or `BCELoss` of probabilities runs under autocast of a GPU",
        "it raises a RuntimeError: the backward pass would overflow in fp16",
        "leave the sigmoid out, and use `binary_cross_entropy_with_logits` or `BCEWithLogitsLoss`",
        """
import torch

criterion = torch.nn.BCELoss()
with torch.autocast("cuda"):
    loss = criterion(model(batch), target)  # AMP230
""",
        """
import torch

criterion = torch.nn.BCELoss()
with torch.autocast("cuda"):
    output = model(batch)
    with torch.autocast("cuda", enabled=False):
        loss = criterion(output.float(), target)
""",
    ),
    Mistake(
        "AMP232",
        "fp16-without-scaler",
        "a model is trained under fp16 autocast, but the module never scales the loss",
        "gradients below 2**-24 become 0: layers with small gradients stop learning",
        "scale the loss by a GradScaler, or write `dtype=torch.bfloat16`",
        """
import torch

with torch.autocast("cuda", dtype=torch.float16):
    loss = model(batch)
loss.backward()  # AMP232
optimizer.step()
""",
        """
import torch

with torch.autocast("cuda", dtype=torch.float16):
    loss = model(batch)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
""",
        guard="autocast-without-dtype",
    ),
    Mistake(
        "AMP236",
        "mask-beyond-fp16",
        "`masked_fill` of an fp16 tensor with a number such as `-1e9`",
        "it raises a RuntimeError: the largest fp16 number is 65504",
        "write `torch.finfo(scores.dtype).min`",
        """
import math
import torch

with torch.autocast("cuda"):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(64)
    scores = scores.masked_fill(mask == 0, -1e9)  # AMP236
""",
        """
import math
import torch

with torch.autocast("cuda"):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(64)
    scores = scores.float().masked_fill(mask == 0, -1e9)
    scores = other.masked_fill(mask == 0, float("-inf"))
""",
        fixable=True,
    ),
)
