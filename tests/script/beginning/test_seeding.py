"""Scripts that fix their seeds in many ways: seed 0 is the script as written, and each other seed a run of its own."""

import multiprocessing
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ampcompare.script.beginning.seed_shift import shifted_numpy_seed, shifted_python_seed, shifted_torch_seed
from ampcompare.script.beginning.seeding import SeedFollower
from ampcompare.settings.script import SEED_STRIDE

LOADER = """
data = torch.utils.data.TensorDataset(torch.arange(64.0))
def loader(**options): return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, **options)
"""
# What each script leaves in `drawn`.
SCRIPTS = {
    "torch": "torch.manual_seed(0); drawn = torch.nn.Linear(2, 2).weight.tolist()",
    "torch.random": "torch.random.manual_seed(seed=0); drawn = torch.rand(3).tolist()",
    "all three, as set_seed does": (
        "def set_seed(n): random.seed(n); np.random.seed(n); torch.manual_seed(n); torch.cuda.manual_seed_all(n)\n"
        "set_seed(42); drawn = [random.random(), np.random.rand(), torch.rand(1).item()]"
    ),
    "again in each epoch": (
        "drawn = []\nfor epoch in range(3): torch.manual_seed(100 + epoch); drawn.append(torch.rand(1).item())"
    ),
    "by rank": "torch.manual_seed(7 + int(os.environ.get('RANK', 0))); drawn = torch.rand(1).item()",
    "a tensor": "torch.manual_seed(torch.tensor(4)); drawn = torch.rand(1).item()",
    "a number of NumPy": "np.random.seed(np.int64(2**32 - 1)); drawn = np.random.rand()",
    "an array": "np.random.seed([1, 2]); drawn = np.random.rand()",
    "a text": "random.seed('abc'); drawn = random.random()",
    "a float": "random.seed(2.5); drawn = random.random()",
    "the largest of torch": "torch.manual_seed(2**64 - 1); drawn = torch.rand(1).item()",
    "a negative one": "torch.manual_seed(-3); random.seed(-3); drawn = [torch.rand(1).item(), random.random()]",
    "batches": LOADER + "torch.manual_seed(1); drawn = [batch[0].tolist() for batch in loader()]",
    "augmentation": LOADER + "torch.manual_seed(0); np.random.seed(1)\n"
    "drawn = [batch[0].sum().item() + np.random.rand() for batch in loader()]",
    "a sampler of a library": (
        LOADER + "from torch.utils.data.distributed import DistributedSampler\n"
        "drawn = list(DistributedSampler(data, num_replicas=2, rank=0))"
    ),
    "Accelerate": (
        LOADER
        + "from accelerate import Accelerator\nfrom accelerate.utils import DataLoaderConfiguration, set_seed\n"
        "with_seeds = DataLoaderConfiguration(use_seedable_sampler=True)\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=with_seeds); set_seed(42)\n"
        "drawn = [batch[0].tolist() for batch in accelerator.prepare(loader())]"
    ),
    "Fabric": (
        "import lightning_fabric, logging; logging.getLogger('lightning_fabric').setLevel(30)\n"
        "lightning_fabric.seed_everything(1); drawn = [torch.rand(1).item(), np.random.rand(), random.random()]"
    ),
}
OWN = {
    "torch.Generator": "drawn = torch.rand(1, generator=torch.Generator().manual_seed(3)).item()",
    "on a device": "drawn = torch.rand(1, generator=torch.Generator(device='cpu').manual_seed(3)).item()",
    "numpy.random.default_rng": "drawn = np.random.default_rng(3).random()",
    "numpy.random.RandomState": "drawn = np.random.RandomState(3).rand()",
    "numpy.random.PCG64": "drawn = np.random.Generator(np.random.PCG64(3)).random()",
    "numpy.random.SeedSequence": "drawn = np.random.default_rng(np.random.SeedSequence(3)).random()",
    "random.Random": "drawn = random.Random(3).random()",
    "random_state": (
        "from sklearn.model_selection import train_test_split\n"
        "drawn = train_test_split(list(range(50)), random_state=3)[1]"
    ),
}


