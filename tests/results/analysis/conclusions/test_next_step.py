"""Next steps: each is a command that works, within the looks that are left, and none changes a margin."""

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ampcompare.cli.compare_command import command as compare
from ampcompare.cli.diagnose_command import command as diagnose
from ampcompare.cli.doctor_command import command as doctor
from ampcompare.cli.exec_command import command as exec_
from ampcompare.cli.explain_command import command as explain
from ampcompare.experiment.launch.script.launcher import failed_script_record
from ampcompare.results.analysis.conclusions.next_step import CompareCommandLine
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison, NextStep
from ampcompare.results.records.run import NOT_STARTED, RunRecord, ScriptFacts, SeedCall
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig
from ampcompare.settings.stack import parse_stacks
from ampcompare.testing import make_comparison, make_record

COMMANDS = {"compare": compare, "diagnose": diagnose, "doctor": doctor, "exec": exec_, "explain": explain}
TYPED = "ampcompare compare --arm fp32 --arm half --seeds 0-2 --margin 0.5 -o r"
FP32 = [500, 520, 490, 510, 505]
OPEN = [510, 511, 503, 498, 517]


@pytest.fixture
def compared() -> Callable[..., Comparison]:
    """Sum up fp32 and half over some seeds, with other values for half."""

    def build(
        correct: Sequence[int],
        command: str = TYPED,
        design: SequentialDesign | None = None,
        device: str = "cuda:0",
        **half: Any,
    ) -> Comparison:
        records = [
            make_record("fp32", seed, top1=FP32[seed] / 1000, device=device) for seed in range(len(correct))
        ]
        records += [
            make_record("half", seed, top1=right / 1000, device=device, **half)
            for seed, right in enumerate(correct)
        ]
        return summarize(records, arms=["fp32", "half"], reference="fp32", command=command, design=design)

    return build


def works(step: NextStep) -> bool:
    """Parse a step with the command that it names; raises where click refuses it."""
    program, name, *rest = shlex.split(step.command)
    COMMANDS[name].make_context(name, rest)
    return program == "ampcompare"


def of_script(arm: str, seed: int, error: str, exit_code: int) -> RunRecord:
    config = RunConfig(
        arm=arm, device="cpu", script=ScriptConfig(name="train.py", arguments=("-x", "{seed}"))
    )
    recipe = config.recipe.model_copy(update={"seed": seed})
    return failed_script_record(config.model_copy(update={"recipe": recipe}), error, exit_code=exit_code)


def test_a_script_that_failed_is_run_in_the_foreground(compared: Any) -> None:
    """One that an arm refused is not: its message says what to do."""
    records = [of_script("fp32", 0, "refused", 2), of_script("apex:O1", 0, "KeyError: 1", 3)]
    comparison = make_comparison(records, arms=["fp32", "apex:O1"], command=TYPED)
    assert [step.command for step in comparison.next_steps if "exec" in step.command] == [
        "ampcompare exec --arm apex:O1 --seed 0 --device cpu train.py -x 0"
    ]


@pytest.mark.parametrize(
    ("error", "others", "is_diagnosed"),
    [
        ("the script ended with exit code 1: Loss is nan, stopping training", "completed", True),
        ("ValueError: matrix contains invalid numeric entries", "completed", True),
        ("AssertionError (train.py:9)", "completed", True),
        ("RuntimeError: loss diverged", "completed", True),
        ("RuntimeError: loss diverged", "failed", False),
        ("Loss is nan, stopping training", "failed", False),
        ("KeyError: 'infer'", "completed", False),
    ],
)
def test_a_script_that_ends_itself_at_a_number_is_diagnosed(
    error: str, others: Any, is_diagnosed: bool
) -> None:
    """Where it trains under another arm."""
    fine = of_script("fp32", 0, "", 0).model_copy(update={"status": others})
    records = [fine, of_script("native:fp16", 0, error, 1)]
    typed = "ampcompare compare --device cpu --arm fp32,amp --seeds 0 -- train.py -x"
    comparison = make_comparison(records, arms=["fp32", "native:fp16"], command=typed)
    commands = [step.command for step in comparison.next_steps if "fp16" in step.command]
    assert all(works(step) for step in comparison.next_steps)
    assert commands == [
        "ampcompare diagnose --arm native:fp16 --device cpu -- train.py -x"
        if is_diagnosed
        else "ampcompare exec --arm native:fp16 --seed 0 --device cpu train.py -x 0"
    ]


