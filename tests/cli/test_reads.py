"""What a command declares to read is what it reads: no flag without effect, and no setting that cannot be given."""

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest

import ampcompare
from ampcompare.cli.shared_options import RECIPE_OPTIONS, parameter_name_of_setting
from ampcompare.errors import ConfigError
from ampcompare.settings.reads import (
    AHEAD,
    CHOSEN_BY_FIND_BATCH,
    DIAGNOSE,
    EXPLAIN,
    FIND_BATCH,
    PROFILE,
    TRAIN,
    CommandReads,
)
from tests.cli.conftest import Call

PROGRAM = Path(__file__).with_name("observed_reads.py")
# What each command looks at to see which arm it has and that it is one process: other options say it, or the arm.
FACTS = {"arm", "script", "stack", "launcher", "parallel.kind", "processes"}
# From these the validation of a `RunConfig` derives the batch size or the learning rate, which a command reads.
DERIVING = {
    "recipe.global_batch_size",
    "recipe.optimizer.lr_base",
    "recipe.optimizer.lr_base_batch",
    "recipe.optimizer.lr_rule",
}
USUAL = ("--arch", "mlp")
# What is read only beside another value.
OTHER = (
    "--arch",
    "convnet",
    *["--schedule", "step", "--layerwise-lr", "larc", "--norm-weight-decay", "0", "--warmup-epochs", "0"],
)
WATCHING: dict[str, tuple[CommandReads, list[str]]] = {
    "explain": (EXPLAIN, ["explain", "O2"]),
    "diagnose": (DIAGNOSE, ["diagnose", "--arm", "bf16", "--steps", "3", "--no-cures"]),
    "diagnose --ahead": (AHEAD, ["diagnose", "--ahead", "--prefix", "12", "--no-twin", "--arm", "half:bf16"]),
    "profile": (
        PROFILE,
        ["profile", "--arm", "bf16", "--steps", "2", "--profiled-steps", "1", "--no-trials"],
    ),
}


def _reads(forked_python: Any, folder: Path, words: list[str]) -> set[str]:
    done = forked_python.run([str(PROGRAM), *words], folder, {**os.environ})
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert answer["code"] == 0, answer["text"]
    return {*answer["reads"]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "explain")) for name in WATCHING]
)
def test_declared_is_observed(name: str, forked_python: Any, tmp_path: Path) -> None:
    """A command trains a recipe in two ways, and reads the settings that it declares, and no other."""
    reads, words = WATCHING[name]
    observed = _reads(forked_python, tmp_path, [*words, *USUAL]) | _reads(
        forked_python, tmp_path, [*words, *OTHER]
    )
    # of an entry in a list, which is one setting
    declared = {path for path in reads.recipe if ".N." not in path}
    assert observed - declared - reads.refused - FACTS == set()
    assert declared - observed - DERIVING == set()


def test_a_flag_stands_for_what_is_read(call: Call) -> None:
    """Each command has the flags of what it reads, and no flag of another setting."""
    flagged = {path for _, path, _ in RECIPE_OPTIONS}
    for name, reads in (("explain", [EXPLAIN]), ("diagnose", [DIAGNOSE, AHEAD]), ("profile", [PROFILE])):
        _check_flags(name, flagged, frozenset().union(*(each.accepted_paths for each in reads)))
    _check_flags("find-batch", flagged, FIND_BATCH.accepted_paths)
    for name in ("run", "compare"):
        _check_flags(name, flagged, TRAIN.accepted_paths)


def _check_flags(name: str, flagged: set[str], offered: frozenset[str]) -> None:
    from ampcompare.cli.group import cli

    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert command is not None
    names = {parameter.name for parameter in command.params}
    assert {path for path in flagged if parameter_name_of_setting(path) in names} == flagged & offered, name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "O2", "--arch", "mlp", "--set", "on_nan=stop"], "explain does not read on_nan"),
        (
            ["explain", "O2", "--arch", "mlp", "--nproc-per-node", "2"],
            "--nproc-per-node is not for a model named with --arch",
        ),
        (["diagnose", "--set", "recipe.early_stop=3"], "diagnose does not read recipe.early_stop"),
        (
            ["diagnose", "--ahead", "--cpu-half", "native"],
            "flag --cpu-half: diagnose --ahead does not read cpu_half",
        ),
        (["diagnose", "--compile", "eager"], "--compile fuses them"),
        (["profile", "--set", "saving.every_steps=3"], "profile does not read saving.every_steps"),
        (["find-batch", "--set", "recipe.max_steps=50"], "find-batch does not read recipe.max_steps"),
        (["find-batch", "--set", "recipe.max_stops=50"], "there is no setting 'recipe.max_stops'"),
    ],
)
def test_what_is_not_read_is_refused(words: list[str], said: str, call: Call) -> None:
    """A setting by its path is refused with its name; one that does not exist, with a similar name."""
    done = call(*words)
    assert done.code == 2
    assert said in done.err


def test_python_refuses_the_same(tmp_path: Path) -> None:
    """Functions of Python refuse what their commands do; of a `Recipe`, as of a file, they take what they read."""
    with pytest.raises(ConfigError, match="find-batch does not read on_nan"):
        ampcompare.find_batch(on_nan="continue")
    with pytest.raises(ConfigError, match="diagnose of a loop does not read tf32"):
        ampcompare.diagnose(lambda precision: None, tf32="on")
    (script := tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"recipe\.epochs is a setting of ampcompare's own training loop"):
        ampcompare.compare(script=[str(script)], **{"recipe.epochs": 3})
    with pytest.raises(ConfigError, match="diagnose watches operations one by one"):
        ampcompare.diagnose(recipe=ampcompare.Recipe(epochs=3, compile="eager", early_stop=3))


def test_find_batch_chooses_what_it_does_not_read() -> None:
    """What `find-batch` does not read has a value of its own in each try, whatever a file says."""
    from ampcompare.experiment.find_batch import configs_of_arms
    from ampcompare.settings.config import RunConfig
    from ampcompare.settings.layers import set_value_at_path

    given: dict[str, Any] = {}
    values = {
        "recipe.max_steps": 50,
        "recipe.early_stop": 3,
        "recipe.target": 0.5,
        "on_nan": "rollback",
        "saving.every_steps": 3,
        "saving.every_epochs": 3,
        "saving.keep_last": 9,
        "saving.in_background": True,
        "saving.apex_layout": True,
        "saving.weights_format": "safetensors",
        "saving.resume": "auto",
        "saving.resume_into_other_arm": True,
        "saving.stop_at_step": 3,
    }
    for path, value in values.items():
        set_value_at_path(given, path, value)
    only_with_rollback, of_older_records = {"rollback_every", "max_rollbacks"}, {"saving.format"}
    assert values.keys() | only_with_rollback | of_older_records == CHOSEN_BY_FIND_BATCH
    (tried,) = configs_of_arms(RunConfig.model_validate(given), ["fp32"])
    (plain,) = configs_of_arms(RunConfig(), ["fp32"])
    assert tried == plain