@pytest.fixture(autouse=True)
def kept_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the generators of this process, and its environment, as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", os.environ.copy())
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def run(
    source: str, seed: int | None, shifts: Literal["global", "all"] | None = "global"
) -> tuple[Any, SeedFollower]:
    """Return what a script leaves in `drawn`, under the seed of a cell; without one as plain Python runs it."""
    world = {"random": random, "np": np, "torch": torch, "os": os}
    seeding = SeedFollower(SEED_STRIDE * (seed or 0), shifts)
    if seed is not None:
        seeding.install()
    try:
        exec(compile(source, str(Path("train.py").absolute()), "exec"), world)
    finally:
        seeding.end()
    return world["drawn"], seeding


@pytest.mark.parametrize("how", SCRIPTS)
def test_seeds_are_runs_of_their_own(how: str) -> None:
    """Seed 0 is the script as written; any two seeds differ, and a seed gives the same again, as pairs need."""
    written = run(SCRIPTS[how], None)[0]
    first, second, third = (run(SCRIPTS[how], seed)[0] for seed in range(3))
    assert first == written
    parts = (
        [first, second, third] if not isinstance(first, list) else [*zip(first, second, third, strict=True)]
    )
    for one, other, last in parts if isinstance(first, list) else [parts]:
        assert (
            how in ("batches", "a sampler of a library", "Accelerate")
            or len({str(one), str(other), str(last)}) == 3
        )
    assert len({str(first), str(second), str(third)}) == 3
    assert run(SCRIPTS[how], 1)[0] == second
    assert run(SCRIPTS[how], 2, "all")[0] == third


@pytest.mark.parametrize("how", OWN)
def test_generators_of_its_own_stay_as_written(how: str) -> None:
    """Unless all are shifted; what is left is named with its line."""
    written = run(OWN[how], None)[0]
    kept, seeding = run(OWN[how], 3)
    assert kept == written
    (call,) = seeding.seed_calls
    assert (call["kind"], call["seed"], "used" in call) == ("own", "3", False)
    assert call["place"].startswith("train.py:")
    assert run(OWN[how], 0, "all")[0] == written
    shifted, seeding = run(OWN[how], 3, "all")
    assert shifted != written
    assert seeding.seed_calls[0]["used"] == str(3 + 3 * SEED_STRIDE)


def test_a_seed_that_is_read_back_is_not_shifted_twice() -> None:
    """What was drawn comes again, also where the seed is cut to the range of NumPy."""
    source = (
        "torch.manual_seed(5); first = torch.rand(1).item(); torch.manual_seed(torch.initial_seed())\n"
        "drawn = [first, torch.rand(1).item()]; np.random.seed(torch.initial_seed() % 2**32)\n"
        "random.seed(torch.initial_seed())"
    )
    (first, again), seeding = run(source, 2)
    assert first == again
    assert {call.get("used", call["seed"]) for call in seeding.seed_calls} == {str(5 + 2 * SEED_STRIDE)}


@pytest.mark.parametrize(
    "source", ["np.random.seed(2**32)", "np.random.seed(-1)", "torch.manual_seed('x')", "random.seed([])"]
)
def test_a_seed_that_is_refused_is_refused_alike(source: str) -> None:
    """An offset makes no wrong seed right, nor a right one wrong."""
    with pytest.raises((ValueError, TypeError, RuntimeError)) as plain:
        run(source, None)
    with pytest.raises(type(plain.value)) as shifted:
        run(source, 1)
    assert str(shifted.value) == str(plain.value)


def test_seeds_beyond_a_range_begin_again() -> None:
    assert shifted_numpy_seed(2**32 - 1, 3) == 2
    assert shifted_numpy_seed([2**32 - 1, 7], 3) == [2, 7]
    assert shifted_torch_seed(2**64 - 1, 3) == 2
    assert shifted_python_seed(True, 3) == 4
    torch.manual_seed(shifted_torch_seed(-(2**63), 3))


