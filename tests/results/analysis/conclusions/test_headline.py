"""The headline: the right sentence within five lines for each kind of comparison, and what it never claims."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ampcompare.results.analysis.conclusions.headline import warnings_and_answer
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.inference.verdict import SequentialDesign
from ampcompare.results.analysis.results_table import judge_arms, read_table
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison, Look
from ampcompare.results.records.ledger import GroupTypes, Ledger
from ampcompare.results.records.metric import Metric
from ampcompare.results.records.run import RunRecord, ScriptFacts
from ampcompare.testing import make_record

WIDTH = 100
FP32 = [500, 520, 490, 510, 505]  # right of 1,000, by seed
EQUAL = [501, 519, 491, 509, 506]
WORSE = [400, 440, 410, 400, 430]


@pytest.fixture
def runs() -> Callable[..., list[RunRecord]]:
    """Build the runs of one arm, one for each number of images that are classified correctly."""

    def build(arm: str, correct: Sequence[int], *, seconds: float = 0.01, **values: Any) -> list[RunRecord]:
        timed = {"device": "cuda:0", "peak_bytes": 1000, **values}
        return [
            make_record(arm, seed, top1=right / 1000, seconds=seconds * (1 + 0.002 * (seed % 3)), **timed)
            for seed, right in enumerate(correct)
        ]

    return build


def compare(*arms: Sequence[RunRecord], command: str = "ampcompare compare", **keywords: Any) -> Comparison:
    names = list(dict.fromkeys(record.arm for records in arms for record in records))
    flat = [record for records in arms for record in records]
    return summarize(flat, arms=names, reference=names[0], command=command, **keywords)


def first_lines(comparison: Comparison) -> str:
    """Return the first five lines of a terminal of 100 columns, joined."""
    lines = [line for sentence in comparison.headline for line in textwrap.wrap(sentence, WIDTH)]
    return " ".join(lines[:5])


def test_a_clear_winner(runs: Any) -> None:
    """The first sentence says what to use, what it keeps and what it saves."""
    comparison = compare(runs("fp32", FP32), runs("half", EQUAL, seconds=0.005, peak_bytes=600))
    assert comparison.headline[0] == (
        "Use half: accuracy of fp32 kept (Δ +0.02 pp, within ±0.5), 0.50x (0.50 to 0.50) its step time, 40 % less peak "
        "memory."
    )
    assert comparison.headline[1:] == []
    assert not any("recommended" in line for line in comparison.reading)
    assert comparison.next_steps[0].command == "ampcompare explain half"


@pytest.mark.parametrize(("skipped", "is_said"), [(51, True), (50, False), (100, False)])
def test_an_arm_that_skips_most_steps_is_named_first(runs: Any, skipped: int, is_said: bool) -> None:
    """Whatever noise hides; all steps are another sentence."""
    half = runs("native:fp16", WORSE, skipped_steps=skipped, final_loss_scale=1e-13)
    sentence = (
        f"native:fp16 skipped {skipped} of 100 steps, down to a loss scale of 1e-13: it hardly trained."
    )
    assert (sentence in compare(runs("fp32", FP32), half).headline) == is_said
    assert not is_said or compare(runs("fp32", FP32), half).headline[0] == sentence


def test_divergence_has_its_proven_cause(runs: Any) -> None:
    """That Adam's eps is 0 in fp16 is said of arms that train fp16 weights, and of no other arm or cause."""
    bad = {"status": "diverged", "diverged_step": 1, "divergence": "non-finite weights"}
    arms = [with_adam(runs(arm, FP32[:3], **bad)) for arm in ("half", "apex:O3")]
    comparison = compare(with_adam(runs("fp32", FP32[:3])), with_adam(runs("native:fp16", EQUAL[:3])), *arms)
    assert (
        "half and apex:O3 diverged in 3 of 3 seeds at step 1: Adam's eps of 1e-08 is 0 in fp16 "
        "(docs/examples/divergence.md)." in comparison.headline
    )
    assert "half and apex:O3 diverged" in first_lines(comparison)
    assert any("--eps 1e-4" in step.command for step in comparison.next_steps)


