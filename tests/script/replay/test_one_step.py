"""A step that is kept and repeated: mistakes are named where they are, and harmless changes are noise."""

from __future__ import annotations

import pytest
import torch

from tests.script.replay.steps import (
    CONVOLUTIONS,
    MISTAKES,
    REWRITES,
    SETTINGS,
    TRANSFORMER,
    Mistake,
    Sides,
)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sides]:
    folder = tmp_path_factory.mktemp("steps")
    return {
        script: Sides(script, folder / f"{step}.pt", step) for step, script in ((3, TRANSFORMER), (2, CONVOLUTIONS))
    }


@pytest.mark.parametrize("script", [TRANSFORMER, CONVOLUTIONS], ids=["transformer", "convolutions"])
def test_a_step_is_repeated_to_the_bit(script: str, sides: dict[str, Sides]) -> None:
    """Every module is judged, and the loss is that of the training."""
    base, found = sides[script].base, sides[script].judge(script)
    assert (found.answer, found.exit_code, found.unjudged, found.notes) == ("noise", 0, {}, [])
    assert found.modules == len(base.rows) - 1
    assert all(max(one.units.get("fwd", (0.0,))) < 16 for one in found.errors)
    assert any(max(one.units.get("fwd", (0.0,))) > 0.1 for one in found.errors)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_a_mistake_is_named(mistake: Mistake, sides: dict[str, Sides]) -> None:
    changed = mistake.script.replace(mistake.old, mistake.new)
    assert changed != mistake.script
    found = sides[mistake.script].judge(changed)
    assert (found.answer, found.exit_code) == (mistake.answer, 1), found.sentence
    assert mistake.module in found.named, found.sentence
    own = [one for one in found.findings if one.module == mistake.module]
    assert (own[0].answer, mistake.parts in [one.part for one in own]) == (mistake.answer, True), own
    # Nothing else but the same mistake in other blocks.
    kin = {name.rpartition(".")[2] if mistake.module.count(".") > 1 else name.partition(".")[0] for name in found.named}
    assert len(kin) == 1, found.named


@pytest.mark.parametrize("name", REWRITES)
def test_the_same_in_other_words_is_noise(name: str, sides: dict[str, Sides]) -> None:
    script, old, new = REWRITES[name]
    assert old in script
    found = sides[script].judge(script.replace(old, new))
    assert found.answer == "noise", found.findings


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("script", [TRANSFORMER, CONVOLUTIONS], ids=["transformer", "convolutions"])
def test_settings_are_noise(script: str, name: str, sides: dict[str, Sides]) -> None:
    threads = torch.get_num_threads()
    SETTINGS[name]()
    try:
        found = sides[script].judge(script)
    finally:
        torch.set_num_threads(threads)
        torch._C._set_mkldnn_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    assert found.answer == "noise", found.findings
