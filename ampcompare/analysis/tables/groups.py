"""The arms of a table of others: lines of one arm with equal settings, in blocks, and which is the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampcompare.analysis.tables.csv_table import Run, same_words
from ampcompare.base.errors import ConfigError

__all__ = ["Group", "crossed", "differences", "divergence", "make_groups", "reference_in", "reference_of"]

FP32 = ("fp32", "float32", "single precision")
MAX_NAMED = 8


@dataclass(frozen=True)
class Group:
    """The lines of one arm with one set of settings, in one block.

    Attributes:
        label: the arm, with the settings that tell it from others.
        name: the same without those that blocks are made of.
        block: values of the settings that blocks are made of.
        settings: the other ones.
    """

    label: str
    name: str
    arm: str
    block: tuple[str, ...]
    settings: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def diverged(self) -> int:
        return sum(run.runs or 1 for run in self.runs if run.diverged)

    @property
    def count(self) -> int:
        return sum(run.runs or 1 for run in self.runs)


def make_groups(runs: Sequence[Run], within: Sequence[str]) -> list[Group]:
    """Put lines of one arm and equal settings together, blocks in the order of their first line."""
    known = [name for name, _ in runs[0].settings]
    columns = [_setting(name, known) for name in within]
    spelled: dict[str, str] = {}
    members: dict[tuple[tuple[str, ...], str, tuple[str, ...]], list[Run]] = {}
    for run in runs:
        spelled.setdefault(run.arm.casefold(), run.arm)
        block = tuple(same_words(dict(run.settings)[name]) for name in columns)
        rest = tuple(same_words(text) for name, text in run.settings if name not in columns)
        members.setdefault((block, run.arm.casefold(), rest), []).append(run)
    keys = list(members)
    blocks = {block: index for index, block in reversed(list(enumerate(key[0] for key in keys)))}
    groups = []
    for key in sorted(keys, key=lambda key: blocks[key[0]]):
        block, arm, _ = key
        mine = members[key]
        settings = {name: text for name, text in mine[0].settings if name not in columns}
        alone = sum(other[:2] == (block, arm) for other in keys) == 1
        words = [] if alone else [f"{name}={text}" for name, text in settings.items()]
        values = dict(mine[0].settings)
        of_block = [f"{name}={values[name]}" for name in columns] if len(blocks) > 1 else []
        label, name = " ".join([spelled[arm], *words, *of_block]), " ".join([spelled[arm], *words])
        groups.append(Group(label, name, spelled[arm], block, settings, tuple(mine)))
    return groups


def _setting(wanted: str, known: Sequence[str]) -> str:
    """Return the setting that the caller names, in any case, with or without its unit."""
    word = " ".join(wanted.strip().replace("_", " ").replace("-", " ").lower().split())
    if word not in known:
        has = f"its settings are {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"the table has no setting {wanted!r} to compare within; {has}")
    return word


def reference_of(groups: Sequence[Group], wanted: str | None) -> Group:
    """Return a group of the reference arm; the one that others are compared with, if there is one block."""
    first = groups[0].block
    if wanted is None:
        return next((group for group in groups if group.arm.casefold() in FP32), groups[0])
    fit = [group for group in groups if group.label == wanted] or [
        group for group in groups if wanted.casefold() in (group.label.casefold(), group.arm.casefold())
    ]
    if not fit or len([group for group in fit if group.block == fit[0].block]) > 1:
        known = ", ".join(repr(group.label) for group in (fit or groups)[:MAX_NAMED])
        raise ConfigError(f"{'several arms are' if fit else 'there is no arm'} {wanted!r}; choose one of {known}")
    return next((group for group in fit if group.block == first), fit[0])


def reference_in(groups: Sequence[Group], reference: Group) -> Group | None:
    """Return what the arms of a block are compared with: its only group of that arm, or the one of equal settings."""
    fit = [group for group in groups if group.arm == reference.arm]
    return fit[0] if len(fit) == 1 else next((group for group in fit if not differences(group, reference)), None)


def differences(group: Group, base: Group) -> str:
    apart = [
        f"{name} {text or 'none'}, not {base.settings.get(name) or 'none'}"
        for name, text in group.settings.items()
        if same_words(text) != same_words(base.settings.get(name, ""))
    ]
    return f"not comparable ({'; '.join(apart)})" if apart else ""


def divergence(groups: Iterable[Group]) -> str:
    known = list(groups)
    count = sum(group.diverged for group in known)
    return f"diverged {count}/{sum(group.count for group in known)}" if count else ""


def crossed(groups: Sequence[Group], name: str) -> bool:
    """Return whether an arm has several values of a setting, and another arm has one of them too."""
    values: dict[str, set[str]] = {}
    for group in groups:
        values.setdefault(group.arm, set()).add(same_words(group.settings[name]))
    several = [arm for arm, known in values.items() if len(known) > 1]
    return any(values[arm] & values[other] for arm in several for other in values if other != arm)
