"""A task of your own: users rate items, and the metric is the mean absolute error in stars."""

import torch
from torch import nn

from ampcompare.tasks import Metric, Task, TensorData


class Factors(nn.Module):
    def __init__(self, users, items, width=16):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.head = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        return self.head(torch.cat([self.users(user), self.items(item)], 1))[:, 0]


class Ratings(Task):
    metrics = (
        Metric(name="MAE", better="lower", unit="stars", decimals=3, margin=0.05, over_samples="mean"),
    )

    def __init__(self, recipe):
        draws = torch.Generator().manual_seed(0)  # the data are the same for every seed of the recipe
        user, item = torch.randint(50, (2, 4000), generator=draws)
        samples = {"user": user, "item": item, "stars": 3 + torch.sin(user * 0.7) + torch.cos(item * 0.9)}
        train = {name: part[:3000] for name, part in samples.items()}
        val = {name: part[3000:] for name, part in samples.items()}
        self.data = TensorData.of("ratings", train, val, seed=recipe.seed)

    def make_models(self):
        return [Factors(50, 50)]

    def loss(self, models, batch):
        return nn.functional.mse_loss(models[0](batch["user"], batch["item"]), batch["stars"])

    def predict(self, models, batch):
        return models[0](batch["user"], batch["item"])

    def measure(self, outputs, batch):
        return {"MAE": (outputs - batch["stars"]).abs()}  # of each sample; sums of them are exact
