"""The places of a machine where cells run at the same time: GPUs, and cores that no other cell uses."""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.environment.gpus import Gpu, cores_near_device, visible_gpus
from ampcompare.base.environment.variables import PLACE
from ampcompare.base.errors import ConfigError, EnvironmentUnfit
from ampcompare.base.formatting import format_ranges
from ampcompare.results.records.run import Placement, RunRecord
from ampcompare.settings.config import REMOTE_LAUNCHERS, RunConfig

CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Place:
    """The part of this machine that a cell uses.

    Attributes:
        gpus: that it sees, as cuda:0, cuda:1 and so on; none leaves them as they are.
        cores: that its processes run on; none leaves it to the system.
        shared: whether cells of other places run on the same GPUs or cores.
        cells: that run at the same time, at all places.
    """

    gpus: tuple[Gpu, ...] = ()
    cores: tuple[int, ...] = ()
    shared: bool = False
    cells: int = 1

    @property
    def gpu_environment(self) -> dict[str, str]:
        """The variables by which a process sees the GPUs of this place."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu.token for gpu in self.gpus)} if self.gpus else {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process of a cell of this place needs."""
        facts = json.dumps({"jobs": self.cells, "placement": self.placement_for_record().model_dump()})
        return {**self.gpu_environment, PLACE: facts} if self.cells > 1 or self.is_limited else {}

    @property
    def is_limited(self) -> bool:
        """Whether a cell sees less than the whole machine."""
        return bool(self.gpus or self.cores)

    def placement_for_record(self) -> Placement:
        """Return where a cell ran, for its record."""
        return Placement(
            gpus=[gpu.token for gpu in self.gpus],
            gpu_names=[gpu.name for gpu in self.gpus],
            cores=list(self.cores),
            alone=bool(self.gpus) and not self.shared and not any(gpu.is_mig for gpu in self.gpus),
        )

    def record_with_place(self, record: RunRecord) -> RunRecord:
        """Return the record of a cell of this place with the place, and how many cells run at the same time."""
        return record.model_copy(
            update={"jobs": self.cells, "placement": self.placement_for_record()}
            if self.is_limited
            else {"jobs": self.cells}
        )

    def __str__(self) -> str:
        if self.gpus:
            return f"GPU {','.join(str(gpu.number) for gpu in self.gpus)}"
        if self.cores:
            return f"{'core' if len(self.cores) == 1 else 'cores'} {format_ranges(self.cores)}"
        return ""

    @contextlib.contextmanager
    def processes_kept_on_cores(self) -> Iterator[None]:
        """Let processes that this thread starts run on the cores of the place only; Linux alone can do so."""
        if not self.cores or not hasattr(os, "sched_setaffinity"):
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)  # of the calling thread, which its children inherit
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


ANYWHERE = Place()


def record_with_place(record: RunRecord) -> RunRecord:
    """Return the record of a cell of this process with what `Place.record_with_place` adds.

    The process that trains adds it too, so that no record lacks it where the command was killed.
    """
    text = os.environ.get(PLACE)
    if text is None:
        return record
    facts = json.loads(text)
    placement = Placement.model_validate(facts["placement"])
    is_limited = bool(placement.gpus or placement.cores)
    return record.model_copy(update={"jobs": facts["jobs"], "placement": placement if is_limited else None})


@dataclass(frozen=True)
class Places:
    """The places of a pool.

    Attributes:
        all: one for each cell that runs at the same time.
        notes: what the user should know, such as a GPU that is left out.
        about_times: the same, where times matter.
    """

    all: tuple[Place, ...]
    notes: tuple[str, ...] = ()
    about_times: tuple[str, ...] = ()

    @property
    def can_time_cells(self) -> bool:
        """Whether cells of all places can be timed: alone, on GPUs of one kind."""
        records = [place.placement_for_record() for place in self.all]
        return (
            all(record.alone for record in records)
            and len({tuple(record.gpu_names) for record in records}) == 1
        )


def places_for_cells(cells: Sequence[RunConfig], jobs: int | str | None, gpus: str | None = None) -> Places:
    """Share out this machine among cells.

    Args:
        jobs: cells that run at the same time; "auto": as many as there are places; None: the same where several GPUs
            are visible, else one.
        gpus: numbers of the GPUs to use, as torch counts the visible ones, such as 0,2-3; all that are free by default.

    Raises:
        ConfigError: there are no such GPUs for these cells, or they cannot communicate.
        EnvironmentUnfit: a cell has more processes than there are GPUs to choose from.
    """
    processes = max(cell.processes for cell in cells)
    devices = {cell.device for cell in cells}
    local = all(cell.launcher not in REMOTE_LAUNCHERS for cell in cells)
    may_share_gpus = local and (gpus is not None or jobs != 1) and devices <= {"auto", "cuda"}
    found = visible_gpus() if may_share_gpus else []
    if gpus is not None and not found:
        raise ConfigError(_why_named_gpus_unusable(gpus, devices, local=local))
    if not found:
        return _places_on_cores(jobs if local else 1, processes, max(cell.threads for cell in cells), devices)
    chosen, notes = _choose_gpus(found, gpus)
    if jobs is None and gpus is None and len(found) == 1:
        return Places((ANYWHERE,))
    if processes > 1 and any(gpu.is_mig for gpu in chosen):
        raise ConfigError(
            f"cells of {processes} processes cannot use MIG instances, which do not communicate"
        )
    if len(chosen) < processes:
        raise EnvironmentUnfit(
            f"{processes} processes were requested, but {len(chosen)} GPU(s) are free and chosen; use "
            f"--nproc-per-node with at most this many, or --device cpu"
        )
    groups = [chosen[start : start + processes] for start in range(0, len(chosen) - processes + 1, processes)]
    return _places_on_gpu_groups(groups, jobs if isinstance(jobs, int) else len(groups), notes)


