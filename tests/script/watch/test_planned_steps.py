"""How many steps a script is going to make, as its loops say."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.script.watch import planned_steps
from ampcompare.script.watch.planned_steps import find_num_planned_steps


def planned(tmp_path: Path, lines: str, **names: Any) -> int | None:
    """What is seen from the call of `step` in a script."""
    path = tmp_path / "train.py"
    path.write_text(lines)
    seen: list[int | None] = []

    def step() -> None:
        if not seen:
            seen.append(find_num_planned_steps())

    exec(compile(lines, str(path), "exec"), {"step": step, **names})
    return seen[0]


ARGS = SimpleNamespace(epochs=3, accum=4)


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        ("for epoch in range(args.epochs):\n  for i, x in enumerate(data):\n    step()\n", 60),
        ("for epoch in range(1, args.epochs + 1):\n  for x in tqdm(data):\n    step()\n", 60),
        ("def train(loader):\n  for x in loader:\n    step()\nfor epoch in range(2):\n  train(data)\n", 40),
        ("for i, x in enumerate(data):\n  if (i + 1) % args.accum == 0:\n    step()\n", 5),
        ("for x, y in zip(data, data[:7]):\n  if x is not None:\n    step()\n", None),
        ("for x in zip(data, sizes['few']):\n  step()\n", 2),
        ("for i in range(len(data) * 2):\n  step()\nfor i in range(9):\n  pass\n", 40),
        ("n = 0\nwhile n < 5:\n  step()\n  n += 1\n", None),
        ("for x in iter([1, 2]):\n  step()\n", 2),
        ("for x in (one for one in data):\n  step()\n", None),
        ("step()\n", 1),
    ],
)
def test_loops_around_the_step_are_multiplied(tmp_path: Path, lines: str, steps: int | None) -> None:
    """Only what their lengths tell counts; nothing of the script runs to find out."""
    names = {"args": ARGS, "data": list(range(20)), "tqdm": lambda x: x, "sizes": {"few": [1, 2]}}
    assert planned(tmp_path, lines, **names) == steps


def test_a_loader_has_as_many_batches(tmp_path: Path) -> None:
    """Its length is asked, and it is not read."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader: Any = DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)
    assert planned(tmp_path, "for e in range(2):\n  for x in loader:\n    step()\n", loader=loader) == 6


LIBRARY = {
    "passes it on": ("def forward(step):\n  if step is not None:\n    step()\n", 40),
    "loops itself": ("def forward(step):\n  for i in range(3):\n    step()\n", None),
    "waits": ("def forward(step):\n  while True:\n    step()\n    break\n", None),
    "adds gradients up": ("def forward(step):\n  if state.sync_gradients:\n    step()\n", 10),
}


@pytest.mark.parametrize(("source", "steps"), LIBRARY.values(), ids=LIBRARY.keys())
def test_a_step_that_a_library_passes_on_has_the_loops_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, steps: int | None
) -> None:
    """As that of Accelerate's optimizer, which steps once for so many passes; a trainer has loops of its own."""
    library = tmp_path / "library.py"
    library.write_text(source)
    monkeypatch.setattr(planned_steps, "is_installed_file", lambda file: file == str(library))
    names = {"state": SimpleNamespace(sync_gradients=True, num_steps=4)}
    exec(compile(source, str(library), "exec"), names)
    script = "def call():\n  forward(step)\nfor e in range(2):\n  for x in data:\n    call()\n"
    assert planned(tmp_path, script, data=list(range(20)), forward=names["forward"]) == steps


TRAINERS = {
    "transformers": ("transformers.trainer", SimpleNamespace(state=SimpleNamespace(max_steps=40)), 40),
    "lightning": (
        "lightning.pytorch.loops",
        SimpleNamespace(trainer=SimpleNamespace(estimated_stepping_batches=48)),
        48,
    ),
    "without an end": ("lightning.pytorch.loops", SimpleNamespace(estimated_stepping_batches=math.inf), None),
    "another": ("train_lib", SimpleNamespace(state=SimpleNamespace(max_steps=40)), None),
}


@pytest.mark.parametrize(("name", "trainer", "steps"), TRAINERS.values(), ids=TRAINERS.keys())
def test_a_trainer_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, trainer: Any, steps: int | None
) -> None:
    """Its loops are its own."""
    library = tmp_path / "library.py"
    library.write_text("def fit(self, step):\n  for i in range(3):\n    step()\n")
    monkeypatch.setattr(planned_steps, "is_installed_file", lambda file: file == str(library))
    names: dict[str, Any] = {"__name__": name}
    exec(compile(library.read_text(), str(library), "exec"), names)
    assert planned(tmp_path, "fit(trainer, step)\n", fit=names["fit"], trainer=trainer) == steps