def test_without_a_seed_nothing_is_shifted() -> None:
    """The system's entropy has no number to add to, and the line is named."""
    source = "torch.seed(); np.random.seed(); random.seed(None); drawn = 0"
    calls = run(source, 1)[1].seed_calls
    assert [call["function"] for call in calls] == ["torch.seed", "numpy.random.seed", "random.seed"]
    assert not any("seed" in call or "used" in call for call in calls)


def test_what_is_restored_or_loaded_is_noted(tmp_path: Path) -> None:
    """Not what torch and libraries restore of what they have read themselves."""
    torch.save({"state": torch.get_rng_state()}, tmp_path / "file.pt")
    source = (
        f"torch.set_rng_state(torch.load({str(tmp_path / 'file.pt')!r})['state'])\n"
        "with torch.random.fork_rng(): drawn = torch.rand(1).item()"
    )
    found, seeding = run(source, 1)
    assert [(call["kind"], call["function"]) for call in seeding.seed_calls] == [
        ("load", "torch.load"), ("state", "torch.set_rng_state"),
    ]  # fmt: skip
    assert found == run(source, 0)[0]


@pytest.mark.parametrize("after", ["", "; torch.manual_seed(1)"])
def test_a_seed_that_cannot_be_shifted_is_noted(after: str) -> None:
    """A method of torch's own generator cannot be followed; that it was seeded is seen, now or before the next seed."""
    source = "torch.manual_seed(2); torch.default_generator.manual_seed(987654); drawn = torch.rand(1).item()"
    written = run(source, None)[0]
    for shifts in ("global", "all", None):
        torch.manual_seed(3)
        found, seeding = run(source + after, 1, shifts)
        assert found == written
        noted = [call for call in seeding.seed_calls if call["kind"] == "state"]
        assert [(call["function"], call["place"]) for call in noted] == [
            ("torch.default_generator.manual_seed", "")
        ]


def test_workers_of_a_loader_follow() -> None:
    """What a worker seeds, by a number or by its own first seed, differs between cells and is alike in pairs."""
    for seed_with in ("3 + worker", "torch.initial_seed() % 2**32"):
        source = f"""
torch.manual_seed(0)
class Noise(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return np.random.rand() + random.random()
def begin(worker): np.random.seed({seed_with})
loader = torch.utils.data.DataLoader(Noise(), num_workers=1, worker_init_fn=begin, multiprocessing_context="fork")
drawn = [number.item() for number in loader]
"""
        zero, one, again = (run(source, seed)[0] for seed in (0, 1, 1))
        assert zero == run(source, None)[0]
        assert one == again != zero


def test_replaced_names_are_as_torch_has_them() -> None:
    """Types stay what they are, for pickles, copies and checks of types; at the end all is torch's own again."""
    before = torch.manual_seed, torch.Generator, np.random.RandomState, random.seed
    are_one = torch.manual_seed is torch.random.manual_seed  # until torch's compiler is imported
    seeding = SeedFollower(SEED_STRIDE, "all")
    seeding.install()
    try:
        assert pickle.loads(pickle.dumps(torch.random.manual_seed)) is torch.random.manual_seed
        assert (torch.manual_seed is torch.random.manual_seed) == are_one
        generator = torch.Generator().manual_seed(2)
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        copy = pickle.loads(pickle.dumps(generator))
        assert torch.equal(copy.get_state(), generator.get_state())
        assert type(np.random.RandomState(3)) is before[2]
        assert isinstance(np.random.mtrand._rand, np.random.RandomState)
        assert isinstance(multiprocessing.get_context("spawn"), multiprocessing.context.SpawnContext)

        class Mine(np.random.RandomState):
            pass

        assert isinstance(Mine(3), Mine)
        assert not isinstance(np.random.mtrand._rand, Mine)
    finally:
        seeding.end()
    assert (torch.manual_seed, torch.Generator, np.random.RandomState, random.seed) == before
