"""A common mistake with torch.amp: `optimizer.step()` after `scaler.step(optimizer)` makes the step that overflowed.

The scale grows every 20 steps, not every 2000, so that an overflow comes within seconds.
"""

import argparse

import torch
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--twice", action="store_true", help="make the mistake")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
samples, labels = load_digits(return_X_y=True)
samples = torch.tensor(samples, dtype=torch.float32, device=device) / 16
labels = torch.tensor(labels, device=device)
order = torch.randperm(512)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device, growth_interval=20)
for _ in range(20):
    for batch in order.split(32):
        with torch.autocast(device, dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(model(samples[batch]), labels[batch])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if args.twice:
            optimizer.step()  # the mistake
        scaler.update()
        optimizer.zero_grad()
with torch.no_grad():
    right = (model(samples[512:]).argmax(1) == labels[512:]).float().mean().item()
print(f"accuracy {100 * right:.2f}, loss {loss.item():.4f}")
