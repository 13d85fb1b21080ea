"""Mistakes in the use of Apex: `amp.initialize`, wrappers, and what belongs to them."""

from __future__ import annotations

from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["MISTAKES"]

MISTAKES = (
    Mistake(
        "AMP101",
        "initialize-after-wrapping",
        "`amp.initialize` is passed a model that is already wrapped in DistributedDataParallel or DataParallel",
        "the wrapper has recorded the parameters and dtypes that the model had before",
        "call `amp.initialize` first, then wrap the model that it returns",
        """
from apex import amp
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(model)
model, optimizer = amp.initialize(model, optimizer)  # AMP101
""",
        """
from apex import amp
from torch.nn.parallel import DistributedDataParallel as DDP

model, optimizer = amp.initialize(model, optimizer)
model = DDP(model)
""",
    ),
    Mistake(
        "AMP102",
        "initialize-twice",
        "`amp.initialize` is called again while the model of an earlier call is still trained",
        "the second call discards the loss scales of the first, and sets one opt level for both",
        "pass all models and optimizers to one call, as lists, with `num_losses` and `loss_id`",
        """
from apex import amp

net_g, opt_g = amp.initialize(net_g, opt_g, opt_level="O1")
net_d, opt_d = amp.initialize(net_d, opt_d, opt_level="O1")  # AMP102
""",
        """
from apex import amp

if args.opt_level == "O1":
    net, opt = amp.initialize(net, opt, opt_level="O1")
else:
    net, opt = amp.initialize(net, opt, opt_level=args.opt_level, loss_scale=128.0)
""",
    ),
    Mistake(
        "AMP108",
        "opt-level-typo",
        'the opt level is written with a zero or a small letter, such as "01"',
        "Apex ends with an error: the levels begin with the letter O",
        'write "O1"',
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="01")  # AMP108
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
date = parse(day="01")
""",
        fixable=True,
    ),
    Mistake(
        "AMP109",
        "initialize-misbound",
        "the result of `amp.initialize` is bound to the wrong names",
        "the model is a tuple, or the names are swapped; at best it works because Apex changes objects in place",
        "write `model, optimizer = amp.initialize(model, optimizer, ...)`",
        """
from apex import amp

model = amp.initialize(model, optimizer, opt_level="O1")  # AMP109
""",
        """
from apex import amp

model = amp.initialize(model, opt_level="O1")
""",
        fixable=True,
    ),
    Mistake(
        "AMP111",
        "half-after-initialize",
        "`.half()` on a model that went through `amp.initialize`, and training continues",
        "weights that the opt level keeps in fp32 are rounded, and small updates are lost from then on",
        "delete `.half()`: the opt level casts the model; to export fp16 weights, cast a copy",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
model.half()  # AMP111
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
""",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
model.half()
""",
    ),
    Mistake(
        "AMP112",
        "half-before-initialize",
        "`.half()` on a model before `amp.initialize`",
        "Apex refuses models that are not in fp32",
        "delete `.half()`: the opt level casts the model",
        """
from apex import amp

model.half()  # AMP112
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
""",
        """
from apex import amp

images = images.half()
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
""",
    ),
    Mistake(
        "AMP113",
        "initialize-before-cuda",
        "a model is moved to the GPU after `amp.initialize`",
        "Apex refuses such models; master weights may stay on the CPU",
        "call `.cuda()` or `.to(device)` before the optimizer is built and before `amp.initialize`",
        """
from apex import amp

model, optimizer = amp.initialize(model, optimizer)
model.cuda()  # AMP113
""",
        """
from apex import amp

model.cuda()
model, optimizer = amp.initialize(model, optimizer)
criterion.cuda()
""",
    ),
    Mistake(
        "AMP114",
        "sync-batch-norm-late",
        "batch norm is replaced by a synchronized one after `amp.initialize`",
        "`keep_batchnorm_fp32` has no effect on the new layers",
        "convert the model before `amp.initialize`",
        """
import apex
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
model = apex.parallel.convert_syncbn_model(model)  # AMP114
""",
        """
import apex
from apex import amp

model = apex.parallel.convert_syncbn_model(model)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
""",
    ),
    Mistake(
        "AMP115",
        "sync-batch-norm-result",
        "the result of `convert_syncbn_model` is discarded, or unpacked into two names",
        "a model that is itself a batch norm is not replaced; unpacking fails",
        "write `model = convert_syncbn_model(model)`",
        """
from apex.parallel import convert_syncbn_model

convert_syncbn_model(model)  # AMP115
""",
        """
from apex.parallel import convert_syncbn_model

model = convert_syncbn_model(model)
""",
        fixable=True,
    ),
    Mistake(
        "AMP116",
        "ddp-arguments",
        "Apex's DistributedDataParallel is called with arguments of PyTorch's",
        "it takes `delay_allreduce`, `message_size` and others, and ends with a TypeError",
        "use `torch.nn.parallel.DistributedDataParallel`, or leave these arguments out",
        """
from apex.parallel import DistributedDataParallel as DDP

model = DDP(model, device_ids=[rank])  # AMP116
""",
        """
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(model, device_ids=[rank])
""",
    ),
    Mistake(
        "AMP119",
        "apex-state-unsaved",
        "a checkpoint holds the state of the optimizer, but the module never saves `amp.state_dict()`",
        "the loss scale starts again at 2**16 after a resume: a burst of skipped steps",
        "save `amp.state_dict()` too, and load it when resuming",
        """
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)  # AMP119
""",
        """
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
torch.save(model.state_dict(), weights)
""",
        fixable=True,
        guard="amp-state-unsaved",
    ),
    Mistake(
        "AMP120",
        "bare-except-import",
        "the import of Apex is inside a `try` with a bare `except:`",
        "every installation error is swallowed, and the script silently trains in fp32",
        "catch `ImportError`, and report that Apex is missing",
        """
try:
    from apex import amp
except:  # AMP120
    use_amp = False
""",
        """
try:
    from apex import amp
except ImportError:
    use_amp = False
""",
        fixable=True,
    ),
    Mistake(
        "AMP121",
        "optimizer-after-initialize",
        "an optimizer that `amp.initialize` has patched is replaced by a new one",
        "the new one has no loss scaler and no master weights: `scale_loss` ends with an AttributeError",
        "build the optimizer before `amp.initialize`, or change `optimizer.param_groups`",
        """
import torch
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # AMP121
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
""",
        """
import torch
from apex import amp

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
other = torch.optim.SGD(head.parameters(), lr=0.01)
with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
""",
    ),
    Mistake(
        "AMP122",
        "apex-state-unloaded",
        "the state of Apex is saved, but never loaded along with that of the optimizer",
        "every resumed run starts with the initial loss scale: a burst of skipped steps",
        "call `amp.load_state_dict` where the state of the optimizer is loaded",
        """
import torch
from apex import amp

torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])  # AMP122
""",
        """
import torch
from apex import amp

torch.save({"optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, path)
optimizer.load_state_dict(torch.load(path)["optimizer"])
amp.load_state_dict(torch.load(path)["amp"])
""",
    ),
)
