"""What was removed or is deprecated, in Apex and in torch."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP301",
        "apex-removed",
        "an Apex module that was removed in May 2025 is imported, and nothing catches the ImportError",
        "the script fails at the import with any later Apex",
        "move to `torch.amp`, or run the script with `ampcompare exec`",
        """
from apex import amp  # AMP301
""",
        """
from apex.normalization import FusedLayerNorm

try:
    from apex import amp
except ImportError:
    amp = None
""",
    ),
    Mistake(
        "AMP302",
        "device-amp-deprecated",
        "`autocast` or `GradScaler` of `torch.cuda.amp` or `torch.cpu.amp`",
        "deprecated since torch 2.4: a FutureWarning now, later an error",
        'write `torch.amp.autocast("cuda", ...)` and `torch.amp.GradScaler("cuda", ...)`',
        """
import torch

scaler = torch.cuda.amp.GradScaler()  # AMP302
with torch.cuda.amp.autocast():  # AMP302
    loss = model(batch)
""",
        """
import torch

scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda"):
    loss = model(batch)
""",
        fixable=True,
    ),
    Mistake(
        "AMP303",
        "custom-function-deprecated",
        "`custom_fwd` or `custom_bwd` of `torch.cuda.amp`",
        "deprecated since torch 2.4: a FutureWarning now, later an error",
        'write `torch.amp.custom_fwd(device_type="cuda")`',
        """
import torch


class Square(torch.autograd.Function):
    @staticmethod
    @torch.cuda.amp.custom_fwd  # AMP303
    def forward(context, x):
        return x * x
""",
        """
import torch


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(context, x):
        return x * x
""",
        fixable=True,
    ),
    Mistake(
        "AMP304",
        "no-such-name",
        "a name of Apex is looked up in `torch.amp` or `torch.cuda.amp`, which do not have it",
        "an AttributeError or ImportError when the line runs",
        "use `autocast` and `GradScaler`, or import `amp` from Apex",
        """
import torch

with torch.cuda.amp.scale_loss(loss, optimizer) as scaled_loss:  # AMP304
    scaled_loss.backward()
""",
        """
import torch

with torch.cuda.amp.common.amp_definitely_not_available():
    pass
""",
    ),
    Mistake(
        "AMP305",
        "amp-not-imported",
        "`amp.initialize` or `amp.scale_loss` is called, but the module never binds `amp`",
        "a NameError when the line runs: the import was deleted, the calls were not",
        "delete the calls too, or import `amp`",
        """
import torch

model, optimizer = amp.initialize(model, optimizer)  # AMP305
""",
        """
from apex import amp


def prepare(amp, model):
    return amp.initialize(model)


try:
    model = amp.initialize(model)
except NameError:
    pass
""",
    ),
    Mistake(
        "AMP306",
        "clip-grad-norm-deprecated",
        "`clip_grad_norm` without the underscore",
        "deprecated since torch 0.4, with a warning for every step",
        "write `clip_grad_norm_`",
        """
import torch

torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)  # AMP306
""",
        """
import torch

torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
tensor.clip_grad_norm(1.0)
""",
        fixable=True,
    ),
    Mistake(
        "AMP307",
        "amp-init",
        "`amp.init()`, the interface of Apex before 2019",
        "removed from Apex: an error in newer versions",
        "move to `torch.amp`; `ampcompare exec` runs it as it is",
        """
from apex import amp

amp_handle = amp.init(enabled=True)  # AMP307
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer)
""",
    ),
    Mistake(
        "AMP308",
        "fp16-optimizer-moved",
        "`FP16_Optimizer` is imported from `apex.optimizers`",
        "it was removed from that module in 2019: an ImportError",
        "move to `torch.amp`; `ampcompare exec` runs it as it is",
        """
from apex.optimizers import FP16_Optimizer  # AMP308
""",
        """
from apex.optimizers import FusedAdam
""",
    ),
    Mistake(
        "AMP309",
        "autocast-query-deprecated",
        "a torch function that reads or sets autocast for one fixed device",
        "deprecated since torch 2.4: a DeprecationWarning now, later an error",
        'pass the device: `torch.get_autocast_dtype("cuda")`, `torch.is_autocast_enabled("cpu")`',
        """
import torch

dtype = torch.get_autocast_gpu_dtype()  # AMP309
""",
        """
import torch

dtype = torch.get_autocast_dtype("cuda")
""",
        fixable=True,
    ),
)