def _places_on_gpu_groups(groups: Sequence[Sequence[Gpu]], count: int, notes: tuple[str, ...]) -> Places:
    """Return as many places as a count, each with a group of GPUs in turn, and cores next to it."""
    cores = _cores_of_gpu_groups(groups[:count])
    kinds = sorted({gpu.name for group in groups[:count] for gpu in group})
    about_times: tuple[str, ...] = ()
    if len(kinds) > 1 and count > 1:
        text = (
            f"step times are not compared on unlike GPUs ({' and '.join(kinds)}); --gpus can name equal ones"
        )
        about_times = (text,)
    shared = count > len(groups)
    places = [
        Place(tuple(groups[n % len(groups)]), cores[n % len(groups)], shared, count) for n in range(count)
    ]
    return Places(tuple(places), notes, about_times)


def _why_named_gpus_unusable(gpus: str, devices: Collection[str], *, local: bool) -> str:
    """Return why cells cannot use the GPUs that were named, of which there are none for them here."""
    if not local:
        return "--gpus is for cells on this machine; Slurm and Ray choose them"
    where = (
        "none is visible"
        if set(devices) <= {"auto", "cuda"}
        else f"the device is {', '.join(sorted(devices))}"
    )
    return f"--gpus {gpus} needs NVIDIA GPUs, but {where}"


def _choose_gpus(visible_gpus: Sequence[Gpu], gpus: str | None) -> tuple[list[Gpu], tuple[str, ...]]:
    """Return the GPUs to use, and notes about those that others use."""
    if gpus is not None:
        numbers = parse_gpu_numbers(gpus)
        if missing := [number for number in numbers if number >= len(visible_gpus)]:
            raise ConfigError(
                f"--gpus {gpus} names GPU {missing[0]}, but {len(visible_gpus)} are visible, starting at 0"
            )
        chosen = [visible_gpus[number] for number in numbers]
        return chosen, tuple(f"GPU {gpu.number} is not free: {gpu.in_use}" for gpu in chosen if gpu.in_use)
    free = [gpu for gpu in visible_gpus if not gpu.in_use]
    if not free:
        return list(visible_gpus), tuple(
            f"GPU {gpu.number} is not free: {gpu.in_use}" for gpu in visible_gpus
        )
    return free, tuple(
        f"GPU {gpu.number} is left out: {gpu.in_use}; --gpus names the ones to use"
        for gpu in visible_gpus
        if gpu.in_use
    )


def parse_gpu_numbers(text: str) -> list[int]:
    """Return the numbers of GPUs such as `0,2-3`, in the order in which they are named.

    Args:
        text: as `--gpus` has it.

    Raises:
        ConfigError: it cannot be read, or names a GPU twice.
    """
    numbers: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ConfigError(f"--gpus {text!r} cannot be read; write numbers as 0,2-3")
        numbers.extend(range(int(first), int(last or first) + 1))
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--gpus {text!r} names a GPU twice")
    return numbers


def _cores_of_gpu_groups(groups: Sequence[Sequence[Gpu]]) -> list[tuple[int, ...]]:
    """Return a share of the cores next to each group of GPUs, or else of all cores; none if they are too few."""
    available = _available_cores()
    near = []
    for group in groups:
        next_to_it = cores_near_device(group[0].bus)
        near.append(tuple(core for core in available if core in next_to_it) or tuple(available))
    shares = []
    for number, cores in enumerate(near):
        rank, count = near[:number].count(cores), near.count(cores)
        size = len(cores) // count
        shares.append(cores[rank * size : (rank + 1) * size])
    flat = [core for share in shares for core in share]
    return shares if all(shares) and len(set(flat)) == len(flat) else [()] * len(groups)


def _places_on_cores(jobs: int | str | None, processes: int, threads: int, devices: set[str]) -> Places:
    """Return places on disjoint cores where there are enough, each with as many as a cell has threads or more."""
    cores, need = _available_cores(), processes * threads
    on_cpu = devices <= {"auto", "cpu"}
    if jobs == "auto":
        count = max(1, len(cores) // need) if on_cpu else 1
    else:
        count = int(jobs or 1)
    if count == 1 or not on_cpu or count * need > len(cores):
        return Places((Place(shared=count > 1, cells=count),) * count)
    size = len(cores) // count
    return Places(
        tuple(Place(cores=tuple(cores[n * size : (n + 1) * size]), cells=count) for n in range(count))
    )


def _available_cores() -> list[int]:
    """Return the cores that this process may use, sorted by socket and core: threads of one core are neighbors."""
    if not hasattr(os, "sched_getaffinity"):
        return []

    def position(core: int) -> tuple[int, int, int]:
        folder = CORES / f"cpu{core}" / "topology"
        try:
            return (
                int((folder / "physical_package_id").read_text()),
                int((folder / "core_id").read_text()),
                core,
            )
        except (OSError, ValueError):
            return 0, core, core

    return sorted(os.sched_getaffinity(0), key=position)