def test_a_script_that_diverged_by_its_metric_alone_has_that_as_its_cause(runs: Any) -> None:
    bad = [
        one.model_copy(update={"script": ScriptFacts()})
        for one in runs("half", FP32[:3], status="diverged", diverged_step=9, divergence="the last r2 is nan")
    ]
    found = compare(runs("fp32", FP32[:3]), bad).headline
    assert (
        "half diverged in 3 of 3 seeds at step 9: the last r2 is nan, though all losses are finite." in found
    )


@pytest.mark.parametrize("share", [0.25, 0.0])
def test_a_script_whose_optimizer_divides_by_zero_has_that_as_its_cause(runs: Any, share: float) -> None:
    """Where that was seen; its eps is in the script, and no option of the command."""
    group = GroupTypes(name="AdamW 0", state={"fp16": 1.0}, eps=1e-8, zero_eps=True)
    facts = {"script": ScriptFacts(), "ledger": Ledger(groups=[group], zero_denominators=share)}
    bad = [
        one.model_copy(update=facts)
        for one in runs("half", FP32[:3], status="diverged", diverged_step=9, divergence="non-finite weights")
    ]
    found = compare(runs("fp32", FP32[:3]), bad, command="ampcompare compare --arm fp32,half -- train.py")
    known, unknown = "AdamW's eps of 1e-08 is 0 in fp16 (docs/examples/divergence.md)", "non-finite weights"
    why = known if share else f"{unknown}, though all losses are finite"
    assert f"half diverged in 3 of 3 seeds at step 9: {why}." in found.headline
    commands = [step.command for step in found.next_steps]
    advised = "ampcompare compare --arm fp32,half --arm half:masters=fp32 -- train.py"
    assert (advised in commands) == bool(share)
    assert not any("--eps" in command for command in commands)


@pytest.mark.parametrize(
    ("arm", "optimizer", "step"),
    [
        ("half", {"name": "sgd"}, 1),
        ("half", {"name": "adam", "eps": 1e-7}, 1),
        ("half", {"name": "adam"}, 40),
        ("half", {"name": "adam", "implementation": "fused"}, 1),
        ("half:bf16", {"name": "adam"}, 1),
        ("half:masters=fp32", {"name": "adam"}, 1),
        ("apex:O2", {"name": "adam"}, 1),
        ("native:fp16", {"name": "adam"}, 1),
    ],
)
def test_no_cause_without_proof(runs: Any, arm: str, optimizer: dict[str, Any], step: int) -> None:
    """Another optimizer, eps, kind of weights or a late step prove nothing, so no cause is named."""
    records = with_adam(runs(arm, FP32[:3], status="diverged", diverged_step=step), **optimizer)
    comparison = compare(runs("fp32", FP32[:3]), records)
    assert f"{arm} diverged in 3 of 3 seeds at step {step}." in comparison.headline


@pytest.mark.parametrize(
    ("summary", "cause"),
    [
        ({"first_nonfinite_loss_step": 0}, "the loss is not finite before the first update"),
        (
            {"final_loss_scale": 2.0**-6, "skipped_steps": 22},
            "gradients overflow at any loss scale, down to 0.0156",
        ),
    ],
)
def test_other_proven_causes(runs: Any, summary: dict[str, Any], cause: str) -> None:
    """A first loss that is not finite, and a loss scale that fell below 1, are named."""
    comparison = compare(runs("fp32", FP32), runs("native:fp16", FP32[:2], status="diverged", **summary))
    assert (
        f"native:fp16 diverged in 2 of 2 seeds at step 7: {cause} (docs/troubleshooting.md)."
        in comparison.headline
    )


def test_lost_statistics_are_a_proven_cause(runs: Any) -> None:
    """A step that is skipped keeps what its forward pass wrote into a batch norm: the weights are as they should be."""
    script = ScriptFacts(lost_statistics=["1 (BatchNorm1d)"])
    lost = [
        one.model_copy(update={"script": script}) for one in runs("native:fp16", FP32[:2], status="diverged")
    ]
    assert any(
        "at step 7: running statistics of 1 (BatchNorm1d) are not finite, though the weights are: a forward"
        in line
        for line in compare(runs("fp32", FP32), lost).headline
    )


