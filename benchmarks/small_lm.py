"""Train a small language model on the characters of Python's help topics.

    python benchmarks/small_lm.py [--seed 0] [--steps 200]

A plain script in fp32, for `formats_table.py` and for anyone who wants a network on which formats differ in minutes.
"""

from pydoc_data import topics

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 4


class Block(nn.Module):
    """Attention and two linear layers, each after a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class SmallLM(nn.Module):
    """A transformer that predicts the next of `letters` symbols from up to `length` of them."""

    def __init__(self, letters: int, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits (batch, length, letters) of rows of symbols (batch, length)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.token(rows) + self.place.weight)))
        return logits


class Text:
    """The help topics as numbers of letters, and random pieces of them."""

    def __init__(self, length: int = 64) -> None:
        text = "".join(topics.topics[key] for key in sorted(topics.topics))
        letters = sorted(set(text))
        index = {letter: number for number, letter in enumerate(letters)}
        self.letters, self.length = len(letters), length
        self.symbols = torch.tensor([index[letter] for letter in text])

    def draw(self, generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and what follows each of their symbols, both (batch, length)."""
        start = torch.randint(len(self.symbols) - self.length - 1, (batch, 1), generator=generator)
        rows = self.symbols[start + torch.arange(self.length + 1)]
        return rows[:, :-1], rows[:, 1:]


@click.command()
@click.option("--seed", default=0)
@click.option("--steps", default=200)
@click.option("--lr", default=3e-3)
def main(seed: int, steps: int, lr: float) -> None:
    """Train, and print the mean loss of the last fifth of the steps."""
    torch.set_num_threads(1)
    text = Text()
    torch.manual_seed(seed)
    model = SmallLM(text.letters)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(1000 + seed)
    losses = []
    for _ in range(steps):
        x, y = text.draw(generator, 8)
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plan.step()
        losses.append(loss.item())
    print(sum(losses[-(steps // 5) :]) / (steps // 5))


if __name__ == "__main__":
    main()