@pytest.mark.parametrize("was_started", [True, False])
def test_a_log_is_named_where_there_is_one(was_started: bool) -> None:
    """A cell that the preflight refuses has none."""
    record = of_script("apex:O1", 0, "KeyError: 1", 3)
    facts = record.environment if was_started else {"exit_code": 3, NOT_STARTED: True}
    failed = record.model_copy(update={"environment": facts})
    comparison = make_comparison([failed], arms=["apex:O1"], reference="apex:O1", command=TYPED)
    text = " ".join([*(step.why for step in comparison.next_steps), *comparison.reading])
    assert ("log" in text) is was_started


def test_a_script_that_failed_in_a_stack_is_run_there() -> None:
    """Its recorder takes no device."""
    record = of_script("script", 0, "KeyError: 1", 1)
    stack = parse_stacks({"old": "conda run -n apex"})["old"]
    config = record.config.model_copy(update={"stack": stack})
    of_stack = record.model_copy(update={"config": config, "arm": "script@old"})
    comparison = make_comparison([of_stack, of_script("fp32", 0, "KeyError: 1", 1)], command=TYPED)
    commands = [step.command for step in comparison.next_steps if "exec" in step.command]
    assert commands[0] == (
        "ampcompare exec --stack 'old=conda run -n apex python' --arm script@old --seed 0 train.py -x 0"
    )
    assert all(works(step) for step in comparison.next_steps)


CASES: list[dict[str, Any]] = [
    {"correct": [500]},
    {"correct": OPEN[:3]},
    {"correct": OPEN, "command": "ampcompare compare --seeds=0-4"},
    {"correct": FP32, "device": "cpu", "half": "fp16 emulated"},
    {"correct": FP32, "warmup_steps": 90},
    {"correct": FP32, "status": "failed", "error": "e"},
    {"correct": FP32, "status": "diverged"},
    {"correct": FP32, "seconds": 0.005},
    {"correct": OPEN, "design": SequentialDesign(0.04, 0.0, look=1)},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(case))
def test_every_step_is_a_command_that_parses(compared: Any, case: dict[str, Any]) -> None:
    comparison = compared(**case)
    assert comparison.next_steps
    assert all(works(step) and step.why for step in comparison.next_steps)
    assert not any(
        "--margin" in step.command and "--margin 0.5" not in step.command for step in comparison.next_steps
    )


@pytest.mark.parametrize(("arm", "is_explained"), [("half", True), ("script", False)])
def test_a_script_as_it_is_written_needs_no_code(arm: str, is_explained: bool) -> None:
    """Where the fastest arm is the script itself, in another stack, there is nothing to write."""
    records = [make_record("fp32", seed, top1=FP32[seed] / 1000, device="cuda:0") for seed in range(5)]
    records += [
        make_record(arm, seed, top1=FP32[seed] / 1000, device="cuda:0", seconds=0.005) for seed in range(5)
    ]
    steps = summarize(records, arms=["fp32", arm], reference="fp32").next_steps
    assert any(step.command.startswith("ampcompare explain") for step in steps) == is_explained


def test_few_seeds_become_five(compared: Any) -> None:
    (step,) = compared([500]).next_steps
    assert step == NextStep(command=TYPED.replace("0-2", "0-4"), why="for verdicts: 4 more seeds")