def test_lost_statistics_of_completed_runs_are_a_remark(runs: Any) -> None:
    """The step was skipped, and each loss was finite: only an evaluation would show it."""
    script = ScriptFacts(lost_statistics=["1 (BatchNorm1d)"])
    lost = [one.model_copy(update={"script": script}) for one in runs("native:fp16", FP32[:2])]
    comparison = compare(runs("fp32", FP32[:2]), lost)
    said = [line for line in comparison.reading if "running statistics of 1 (BatchNorm1d)" in line]
    assert [line.partition(":")[0] for line in said] == ["native"]


def test_lost_statistics_count_before_a_first_loss_that_is_not_finite(runs: Any) -> None:
    """The step of that loss was skipped, and the losses behind it were finite."""
    script = ScriptFacts(lost_statistics=["1 (BatchNorm1d)"])
    lost = [
        one.model_copy(
            update={
                "script": script,
                "summary": one.summary.model_copy(update={"first_nonfinite_loss_step": first}),
            }
        )
        for first, one in enumerate(runs("native:fp16", FP32[:2], status="diverged"))
    ]
    assert any(
        "running statistics of 1 (BatchNorm1d)" in line for line in compare(runs("fp32", FP32), lost).headline
    )


def with_adam(records: Sequence[RunRecord], **values: Any) -> list[RunRecord]:
    found = []
    for record in records:
        optimizer = record.config.recipe.optimizer.model_copy(update={"name": "adam", **values})
        recipe = record.config.recipe.model_copy(update={"optimizer": optimizer})
        found.append(
            record.model_copy(update={"config": record.config.model_copy(update={"recipe": recipe})})
        )
    return found


def test_untrained(runs: Any) -> None:
    """Where the reference learned nothing there is no verdict and no recommendation, however equal the arms are."""
    comparison = compare(
        runs("fp32", [102] * 5, majority=102),
        runs("half", [102] * 5, majority=102, seconds=0.005),
        command=COMMAND,
    )
    assert comparison.headline[0] == (
        "Nothing to compare: fp32 learned nothing (top-1 10.2 %, chance 10.2 %)."
    )
    assert not {"Use", "keeps", "keep"} & set(" ".join(comparison.headline).split())
    assert "--epochs 15" in comparison.next_steps[0].command


COMMAND = "ampcompare compare --arm fp32 --arm half --seeds 0-4"


END = "(a/train.py:3); let it name another file"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("OSError: no\nfile at all (train.py:3).", "OSError: no file at all (train.py:3)."),
        (f"OSError: {'word ' * 400}{END}", f"OSError: {'word ' * 18}…{'word ' * 32}{END}."),
    ],
)
def test_an_error_ends_with_its_place_and_remedy(runs: Any, error: str, shown: str) -> None:
    """However long it is: what is left out is in the middle."""
    comparison = compare(runs("fp32", FP32), runs("half", EQUAL, status="failed", error=error))
    assert f"half failed in 5 of 5 seeds: {shown}" in comparison.headline


def test_missing_cells(runs: Any) -> None:
    """A matrix that is not complete was not tested: nothing is claimed, and the same command continues."""
    order = [f"{arm}@{seed}" for seed in range(5) for arm in ("fp32", "half")]
    comparison = compare(
        runs("fp32", FP32),
        runs("half", WORSE[:3]),
        order=order,
        design=SequentialDesign(0.0, 0.0),
        command=COMMAND,
    )
    assert comparison.headline[0] == "No verdicts yet: 2 of 10 runs are missing."
    assert not any("Use" in line or "keep" in line or "accurate" in line for line in comparison.headline)
    (step,) = comparison.next_steps
    assert (step.command, step.why) == (COMMAND, "finish the 2 missing runs; the others are kept")


def test_what_weakens_the_rest_stands_first(runs: Any) -> None:
    """Records that are not used, and in older reports terms that were changed between looks."""
    change = "margin 3 pp instead of 0.5 pp"
    look = Look(
        number=2, error_rate=0.005, reference="fp32", arms=["fp32", "half"], seeds=[0], cells={}, margin=3,
        time_margin=0.02, changes=[change],
    )  # fmt: skip
    design = SequentialDesign(look=2, looks=(look,))
    comparison = compare(
        runs("fp32", FP32), runs("half", EQUAL, seconds=0.005), design=design, excluded=["a: bad"]
    )
    assert comparison.headline[:2] == [
        f"Changed after runs were seen: {change}.",
        "1 record is not used; the details have the reason.",
    ]
    assert comparison.headline[2].startswith("Use half")
    assert "Not used: a: bad." in comparison.reading
    assert warnings_and_answer(comparison) == (comparison.headline[:2], comparison.headline[2:])


