"""The order of cells: equal mean positions, a fresh draw per plan, and what a run directory records; text of seeds."""

import json
from collections import Counter
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.plan import (
    Plan,
    balanced_arm_orders,
    device_by_arm_per_seed,
    parse_seeds,
    sums_of_arm_positions,
)
from ampcompare.experiment.run_directory import RunDirectory, StoredPlan
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.settings.config import RunConfig
from tests.experiment.pretend import make_plan

ARMS = ("fp32", "apex:O1", "apex:O2", "native:bf16", "half")


ARMS_8 = [f"arm {number}" for number in range(8)]


def _names(count: int) -> list[str]:
    return [f"arm {number}" for number in range(count)]


def _range(arms: list[str], rows: list[list[str]]) -> int:
    sums = sums_of_arm_positions(arms, rows).values()
    return max(sums) - min(sums)


def _least_range(arms: int, blocks: int) -> int:
    """Return the least range of sums of positions: they add up to blocks * arms * (arms - 1) / 2, in whole numbers."""
    if blocks == 1:
        return arms - 1
    return 0 if blocks % 2 == 0 or arms % 2 == 1 else 1


@pytest.mark.parametrize("arms", [*range(1, 9), 12])
def test_mean_positions_are_as_equal_as_possible(arms: int) -> None:
    """For any numbers of arms and seeds the sums of positions differ by the least that whole numbers allow."""
    names = _names(arms)
    for blocks in (*range(1, 7), 11):
        rows = balanced_arm_orders(names, [], blocks, seed=blocks)
        assert [sorted(row) for row in rows] == [sorted(names)] * blocks
        assert _range(names, rows) == _least_range(arms, blocks), blocks


@pytest.mark.parametrize("arms", [2, 3, 4, 5, 9])
def test_further_blocks_restore_the_balance(arms: int) -> None:
    """Blocks that are added are chosen for the balance of all, so that two or more equalize what was recorded."""
    names = _names(arms)
    for recorded in range(1, 6):
        before = balanced_arm_orders(names, [], recorded, seed=recorded)
        for count in (2, 3, 4):
            rows = [*before, *balanced_arm_orders(names, before, count, seed=recorded)]
            assert _range(names, rows) <= 1, (arms, recorded, count)


def test_three_arms_of_three_seeds_are_a_latin_square() -> None:
    """With three arms and seeds each arm runs first, second and last once: no effect of the position is left."""
    names = _names(3)
    for seed in range(20):
        columns = zip(*balanced_arm_orders(names, [], 3, seed), strict=True)
        assert all(sorted(column) == names for column in columns)


def _write(folder: Path, plan: Plan) -> None:
    stored = StoredPlan.from_plan(plan, command="", terms=Terms(), pilot=())
    RunDirectory(folder).write_plan(stored)


def test_a_folder_keeps_its_order(tmp_path: Path) -> None:
    """The order that a run directory records holds for the next call, and its seed draws the same extension."""
    first = make_plan(RunConfig(), ARMS, range(3))
    assert RunDirectory(tmp_path).plan_in_recorded_order(first) is first
    _write(tmp_path, first)
    again, more = (
        RunDirectory(tmp_path).plan_in_recorded_order(make_plan(RunConfig(), ARMS, range(count)))
        for count in (3, 5)
    )
    assert (again.order, again.order_seed, again.cells) == (first.order, first.order_seed, first.cells)
    assert more.order[: len(first.order)] == first.order
    assert (
        more.order
        == RunDirectory(tmp_path).plan_in_recorded_order(make_plan(RunConfig(), ARMS, range(5))).order
    )
    rows = [list(more.labels[start : start + 5]) for start in range(0, 25, 5)]
    assert _range(list(ARMS), rows) == 0


