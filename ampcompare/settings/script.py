"""Settings for a user's own training script that the arms of a comparison train. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

from pydantic import Field, ValidationError, model_validator

from ampcompare.base.environment.packages import importability_and_spec
from ampcompare.base.errors import ConfigError
from ampcompare.base.secrets.files import note_secrets_in_files
from ampcompare.base.secrets.masking import hide_secrets_in_words, note_secret_names, reveal_secrets
from ampcompare.settings.command_words import why_no_module, words_after_python_of_command
from ampcompare.settings.metric_direction import known_metric_direction
from ampcompare.settings.recipe import FrozenSettings, PositiveInt
from ampcompare.settings.stack import StackConfig

LOSS = "training loss"
# which nearly all scripts can train
SCRIPT_ARMS = ("script", "fp32", "apex:O1", "native:fp16", "native:bf16")
# Words of --metric, by the setting that they give.
WORDS = {"goal": ("max", "min"), "pick": ("last", "best", "first"), "difference": ("points",)}
NAME = re.compile(r"[^:=]{1,40}")
SEED_STRIDE = 1_000_003  # larger than the ranks, epochs and samples that scripts add to a seed of their own
SEED_OPTION = re.compile(
    r"""(?:add_argument|option)\((?:[^()]*,)?\s*["'](--(?:manual[-_]|random[-_])?seed)["']"""
)


class ScriptMetric(FrozenSettings):
    """A figure that a script prints or logs."""

    name: str = Field(description="in the report; without a pattern, the name under which the script logs it")
    goal: Literal["max", "min"] = Field("max", description="which values are better")
    pick: Literal["last", "best", "first"] = Field("last", description="which of several values counts")
    difference: Literal["ratio", "points"] = Field(
        "ratio", description="how values are compared; points where they can be 0 or below"
    )
    pattern: str | None = Field(
        None, description="regular expression whose first group is the value, in the output"
    )

    @model_validator(mode="after")
    def _require_group_in_pattern(self) -> ScriptMetric:
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(
                    f"metric {self.name}: {self.pattern!r} is not a regular expression: {error}"
                ) from None
            if groups != 1:
                raise ValueError(
                    f"metric {self.name}: {self.pattern!r} has {groups} groups; write exactly one, around the value, "
                    rf"as in 'Acc@1 ([\d.]+)'"
                )
        return self


class ScriptConfig(FrozenSettings):
    """A script, and what is read from it."""

    name: str = Field(description="path of a script, or name of a module")
    is_module: bool = False
    arguments: tuple[str, ...] = Field(
        (),
        description="{seed}, {arm} and {cell_dir} are filled in; a placeholder such as $TOKEN for a secret",
    )
    sha256: str | None = Field(None, description="of the file; a changed script is another comparison")
    metrics: tuple[ScriptMetric, ...] = Field(
        (), description="the first is the one of verdicts; none: the loss of the last tenth of the steps"
    )
    seed_arg: str | None = Field(None, description="argument that gets the seed, such as --seed")
    shift_seeds: Literal["global", "all"] | None = Field(
        None,
        description="what adds an offset for each seed: global generators, or also those that the script makes",
    )
    max_steps: PositiveInt | None = Field(None, description="optimizer steps after which a cell ends")
    compat_torch: bool = Field(False, description="restore what changed since the script was written")
    torchrun: bool = Field(False, description="start it by torchrun, as one process too")
    first_weights: StackConfig | None = Field(
        None,
        description="the environment whose first weights, of the same seed, it begins with; none: its own",
    )

    @property
    def command(self) -> list[str]:
        """The words after `python`."""
        return [*(["-m"] if self.is_module else []), self.name, *self.arguments]

    @property
    def import_folder(self) -> Path:
        """The folder that Python puts first on the search path for imports."""
        path = Path(self.name)
        if self.is_module:
            return Path.cwd()
        return Path(os.path.abspath(path)) if path.is_dir() else path.resolve().parent

    def arguments_for(self, seed: int, arm: str, cell_dir: Path) -> list[str]:
        """Return the arguments of a cell, secrets included.

        Args:
            seed: of the cell.
            arm: in its canonical form.
            cell_dir: the folder of the cell.
        """
        values = {"seed": str(seed), "arm": arm, "cell_dir": str(cell_dir)}
        filled = [_word_with_placeholders_filled(word, values) for word in reveal_secrets(self.arguments)]
        return filled if self.seed_arg is None else [*filled, self.seed_arg, str(seed)]


def _word_with_placeholders_filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():  # not str.format: other braces are the script's
        word = word.replace(f"{{{name}}}", value)
    return word


def parse_metric(text: str) -> ScriptMetric:
    r"""Read `NAME[:max|min][:last|best|first][:points][=REGEX]`, such as `top1:max=Acc@1 ([\d.]+)`.

    Without `max` or `min` the name must tell which values are better, as `val_loss` does.
    """
    head, equals, pattern = text.partition("=")
    name, *words = head.split(":")
    given = {key: [word for word in words if word in known] for key, known in WORDS.items()}
    wrong = len(words) > sum(map(len, given.values())) or any(len(found) > 1 for found in given.values())
    if not NAME.fullmatch(name) or wrong or (equals and not pattern):
        raise ConfigError(
            rf"--metric {text!r} is not NAME[:max|min][:last|best|first][:points][=REGEX], "
            r"as in 'top1:max=Acc@1 ([\d.]+)'"
        )
    chosen = {key: found[0] for key, found in given.items() if found}
    if "goal" not in chosen:
        if not (goal := known_metric_direction(name)):
            raise ConfigError(
                f"--metric {text!r}: the name does not tell which values are better; "
                f"write {name}:max where larger ones are, or {name}:min"
            )
        chosen["goal"] = goal
    try:
        return ScriptMetric.model_validate({"name": name, "pattern": pattern or None, **chosen})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--metric {text!r}: {first.get('ctx', {}).get('error') or first['msg']}") from None


def _find_module_file(name: str) -> Path | None:
    """Return the file that `python -m` runs, without importing what it belongs to; None if it cannot be told."""
    _, spec = importability_and_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        _, spec = importability_and_spec(f"{name}.__main__")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _sha256_of_file(path: Path | None) -> str | None:
    if path is None or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def script_config(
    words: Sequence[str],
    *,
    metrics: Sequence[str] = (),
    seed_arg: str | None = None,
    shift_seeds: str | None = None,
    max_steps: int | None = None,
    compat_torch: bool = False,
    torchrun: bool = False,
    mask: Sequence[str] = (),
) -> ScriptConfig:
    """Return the settings of a script from the words after `--`, in which placeholders stand for secrets.

    Args:
        words: the path of a script, or `-m` and a module, with its arguments; `python`, or a launcher such as torchrun,
            may come first.
        metrics: patterns of `--metric`, each with the name of a metric and how its value is found in the output.
        seed_arg: the option of the script that takes a seed; None if it has none.
        shift_seeds: which calls that seed generators are shifted, "global" or "all"; None if that was not said.
        max_steps: updates after which the script is ended; None for all that it makes.
        compat_torch: names that old versions of torch had are there.
        torchrun: the script is started by torchrun.
        mask: patterns of names of further arguments and variables of the environment that are secrets.

    Raises:
        ConfigError: there is no such script or module, or two metrics have one name.
    """
    words = words_after_python_of_command(words)
    is_module = list(words[:1]) == ["-m"]
    rest = list(words[1:] if is_module else words)
    if not rest:
        raise ConfigError(
            "no script after --; give a script with its arguments, or -m and the name of a module"
        )
    note_secret_names(mask)
    read = tuple(map(parse_metric, metrics))
    names = [metric.name for metric in read]
    if len(set(names)) < len(names):
        raise ConfigError(f"metrics {', '.join(names)}: a name appears twice; each metric needs its own name")
    path = Path(rest[0])
    if is_module and not importability_and_spec(rest[0])[0]:
        raise ConfigError(why_no_module(rest[0], rest[1:]))
    if not is_module and not path.exists():
        raise ConfigError(f"there is no script {rest[0]}; give its path, or -m and the name of a module")
    if not is_module and path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"{rest[0]} is a folder without a __main__.py; name the script inside it")
    source = _find_module_file(rest[0]) if is_module else path
    note_secrets_in_files(source, rest[1:])
    return ScriptConfig(
        name=rest[0], is_module=is_module, arguments=tuple(hide_secrets_in_words(rest[1:])),
        sha256=_sha256_of_file(source), metrics=read, seed_arg=seed_arg,
        shift_seeds=_parse_shift_seeds(shift_seeds), max_steps=max_steps, compat_torch=compat_torch,
        torchrun=torchrun,
    )  # fmt: skip


def _parse_shift_seeds(words: str | None) -> Literal["global", "all"] | None:
    if words is not None and words not in ("global", "all"):
        raise ConfigError(f"shift_seeds is {words!r}; give global, for the global generators, or all")
    return cast(Literal["global", "all"] | None, words)


def seed_option_in_source(script: ScriptConfig) -> str:
    """Return the option for the seed that the source of a script names; "" if it names none, or it is in use."""
    if script.is_module or script.seed_arg is not None:
        return ""
    try:
        source = Path(script.name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = SEED_OPTION.search(source)
    return found[1] if found else ""