def test_no_look_is_left(compared: Any) -> None:
    """Where no look is left more seeds here cannot be tested, so other seeds are a new comparison elsewhere."""
    (step, *_) = compared(OPEN, design=SequentialDesign(0.04, 0.0, look=1)).next_steps
    assert step.command == "ampcompare compare --arm fp32 --arm half --seeds 5-14 --margin 0.5 -o r-again"
    assert step.why.startswith("no look is left at these runs")


@pytest.mark.parametrize(("lr", "lower"), [(0.05, "0.005"), (1e30, "0.1")])
def test_a_diverged_reference_comes_first(lr: float, lower: str) -> None:
    """Its learning rate is the cause; the next one is lower and usual, in a run directory of its own."""
    records = [make_record("fp32", seed, status="diverged") for seed in range(3)]
    config = records[0].config
    optimizer = config.recipe.optimizer.model_copy(update={"lr": lr})
    config = config.model_copy(update={"recipe": config.recipe.model_copy(update={"optimizer": optimizer})})
    records[0] = records[0].model_copy(update={"config": config})
    records += [make_record("half", seed, status="failed", error="overflow") for seed in range(3)]
    first, second = make_comparison(records, arms=["fp32", "half"], command=TYPED).next_steps
    assert first.command == f"{TYPED}-lr-{lower} --lr {lower}"
    assert second.command == "ampcompare doctor --for half"
    assert works(first)


@pytest.mark.parametrize(
    ("at", "command"),
    [
        (3, "ampcompare diagnose --arm half --device cpu --shift-seeds --seed 1 -- train.py --lr 1"),
        (
            20,
            "ampcompare diagnose --arm half --device cpu --shift-seeds --seed 1 --steps 22 -- train.py --lr 1",
        ),
        (4000, "ampcompare explain half"),
    ],
)
def test_a_script_that_diverges_early_is_to_be_diagnosed(at: int, command: str) -> None:
    """That names the place and tries cures; a late divergence is not in the steps that it watches."""
    records = [make_record("fp32", seed) for seed in range(3)]
    lost = [make_record("half", seed, status="diverged" if seed else "completed") for seed in range(3)]
    records += [
        one.model_copy(
            update={
                "summary": one.summary.model_copy(update={"diverged_step": at + one.config.recipe.seed - 1})
            }
        )
        for one in lost
    ]
    typed = "ampcompare compare --arm fp32,half --device=cpu --seeds 0-2 --shift-seeds -- train.py --lr 1"
    steps = make_comparison(records, arms=["fp32", "half"], command=typed).next_steps
    (step,) = [one for one in steps if "diagnose" in one.command or "explain" in one.command]
    assert step.command == command
    assert works(step)


def test_a_script_whose_steps_are_skipped_is_to_be_diagnosed() -> None:
    """The arm that skips the most; fewer than half settle a loss scale."""
    records = [make_record("fp32", seed) for seed in range(3)]
    records += [make_record("native:fp16", seed, skipped_steps=60 + seed) for seed in range(3)]
    records += [make_record("half", seed, skipped_steps=40) for seed in range(3)]
    typed = "ampcompare compare --arm fp32,native:fp16,half --seeds 0-2 -- train.py"
    steps = make_comparison(records, arms=["fp32", "native:fp16", "half"], command=typed).next_steps
    (step,) = [one for one in steps if "diagnose" in one.command]
    assert step.command == "ampcompare diagnose --arm native:fp16 --seed 2 -- train.py"
    assert works(step)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ampcompare run",
        "a; b",
        "ampcompare 'compare",
        "ampcompare compare -o a; ampcompare compare -o b",
    ],
)
def test_other_commands_are_not_edited(text: str) -> None:
    """What is no single compare gives no command."""
    assert CompareCommandLine.parse(text) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--seeds 0-2 -q", "--seeds 0-4 -q"),
        ("--seeds=0-2 -q", "--seeds 0-4 -q"),
        ("-q", "-q --seeds 0-4"),
        ("--seeds 0 -q --seeds=1", "--seeds 0-4 -q"),
        ("--tag 'two words' --seeds 0-2", "--tag 'two words' --seeds 0-4"),
        ("--seeds 0 -- train.py --seeds 3", "--seeds 0-4 -- train.py --seeds 3"),
    ],
)
def test_an_option_is_replaced_in_its_place(options: str, expected: str) -> None:
    """An option has its new value where it stood, or at the end, but before a script."""
    typed = CompareCommandLine.parse(f"ampcompare compare {options}")
    assert typed is not None
    assert str(typed.with_option("--seeds", "0-4")) == f"ampcompare compare {expected}"