def test_a_conditional_verdict_recommends_nothing(runs: Any) -> None:
    half = runs("half", EQUAL, seconds=0.005)
    half[4] = make_record("half", 4, status="failed", error="out of memory", device="cuda:0")
    comparison = compare(runs("fp32", FP32), half)
    assert comparison.headline[0] == (
        "half is equivalent (±0.5) only on the 4 of 5 seeds that both it and fp32 completed, so it is not recommended."
    )


def identical_runs(arm: str) -> list[RunRecord]:
    """Return runs that end with the same weights after the same losses, whatever the arm."""
    return [
        make_record(arm, seed, top1=right / 1000, device="cuda:0", losses=f"{seed}", weights_sha256=f"{seed}")
        for seed, right in enumerate(FP32)
    ]


SIX = ("apex:O1", "apex:O2", "apex:O3", "half", "native:fp16", "native:bf16")


def test_an_identical_arm_is_no_exception_to_those_that_keep_the_accuracy(runs: Any) -> None:
    others = [runs(arm, WORSE if arm == "half" else EQUAL) for arm in SIX]
    comparison = compare(identical_runs("fp32"), identical_runs("apex:O0"), *others)
    assert comparison.headline[0].startswith(
        "All but half keep fp32's accuracy (Δ +0.00 to +0.02 pp, within ±0.5); "
    )
    assert comparison.headline[1].startswith("half (Δ -8.90 pp, ")


def test_each_group_of_unknown_speeds_has_one_reason(runs: Any) -> None:
    """Emulated arms and invalid measurements are two groups; several reasons of one group are one example."""
    comparison = compare(
        runs("fp32", FP32, device="cpu"),
        runs("half", EQUAL, device="cpu", half="fp16 emulated"),
        runs("apex:O1", EQUAL, device="cpu", warmup_steps=80),
        runs("apex:O2", EQUAL, device="cpu", warmup_steps=85),
    )
    (line,) = [line for line in comparison.headline if line.startswith("Speed")]
    assert line == (
        "Speed of half is not known: fp16 is emulated on this CPU, measure on a GPU; "
        "of apex:O1 and apex:O2: the measurement was invalid (such as 20 timed steps, 30 needed)."
    )


def test_an_open_result_names_the_seeds_that_settle_it(runs: Any) -> None:
    half = [510, 511, 503, 498, 517]
    comparison = compare(runs("fp32", FP32), runs("half", half), command=COMMAND, terms=Terms(margin=0.5))
    assert comparison.headline[0].startswith(
        "Inconclusive for half: the interval reaches beyond the margin of ±0.5 pp (Δ +0.28 pp, "
    )
    word = str(comparison.arms[1].quality)
    more = int(word.split("≤")[1].split()[0])
    assert (
        comparison.next_steps[0].command == f"ampcompare compare --arm fp32 --arm half --seeds 0-{4 + more}"
    )
    assert f"{more} more seeds at most" in comparison.next_steps[0].why


def test_the_only_arm(runs: Any) -> None:
    assert compare(runs("half", EQUAL[:1])).headline == [
        "half reached 50.10 % top-1 in one seed; there is no other arm to compare it with."
    ]


def test_a_judged_metric_where_less_is_better() -> None:
    """The better arm of a word error rate has the lower one."""
    table = read_table("arm,WER\nfp32,10.0\nhalf,8.0\nslow,9.0\n", better="lower")
    assert (
        judge_arms(table, sd=0.05, terms=Terms(margin=0.5, prefer="accuracy"))
        .headline[0]
        .startswith("Use half: better WER than fp32 (Δ -2.0, -2.2 to -1.8).")
    )


