"""Why the seeds of a script give one run: what decides first weights and batches, and what helps."""

from typing import Any

import pytest

from ampcompare.results.analysis.pairing.seeding import seed_shift_sentences, why_seeds_are_one_run
from ampcompare.results.records.run import RunRecord, ScriptFacts, SeedCall
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe
from ampcompare.settings.script import ScriptConfig

OWN = {"place": "train.py:3", "function": "torch.Generator", "kind": "own", "seed": "7"}
STATE = {"place": "train.py:4", "function": "torch.set_rng_state", "kind": "state"}
DIRECT = {"place": "", "function": "torch.default_generator.manual_seed", "kind": "state"}


@pytest.mark.parametrize(
    ("shift", "calls", "said", "unsaid"),
    [
        (
            None,
            [],
            "come from files, fixed numbers or generators of its own, which --shift-seeds all shifts",
            "state",
        ),
        (None, [DIRECT], "come from torch's generator, which a method of its own seeds", "state"),
        (
            "global",
            [OWN, STATE],
            "of its own, torch.Generator(7) in train.py:3, which --shift-seeds all shifts",
            "",
        ),
        (
            "all",
            [STATE],
            "a generator whose state is set (torch.set_rng_state in train.py:4), files or fixed",
            "own",
        ),
        (
            "global",
            [DIRECT],
            "torch's generator, which a method of its own seeds (torch.default_generator",
            "set (",
        ),
        ("global", [], "which come from files or fixed numbers in a fixed order", "generator of"),
    ],
)
def test_why_seeds_give_one_run(shift: Any, calls: list[dict[str, Any]], said: str, unsaid: str) -> None:
    script = ScriptConfig(name="train.py", arguments=(), shift_seeds=shift)
    why = why_seeds_are_one_run(script, ScriptFacts(seeds=[SeedCall.model_validate(call) for call in calls]))
    assert said in why
    assert not unsaid or unsaid not in why


def test_a_generator_that_a_library_seeds_with_a_drawn_number_is_not_called_unshifted() -> None:
    """In ranks Accelerate seeds the generator of a sampler by a number of the global one, which the seed decides."""
    drawn = ["651", "98"]
    sampler = {"place": "train.py:9", "function": "torch.Generator", "kind": "own"}
    records = []
    for seed, number in enumerate(drawn):
        script = ScriptConfig(name="train.py", arguments=(), shift_seeds="global")
        config = RunConfig(arm="script", script=script, recipe=Recipe(seed=seed))
        seeds = [SeedCall.model_validate(call) for call in (OWN, {**sampler, "seed": number})]
        facts = ScriptFacts(seeds=seeds)
        records.append(
            RunRecord(cell=config.digest(), arm="script", status="completed", config=config, script=facts)
        )
    (_, left) = seed_shift_sentences(records)
    assert left.startswith(
        "Not shifted, in all seeds as written: torch.Generator(7) in train.py:3; --shift-seeds all"
    )