def test_arms_and_seeds_that_the_record_lacks(tmp_path: Path) -> None:
    """Added arms follow those of a recorded block, and removed cells are left out."""
    first = make_plan(RunConfig(), ARMS[:3], [1, 2])
    _write(tmp_path, first)
    plan = RunDirectory(tmp_path).plan_in_recorded_order(make_plan(RunConfig(), [*ARMS[:2], ARMS[4]], [0, 2]))
    blocks = [plan.order[place] for place in plan.cell_ranges_by_seed()[1]]
    kept = [name for name in first.order if name.endswith("@2") and not name.startswith(ARMS[2])]
    assert blocks == [*kept, f"{ARMS[4]}@2"]
    assert sorted(plan.order[:3]) == sorted(f"{arm}@0" for arm in [*ARMS[:2], ARMS[4]])
    assert [cell.recipe.seed for cell in plan.cells] == [0, 0, 0, 2, 2, 2]
    assert [cell.arm for cell in plan.cells] == list(plan.labels)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"order": 3}', '{"order": [1]}', '{"order": [], "order_seed": "x"}']
)
def test_a_damaged_plan_is_no_order(tmp_path: Path, text: str) -> None:
    """A plan.json that holds no order changes nothing; the run writes it again."""
    plan = make_plan(RunConfig(), ARMS, range(2))
    (tmp_path / "plan.json").write_text(text)
    assert RunDirectory(tmp_path).plan_in_recorded_order(plan) is plan


def test_a_plan_of_an_earlier_version_is_kept(tmp_path: Path) -> None:
    """An order without its seed is kept as well, and extended by the seed of this plan."""
    first, plan = make_plan(RunConfig(), ARMS, range(2)), make_plan(RunConfig(), ARMS, range(3))
    _write(tmp_path, first)
    path = RunDirectory(tmp_path).plan_file
    path.write_text(json.dumps({**json.loads(path.read_text()), "order_seed": None}))
    kept = RunDirectory(tmp_path).plan_in_recorded_order(plan)
    assert (kept.order[:10], kept.order_seed) == (first.order, plan.order_seed)


@pytest.mark.parametrize(("arms", "devices"), [(9, 8), (4, 8), (2, 2), (3, 4), (6, 4), (1, 3)])
def test_arms_visit_devices_equally_often(arms: int, devices: int) -> None:
    """In a full round of seeds, together or spread, an arm is on each device once, and devices have equal work."""
    names = [str(arm) for arm in range(arms)]
    for by_seed in (True, False):
        rows = device_by_arm_per_seed(names, 2 * devices, devices, 7, by_seed=by_seed)
        for name in names:
            assert sorted(row[name] for row in rows[:devices]) == list(range(devices))
        work = Counter(device for row in rows for device in row.values())
        assert set(work.values()) == {2 * arms}
    assert all(len(set(row.values())) == 1 for row in device_by_arm_per_seed(names, devices, devices, 7))


def test_few_seeds_use_all_devices() -> None:
    """Seeds that do not fill the devices are spread evenly; the draw follows its seed, and a full round stays."""
    rows = device_by_arm_per_seed(ARMS_8, 2, 16, 3)
    assert max(Counter(device for row in rows for device in row.values()).values()) == 1
    assert rows == device_by_arm_per_seed(ARMS_8, 2, 16, 3)
    assert rows != device_by_arm_per_seed(ARMS_8, 2, 16, 4)
    assert device_by_arm_per_seed(ARMS_8, 4, 4, 3) == device_by_arm_per_seed(ARMS_8, 9, 4, 3)[:4]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("7", (7,)), ("0-4", (0, 1, 2, 3, 4)), ("0,2,5-6", (0, 2, 5, 6)), ("3, 1", (3, 1)), ("2-2", (2,))],
)
def test_seeds_are_read(text: str, seeds: tuple[int, ...]) -> None:
    """Numbers and ranges, joined by commas, are read in their order."""
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0-", "-1", "a", "1.5", "4-0", "0,0", "0-2,1", "0-99999999", "0,,1"])
def test_seeds_that_cannot_be_read(text: str) -> None:
    """Anything else, a seed given twice, and a range too large are refused."""
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(text)