@pytest.mark.parametrize("written", ["-o r", "--output-dir r", "--output-dir=r", "-o r/"])
def test_another_folder(written: str) -> None:
    """Every way to write the run directory is found."""
    typed = CompareCommandLine.parse(f"ampcompare compare {written} --lr 0.1")
    assert typed is not None
    other = typed.with_own_run_directory("gpu", same_recipe=True).with_option("--lr", "0.2")
    assert str(other) == "ampcompare compare -o r-gpu --lr 0.2"


@pytest.mark.parametrize(
    ("function", "arguments", "is_shifted"),
    [
        ("torch.manual_seed", (), True),
        ("torch.manual_seed", ("--seed", "{seed}"), False),
        ("numpy.random.seed", (), False),
    ],
)
def test_more_seeds_of_a_script_that_fixes_its_seed_are_shifted(
    function: str, arguments: tuple[str, ...], is_shifted: bool
) -> None:
    """Else they would all be one run."""
    call = SeedCall(place="train.py:3", function=function, seed="0")
    records = [of_script(arm, 0, "", 0) for arm in ("fp32", "half")]
    script = ScriptConfig(name="train.py", arguments=arguments)
    records = [
        make_record(one.arm, 0).model_copy(
            update={
                "config": one.config.model_copy(update={"script": script}),
                "script": ScriptFacts(seeds=[call]),
            }
        )
        for one in records
    ]
    typed = "ampcompare compare --arm fp32,half --seeds 0 -- train.py"
    (step,) = [
        step
        for step in make_comparison(records, arms=["fp32", "half"], command=typed).next_steps
        if "seeds" in step.why
    ]
    assert step.command.startswith("ampcompare compare --arm fp32,half --seeds 0-4")
    assert ("--shift-seeds -- train.py" in step.command) == is_shifted
    assert works(step)


@pytest.mark.parametrize("both", [True, False])
def test_where_the_reference_diverges_too_precision_is_not_blamed(both: bool) -> None:
    """The diagnosis says what is not finite, in fp32 as well."""
    bad = {"status": "diverged", "diverged_step": 1}
    records = [
        make_record(arm, seed, **(bad if both or arm == "half" else {}))
        for arm in ("fp32", "half")
        for seed in range(3)
    ]
    script = ScriptConfig(name="train.py")
    records = [
        one.model_copy(update={"config": one.config.model_copy(update={"script": script})}) for one in records
    ]
    typed = "ampcompare compare --arm fp32,half --device=cpu --seeds 0-2 -- train.py"
    steps = make_comparison(records, arms=["fp32", "half"], command=typed).next_steps
    (step,) = [one for one in steps if "diagnose" in one.command]
    assert ("fp32 diverges too" in step.why) == both


@pytest.mark.parametrize("correct", [OPEN, OPEN[:2]])
@pytest.mark.parametrize("is_tied", [False, True])
def test_no_seeds_are_advised_where_equal_numbers_are_compared(
    compared: Any, correct: Sequence[int], is_tied: bool
) -> None:
    """No number of seeds tells a difference of the ranking from one of the weights."""
    facts = ScriptFacts(equal_numbers=["train.py:41"] if is_tied else [])
    records = [one.model_copy(update={"script": facts}) for one in compared(correct).records]
    found = summarize(records, arms=["fp32", "half"], reference="fp32", command=TYPED)
    assert any("more seeds" in step.why for step in found.next_steps) != is_tied
    assert any("at any number of seeds" in text for text in found.headline) == is_tied
