"""A training script as people wrote them for Apex, for `ampcompare exec`: LEVEL [sgd|adam]. Prints what it came to.

Under torchrun it trains with Apex's DistributedDataParallel and SyncBatchNorm over NCCL.
"""

import os
import sys

import torch
from apex import amp
from torch import nn

torch.backends.cudnn.deterministic = True
torch.manual_seed(0)
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
).cuda()
many = "WORLD_SIZE" in os.environ
if many:
    from apex.parallel import DistributedDataParallel, convert_syncbn_model

    torch.distributed.init_process_group("nccl", init_method="env://")
    model = convert_syncbn_model(model)
make = torch.optim.Adam if sys.argv[2:] == ["adam"] else torch.optim.SGD
optimizer = make(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level=sys.argv[1], loss_scale="dynamic", verbosity=0)
if many:
    model = DistributedDataParallel(model)
x, y = torch.randn(16, 3, 8, 8).cuda(), torch.randint(0, 10, (16,)).cuda()
for step in range(12):
    loss = nn.functional.cross_entropy(model(x), y) * (float("inf") if step == 5 else 1)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
print("LAST", float(loss).hex(), amp.state_dict()["loss_scaler0"])
if many:
    torch.distributed.destroy_process_group()
