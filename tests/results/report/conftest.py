"""Comparisons of records that no process has to train for."""

from collections.abc import Callable, Sequence

import pytest

from ampcompare import testing
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import EngineInfo, RunRecord


@pytest.fixture(scope="session")
def make_comparison() -> Callable[..., Comparison]:
    """Build a comparison of arms with any names, each with the same few seeds."""

    def record(arm: str, number: int, seed: int) -> RunRecord:
        seconds = 0.01 * (1 + number % 7) + 0.001 * (seed % 3)
        made = testing.make_record(
            "fp32", seed, top1=0.5 + number % 9 / 100, seconds=seconds, half="fp16 emulated" if number else None,
            losses=f"{number} {seed}", num_steps=40, skipped_steps=1, samples_per_second=64 / seconds,
            epoch_seconds=1.0 + 0.1 * seed, peak_bytes=3 * 2**20, final_loss_scale=65536.0,
        )  # fmt: skip
        engine = EngineInfo(name="compat", version="1.0", reason="no apex here")
        return made.model_copy(
            update={"arm": arm, "engine": engine, "environment": {"torch": "2.4.0", "device": "cpu"}}
        )

    def make(arms: Sequence[str], seeds: int = 3, command: str = "ampcompare compare") -> Comparison:
        records = [record(arm, number, seed) for seed in range(seeds) for number, arm in enumerate(arms)]
        return testing.make_comparison(records, arms=arms, command=command)

    return make
