"""Train a small convolutional network on the digits of scikit-learn with Apex, as scripts of 2019 do."""

import argparse

import torch
from apex import amp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--device", default="cuda")


def make_model():
    """Return a network for images of shape (N, 1, 8, 8)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


def train_epoch(model, optimizer, images, labels, batch_size):
    """Train on all images once, in random order; gradients have a norm of at most 1."""
    model.train()
    for batch in torch.randperm(len(images)).split(batch_size):
        loss = F.cross_entropy(model(images[batch]).float(), labels[batch])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()


@torch.no_grad()
def validate(model, images, labels):
    """Return the top-1 accuracy in percent."""
    model.eval()
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main():
    """Train, and print the accuracy after each epoch."""
    args = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=args.device)[:, None] / 16
    labels = torch.tensor(digits.target, device=args.device)
    model = make_model().to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    for epoch in range(args.epochs):
        train_epoch(model, optimizer, images[:1297], labels[:1297], args.batch_size)
        schedule.step()
        print(f"epoch {epoch}: Acc@1 {validate(model, images[1297:], labels[1297:]):.2f}")


if __name__ == "__main__":
    main()
