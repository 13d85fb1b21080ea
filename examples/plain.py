import torch
from torch import nn

data = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for batch in data.split(8):
    loss = nn.functional.cross_entropy(model(batch), (batch[:, 0] > 0).long())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