@pytest.mark.parametrize(
    ("correct", "is_tied", "is_said"), [(FP32, True, False), (WORSE, True, True), (WORSE, False, False)]
)
def test_a_difference_of_an_evaluation_with_equal_numbers_is_doubted(
    runs: Any, correct: Sequence[int], is_tied: bool, is_said: bool
) -> None:
    """Whichever of the two has the higher values; and no arm is recommended for such a difference."""
    facts = ScriptFacts(equal_numbers=["train.py:41"] if is_tied else [])
    said = (
        "The evaluation of half compares numbers of which many are equal in 16 bits (train.py:41), so the difference "
        "in accuracy may be that of the ranking and not of the weights, at any number of seeds."
    )
    for reference, other in ((FP32, correct), (correct, FP32)):
        records = [one.model_copy(update={"script": facts}) for one in runs("half", other)]
        found = compare(runs("fp32", reference), records, terms=Terms(margin=0.5, prefer="accuracy"))
        assert (found.headline[0] == said) == is_said
        is_better = found.arms[1].quality.kind == "better"
        assert any(text.startswith("Use half") for text in found.headline) == (is_better and not is_tied)
        why = "the difference of half in accuracy may be that of a ranking of equal numbers"
        assert any(why in text for text in found.reading) == (is_better and is_tied)


def test_equal_numbers_take_the_place_of_the_doubt_in_the_direction() -> None:
    """They explain that the metric and the training loss differ in opposite ways."""
    records = [
        make_record(
            arm,
            seed,
            top1=0.5 + 0.001 * (seed % 3) + (0.4 if arm == "half" else 0),
            loss_tail=2.0 if arm == "half" else 1.0,
        )
        for arm in ("fp32", "half")
        for seed in range(6)
    ]
    for place in ([], ["train.py:41"]):
        facts = ScriptFacts(equal_numbers=place)
        tied = [one.model_copy(update={"script": facts}) for one in records]
        found = summarize(tied, arms=["fp32", "half"], reference="fp32", terms=Terms(margin=0.5)).headline
        assert any("contradicts" in text for text in found) != any(
            "equal in 16 bits" in text for text in found
        )
        assert any("The evaluation of fp32 and half compares" in text for text in found) == bool(place)


def test_a_training_loss_is_not_of_an_evaluation_with_equal_numbers(runs: Any) -> None:
    """It comes from backward passes."""
    facts = ScriptFacts(equal_numbers=["train.py:41"])
    metric = Metric(name="training loss", better="lower", decimals=4, margin=2.0)
    records = [
        one.model_copy(update={"script": facts, "metrics": [metric]})
        for arm in (runs("fp32", FP32), runs("half", WORSE))
        for one in arm
    ]
    found = summarize(records, arms=["fp32", "half"], reference="fp32")
    assert found.arms[1].equal_numbers == ["train.py:41"]
    assert not any("equal in 16 bits" in text for text in found.headline)


@pytest.mark.parametrize(
    ("top1", "loss", "spread", "is_said"),
    [
        (0.9, 2.0, 1e-4, True),  # better, and worse
        (0.9, 0.5, 1e-4, False),
        (0.9, 1.005, 1e-4, True),  # the loss is inside its margin
        (0.503, 2.0, 1e-4, True),  # the metric is
        (0.503, 1.005, 1e-4, False),  # neither matters
        (0.9, 1.02, 0.05, False),  # the loss may differ by chance
        (0.1, 0.5, 1e-4, True),  # worse, with lower losses
    ],
)
def test_a_metric_that_the_training_loss_contradicts(
    top1: float, loss: float, spread: float, is_said: bool
) -> None:
    """An arm that is better in one and worse in the other is named, by tests: the direction may be wrong."""
    noise = (0.0, 1.0, -1.0, 0.6, -0.6)
    records = [
        make_record(
            arm, seed, top1=mean + seed / 1000 + by * seed / 1e5, loss_tail=tail * (1 + by * spread * noise[seed]),
            loss_tail_steps=20,
        )
        for by, arm, mean, tail in ((0, "fp32", 0.5, 1.0), (1, "half", top1, loss))
        for seed in range(5)
    ]  # fmt: skip
    found = summarize(records, arms=["fp32", "half"], reference="fp32", terms=Terms(margin=0.5))
    direction = "higher losses, but is better" if loss > 1 else "lower losses, but is worse"
    said = "The training loss at the end contradicts top-1, of which larger values are taken for the better ones: half"
    assert any(f"{said} has {direction} in that" in sentence for sentence in found.headline) == is_said
    assert found.arms[1].loss_contradicts == is_said
