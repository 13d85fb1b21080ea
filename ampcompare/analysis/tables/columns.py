"""The roles of the columns of a results table: arm, settings, measured values, and columns that are not judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampcompare.analysis.tables.metrics import ACCURACY, Better, is_measurement, known_metric
from ampcompare.analysis.tables.quantities import UNITS
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.records.metric import MAX_NAME, Metric

__all__ = ["Columns", "TableOptions", "find_columns"]

ARM = ("arm", "method", "backend", "name")
ARM_OTHERWISE = ("precision", "mode", "math", "dtype", "model", "config")  # if no column has a name of `ARM`
ROLES = {
    "seed": ("seed", "random seed"),
    "time": (
        *("time", "training time", "train time", "time to train", "total time", "step time", "iteration time"),
        *(
            "epoch time",
            "time per step",
            "time per epoch",
            "time/step",
            "time/epoch",
            "latency",
            "duration",
            "wall time",
        ),
        *("seconds", "minutes", "hours", "ms"),
    ),
    "throughput": ("throughput", "training throughput", "train throughput", "fps", "it/s"),
    "memory": (
        "memory",
        "mem",
        "peak memory",
        "peak mem",
        "gpu memory",
        "gpu mem",
        "max memory",
        "memory usage",
        "vram",
    ),
    "sd": ("sd", "std", "stdev", "std dev", "stddev", "standard deviation", "±", "+/-"),
    "runs": ("n", "runs", "num runs", "number of runs", "trials", "repeats", "num seeds", "seeds"),
    "diverged": ("diverged",),
}
MEAN = ("mean", "average", "avg")
REMARKS = ("note", "notes", "remark", "remarks", "comment", "comments", "source", "url", "link", "download", "log")
SETTINGS = (
    *("gpus", "gpu", "num gpus", "number of gpus", "nodes", "ranks", "world size", "processes", "machine", "device"),
    *("hardware", "system", "platform", "host", "batch", "batch size", "batch size/gpu", "batch/gpu", "bs"),
    *("global batch", "global batch size", "local batch size", "epoch", "epochs", "steps", "max steps", "iterations"),
    *("iters", "lr", "learning rate", "weight decay", "wd", "momentum", "optimizer", "schedule", "lr schd", "warmup"),
    *("warmup steps", "warmup epochs", "dropout", "label smoothing", "accumulation", "grad accum", "clip", "arch"),
    *("architecture", "model", "backbone", "network", "layers", "dataset", "data", "task", "image size", "crop size"),
    *("resolution", "seq len", "sequence length", "beam", "beam size", "workers", "threads", "framework", "torch"),
    *("pytorch", "cuda", "version", "container", "augmentation"),
)
PER_SECOND = re.compile(r".+(/| per )s(ec(ond)?)?")
UNIT = re.compile(r"(?P<name>.*?)\s*[(\[](?P<unit>[^()\[\]]*)[)\]]")


@dataclass(frozen=True)
class TableOptions:
    """What the caller says about a table.

    Attributes:
        metric: name of the column of results, or of what they are if the column is headed "mean".
        better: which direction is; by default that of the metric.
        settings: columns that runs must agree in, besides those with a known name.
    """

    metric: str | None = None
    better: Better | None = None
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The indices of the columns.

    Attributes:
        roles: index by role: arm, and where there is one value, sd, runs, seed, time, time sd, memory, diverged, and
            throughput if there is no time.
        names: of all columns, in lower case, without units.
        units: of all columns, from their heads, "" for none.
        metric: that is judged; None if the table has times or memory only.
        settings: indices of what runs must share.
        not_judged: names of the columns that nothing is done with, except remarks.
    """

    roles: Mapping[str, int]
    names: tuple[str, ...]
    units: tuple[str, ...]
    metric: Metric | None
    settings: tuple[int, ...]
    not_judged: tuple[str, ...]


def find_columns(head: Sequence[str], numeric: Sequence[bool], name: str, options: TableOptions) -> Columns:
    """Find the role of each column.

    Args:
        head: the cells of the first line.
        numeric: of each column, whether all of its cells are numbers.
        name: of the table, for errors.

    Raises:
        RecordError: there is no arm or nothing that was measured, or two columns have the same role.
        ConfigError: there is no column that the options name.
    """
    names, units = zip(*(_name_and_unit(cell) for cell in head), strict=True)
    _refuse_doubles(names, name)
    arm = _arm(names, name, head)
    roles = {"arm": arm}
    for role, known in ROLES.items():
        index = next((index for index, word in enumerate(names) if index != arm and _has_role(word, role, known)), None)
        if index is not None:
            roles[role] = index
    if "time" in roles:
        roles.pop("throughput", None)
    value, metric = _metric(names, roles, name, head, options)
    if value is not None:
        roles = {role: index for role, index in roles.items() if index != value} | {"value": value}
    _add_spreads(roles, names, value)
    wanted = [_index(names, word, "setting") for word in options.settings]
    used = {index for role, index in roles.items() if index not in wanted}
    settings = [
        index
        for index, word in enumerate(names)
        if index not in used
        and (index in wanted or word in SETTINGS or not (numeric[index] or is_measurement(word) or word in REMARKS))
    ]
    rest = [index for index in range(len(names)) if index not in used and index not in settings]
    return Columns(
        roles={role: index for role, index in roles.items() if index not in settings},
        names=tuple(names),
        units=tuple(units),
        metric=metric,
        settings=tuple(settings),
        not_judged=tuple(names[index] for index in rest if names[index] not in REMARKS),
    )


