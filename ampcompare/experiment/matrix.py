"""The rows of a comparison: arms, each with the settings in which it differs from the others."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError, close_matches
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.results.analysis.pairing.comparability import iter_settings
from ampcompare.results.analysis.pairing.reference import default_reference, find_row_named
from ampcompare.settings.config import NON_NUMERIC_SETTINGS, RunConfig
from ampcompare.settings.file import Matrix
from ampcompare.settings.layers import MUTUALLY_EXCLUSIVE
from ampcompare.settings.stack import StackConfig, arm_text_with_stack, arms_with_stacks, stack_names_in

DEFAULT_ARMS = (
    "fp32",
    "apex:O0",
    "apex:O1",
    "apex:O2",
    "apex:O3",
    "native:fp16",
    "native:bf16",
    "half:bn_fp32",
    "half",
)
OTHER_NAMES = {"omp_threads": "threads"}
Vary = Sequence[tuple[str, Sequence[Any]]]


@dataclass(frozen=True)
class MatrixRow:
    """One row: the canonical text of an arm, values of settings by their paths, and the stack that it trains in."""

    arm: str
    varied: Mapping[str, Any] = field(default_factory=dict)
    stack: StackConfig | None = None

    @property
    def arm_with_stack(self) -> str:
        """The arm as a command and a file name it, such as `script@old`."""
        return arm_text_with_stack(self.arm, self.stack.name if self.stack else None)

    @property
    def label(self) -> str:
        """What the row is called: the arm, its stack, and what is varied."""
        named = [f"{path.rpartition('.')[2]}={value}" for path, value in self.varied.items()]
        return " ".join([self.arm_with_stack, *named])


def cross_arms_with_settings(
    arms: Sequence[str], vary: Vary, stacks: Mapping[str, StackConfig] = MappingProxyType({})
) -> list[MatrixRow]:
    """Return every arm, which may be lists such as `fp32,bf16@old`, with every combination of values of settings."""
    rows = arms_with_stacks(arms, stacks)
    paths = [path for path, _ in vary]
    combinations = list(itertools.product(*(values for _, values in vary)))
    return [
        MatrixRow(arm, dict(zip(paths, values, strict=True)), stack)
        for arm, stack in rows
        for values in combinations
    ]


def setting_path_of_name(name: str, said: str) -> str:
    """Return the path of a setting that is named by its path or the last part of it."""
    known = [path for path, _ in iter_settings(RunConfig().model_dump(exclude=set(NON_NUMERIC_SETTINGS)))]
    name = name.strip().replace("-", "_")
    name = OTHER_NAMES.get(name, name)
    fit = [path for path in known if path == name]
    fit = fit or [path for path in known if path.rpartition(".")[2] == name]
    if len(fit) != 1:
        words = dict.fromkeys(path.rpartition(".")[2] for path in known)
        like = close_matches(name, words, count=3)
        near = fit or close_matches(name, known, count=3)
        near = near or [path for word in like for path in known if path.rpartition(".")[2] == word]
        hint = f"choose one of {', '.join(near)}" if near else "ampcompare config show lists them all"
        raise ConfigError(
            f"{said}: {name!r} {'is not a setting' if not fit else 'names several settings'}; {hint}"
        )
    if fit[0] in ("arm", "recipe.seed"):
        raise ConfigError(f"{said}: arms and seeds have options of their own, --arm and --seeds")
    return fit[0]


def rows_of_matrix(
    matrix: Matrix,
    *,
    arms: Sequence[str] = (),
    reference: str | None = None,
    vary: Vary = (),
    by_hand: Collection[str] = (),
    stacks: Mapping[str, StackConfig] = MappingProxyType({}),
) -> list[MatrixRow]:
    """Return the rows that a file describes, or the requested ones instead.

    Args:
        arms: instead of those of the file; its rows give way too.
        reference: an arm, or the label of a row; an arm that no row has is added in front.
        vary: instead of what the file varies of the same settings, else crossed with it; rows give way too.
        by_hand: paths of settings that were given one value, which are then not varied by the file.
        stacks: those that arms may name, as in script@old.
    """

    def is_setting_kept(path: str) -> bool:
        return path not in by_hand and not any(rival in by_hand for rival in MUTUALLY_EXCLUSIVE.get(path, ()))

    if matrix.rows is not None and not arms and not vary:
        rows = []
        for given in matrix.rows:
            paths = {
                setting_path_of_name(name, f"rows: {name}"): value
                for name, value in given.items()
                if name != "arm"
            }
            arm, stack = _arm_and_stack_of_row(given["arm"], stacks)
            row = MatrixRow(
                arm, {path: value for path, value in paths.items() if is_setting_kept(path)}, stack
            )
            if row not in rows:
                rows.append(row)
        if reference is not None and find_reference(rows, reference) is None:
            arm, stack = _arm_and_stack_of_row(reference, stacks)
            rows.insert(0, MatrixRow(arm, stack=stack))
        return rows
    axes: dict[str, Sequence[Any]] = {
        setting_path_of_name(name, f"vary: {name}"): values for name, values in (matrix.vary or {}).items()
    }
    axes = {path: values for path, values in axes.items() if is_setting_kept(path)} | dict(vary)
    chosen = list(arms) or matrix.arms or list(DEFAULT_ARMS)
    rows = cross_arms_with_settings(chosen, list(axes.items()), stacks)
    if reference is not None and find_reference(rows, reference) is None:
        return cross_arms_with_settings([reference, *chosen], list(axes.items()), stacks)
    return rows


def _arm_and_stack_of_row(text: str, stacks: Mapping[str, StackConfig]) -> tuple[str, StackConfig | None]:
    found = arms_with_stacks([text], stacks)
    if len(found) != 1:
        raise ConfigError(f"rows: {text!r} names {len(found)} arms; give each a row of its own")
    return found[0]


def find_reference(rows: Sequence[MatrixRow], reference: str | None) -> MatrixRow | None:
    """Return the row that the others are compared with; None if no row has the arm."""
    if reference is None:
        usual = default_reference([row.arm for row in rows]) if rows else None
        return next((row for row in rows if row.arm == usual), None)
    label = find_row_named(reference, [row.label for row in rows])
    return next((row for row in rows if row.label == label), None)


def first_row_of_arm(matrix: Matrix, arm: str | None) -> MatrixRow | None:
    """Return the first row of a file, of an arm where one is asked for; None where the file has no such row.

    Raises:
        ConfigError: none is asked for, and the first row trains in another environment.
    """
    if matrix.rows is None and matrix.arms is None and matrix.vary is None:
        return None
    wanted = None if arm is None else str(Arm.parse(arm))
    rows = rows_with_stack_names_alone(matrix)
    row = next((row for row in rows if wanted in (None, row.arm)), None)
    if row is not None and row.stack is not None and arm is None:
        why = "trains in another environment, which a file does not know"
        advice = f"give --arm {row.arm_with_stack} with --stack {row.stack.name}=COMMAND, or another arm"
        raise ConfigError(refusal_sentence(f"the first row, {row.arm_with_stack},", why, advice))
    return row


def rows_with_stack_names_alone(matrix: Matrix) -> list[MatrixRow]:
    """Return the rows that a file describes, where nothing is started: stacks have their names alone."""
    given = [row["arm"] for row in matrix.rows or ()] + list(matrix.arms or ())
    stacks = {name: StackConfig(name=name, command=("python",)) for name in stack_names_in(given)}
    return rows_of_matrix(matrix, stacks=stacks)
