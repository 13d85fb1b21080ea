"""What the summary of a preflight says of each arm."""

from ampcompare.results.records.preflight import ArmTrial, Preflight


def test_an_arm_that_made_steps_and_then_failed_is_not_among_those_that_trained() -> None:
    found = Preflight(
        arms={
            "script": ArmTrial(steps=2, error="a mistake", exit_code=3),
            "fp32": ArmTrial(steps=3, step_seconds=0.1),
        }
    )
    assert found.summary_lines() == [
        "preflight, 0s: fp32 trained, 3 steps each",
        "  script cannot train: a mistake",
    ]


def test_a_preflight_in_which_all_arms_failed() -> None:
    found = Preflight(arms={"script": ArmTrial(steps=2, error="a mistake", exit_code=3)})
    assert found.summary_lines() == ["preflight, 0s:", "  script cannot train: a mistake"]