def _name_and_unit(cell: str) -> tuple[str, str]:
    """Return `mem` and `gb` of `**Mem (GB)**`."""
    text = " ".join(cell.strip().strip("*").replace("_", " ").lower().split())
    if known_metric(text) or text in ("+/-", "±"):
        return text, ""
    match = UNIT.fullmatch(text)
    plain, unit = (match["name"], match["unit"].strip()) if match else (text, "")
    if plain.endswith(" %"):
        plain, unit = plain.removesuffix("%").strip(), unit or "%"
    plain = re.sub(r"\s*/\s*", "/", plain)
    words = plain.split()
    if not unit and len(words) > 1 and words[-1] in UNITS and words[0] in ("time", "memory", "mem"):
        plain, unit = " ".join(words[:-1]), words[-1]
    return plain, unit


def _refuse_doubles(names: Sequence[str], name: str) -> None:
    twice = [word for word, times in Counter(names).items() if times > 1 and word]
    if twice or "" in names:
        raise RecordError(f"{name} has {f'two columns {twice[0]!r}' if twice else 'a column without a name'}")


def _arm(names: Sequence[str], name: str, head: Sequence[str]) -> int:
    certain = [index for index, word in enumerate(names) if word in ARM]
    if len(certain) > 1:
        raise RecordError(f"{name} has two columns of arms, {names[certain[0]]!r} and {names[certain[1]]!r}")
    otherwise = [names.index(word) for word in ARM_OTHERWISE if word in names]
    for index in (*certain, *otherwise):
        return index
    raise RecordError(f"{name} has no column 'arm'; its header is {_shown(head)}, and arm,seed,accuracy would do")


def _shown(head: Sequence[str]) -> str:
    return ", ".join(cell.strip()[:30] for cell in head[:8])


def _has_role(word: str, role: str, known: Sequence[str]) -> bool:
    return word in known or (role == "throughput" and PER_SECOND.fullmatch(word) is not None)


def _metric(
    names: Sequence[str], roles: Mapping[str, int], name: str, head: Sequence[str], options: TableOptions
) -> tuple[int | None, Metric | None]:
    """Return the column that is judged and what it holds."""
    taken = roles["arm"]
    metrics = {index: metric for index, word in enumerate(names) if index != taken and (metric := _known(word))}
    means = [index for index, word in enumerate(names) if word in MEAN]
    if options.metric is not None:
        wanted, _ = _name_and_unit(options.metric)
        meant = _known(wanted) or Metric(name=options.metric.strip()[:MAX_NAME] or "metric")
        indices = [index for index, word in enumerate(names) if word == wanted and index != taken]
        indices = indices or [index for index, metric in metrics.items() if metric == meant] or means
        if not indices:
            raise ConfigError(f"{name} has no column {options.metric!r} to judge; its header is {_shown(head)}")
        return indices[0], _directed(meant, options)
    accuracies = [index for index, metric in metrics.items() if metric == ACCURACY]
    if len(accuracies) > 1:
        first, second = (names[index] for index in accuracies[:2])
        raise RecordError(f"{name} has two columns of accuracy, {first!r} and {second!r}; choose one with --metric")
    for index in accuracies or metrics:
        return index, _directed(metrics[index], options)
    if means:
        return means[0], _directed(ACCURACY, options)
    if not {"time", "throughput", "memory"} & set(roles):
        raise RecordError(f"{name} has no column 'accuracy'; its header is {_shown(head)}; name one with --metric")
    return None, None


def _known(word: str) -> Metric | None:
    """Return the metric of `bleu`, `bleu mean` or `mean bleu`."""
    words = word.split()
    rest = [part for part in words if part not in MEAN]
    return known_metric(" ".join(rest)) if len(words) - len(rest) <= 1 else None


def _directed(metric: Metric, options: TableOptions) -> Metric:
    return metric if options.better is None else metric.model_copy(update={"better": options.better})


def _add_spreads(roles: dict[str, int], names: Sequence[str], value: int | None) -> None:
    """Find columns such as `bleu sd` and `time std`: the spread of another column."""
    for index, word in enumerate(names):
        of, _, last = word.rpartition(" ")
        if last not in ROLES["sd"] or not of:
            continue
        if "time" in roles and of == names[roles["time"]]:
            roles.setdefault("time sd", index)
        elif value is not None and of in (names[value], names[value].removesuffix(" mean").removeprefix("mean ")):
            roles.setdefault("sd", index)


def _index(names: Sequence[str], wanted: str, what: str) -> int:
    word, _ = _name_and_unit(wanted)
    if word not in names:
        raise ConfigError(f"the table has no column {wanted!r} for --{what}; it has {', '.join(names[:12])}")
    return names.index(word)
