"""`run` and `compare` for scripts and notebooks: all that the command line does, without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ampcompare.compare.plan import DEFAULT_ARMS, make_plan, parse_seeds
from ampcompare.compare.run import Observer, cell_folder, check_output_dir, reusable, run_plan
from ampcompare.compare.terms import Preference, Terms
from ampcompare.comparison import Comparison
from ampcompare.config import Recipe, RunConfig
from ampcompare.launch.base import Launcher
from ampcompare.launch.factory import make_launcher
from ampcompare.record import RunRecord

__all__ = ["compare", "run", "run_in"]


def run(
    config: RunConfig | None = None,
    *,
    output_dir: str | Path | None = None,
    force: bool = False,
    slurm_options: Mapping[str, str] | None = None,
) -> RunRecord:
    """Train one arm in a process of its own and return its record.

    Args:
        config: what to train; the defaults train fp32 on the embedded digits.
        output_dir: run directory, by default `runs/run-<digest of config>`.
        force: train again where a usable record is there.
        slurm_options: of sbatch, for a configuration whose launcher is slurm: {"partition": "gpu", "exclusive": ""}.

    Raises:
        ConfigError: the folder cannot be written.
        LaunchError: no process could be started.
    """
    config = config or RunConfig()
    with make_launcher(config, slurm_options=slurm_options) as launcher:
        return run_in(config, Path(output_dir or Path("runs") / f"run-{config.digest()}"), launcher, force=force)


def run_in(
    config: RunConfig, folder: Path, launcher: Launcher, *, force: bool = False, observer: Observer | None = None
) -> RunRecord:
    """Train one cell with a launcher into a run directory, or return the record that is there."""
    check_output_dir(folder)
    observer = observer or Observer()
    known = None if force else reusable(folder, config)
    if known is not None and known.reason:
        observer.note(f"{config.arm} runs again: {known.reason}")
    observer.begin(config, 1, 1)
    earlier = known.record if known is not None else None
    record = earlier or launcher.launch(config, cell_folder(folder, config), observer.progress)
    observer.end(record, reused=earlier is not None)
    return record


def compare(
    arms: Sequence[str] = DEFAULT_ARMS,
    *,
    seeds: Iterable[int] | str = (0,),
    recipe: Recipe | None = None,
    output_dir: str | Path | None = None,
    force: bool = False,
    margin: float = 0.5,
    prefer: Preference = "time",
    slurm_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Comparison:
    """Train every arm with every seed on the same weights and batches, and sum up.

    Args:
        arms: texts such as "fp32" or "apex:O2", or a single one; fp32, or else the first, is the reference.
        seeds: each is one pair of runs between any two arms; as integers, or as text such as "0-4".
        recipe: what all arms train.
        output_dir: run directory, by default `runs/compare-<digest of the plan>`.
        force: run every cell again.
        margin: points of top-1 that do not matter, chosen before the runs.
        prefer: what a recommended arm is to gain, while it keeps the accuracy.
        slurm_options: as for `run`.
        options: further fields of `RunConfig`.

    Raises:
        ConfigError: an arm or option that cannot be used.
    """
    terms = Terms(margin=margin, prefer=prefer)
    base = RunConfig(recipe=recipe or Recipe(), **options)
    named = [arms] if isinstance(arms, str) else arms
    plan = make_plan(base, named, parse_seeds(seeds) if isinstance(seeds, str) else list(seeds))
    folder = Path(output_dir or Path("runs") / f"compare-{plan.digest()}")
    with make_launcher(base, several_cells=True, slurm_options=slurm_options) as launcher:
        return run_plan(plan, folder, launcher, terms=terms, force=force)
