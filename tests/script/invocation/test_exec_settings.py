"""The settings of `exec` as words of its command line."""

import dataclasses

import pytest

from ampcompare.base.guard_modes import GUARD_OPTIONS
from ampcompare.cli.exec_command import command
from ampcompare.script.invocation.exec_settings import SWITCHES, VALUE_OPTIONS, ExecSettings

NO_OPTION = {"ledger", "watch", "name", "arguments"}  # of a process that another one starts


def test_every_field_has_an_option_or_none_on_purpose() -> None:
    fields = {field.name for field in dataclasses.fields(ExecSettings)}
    assert {*VALUE_OPTIONS, *SWITCHES, "autocast_lists", "guards"} == fields - NO_OPTION


@pytest.mark.parametrize(
    "settings",
    [
        ExecSettings(),
        ExecSettings(engine="nvidia", opt_level="O1", guards="off", record="r.jsonl"),
        ExecSettings(
            arm="native:bf16", seed=3, shift_seeds="all", twin=True, first_weights="w.pt", max_steps=5
        ),
        ExecSettings(device="cpu", autocast_lists="cpu", compat_torch=True, guards="strict", guard_passes=9),
    ],
)
def test_exec_reads_what_is_written(settings: ExecSettings) -> None:
    """A process that gets the words has the settings, fields without an option aside."""
    read = command.make_context("exec", [*settings.exec_options, "train.py", "--seed", "9"]).params
    guards = read.pop("guards") or "warn"
    assert guards in GUARD_OPTIONS
    found = ExecSettings(
        guards=guards, **{name: read[name] for name in (*VALUE_OPTIONS, *SWITCHES, "autocast_lists")}
    )
    assert found == settings
    assert read["arguments"] == ("--seed", "9")
