"""A step that is kept and repeated: mistakes are named where they are, and harmless changes are noise."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from ampcompare.script.replay import one_step
from ampcompare.script.replay.one_step import StepJudged, StepKeeper, StepReplay
from tests.script.replay.steps import (
    CONVOLUTIONS,
    MISTAKES,
    REWRITES,
    SETTINGS,
    TRANSFORMER,
    Mistake,
    Sides,
    watched,
)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sides]:
    folder = tmp_path_factory.mktemp("steps")
    return {
        script: Sides(script, folder / f"{step}.pt", step)
        for step, script in ((3, TRANSFORMER), (2, CONVOLUTIONS))
    }


@pytest.mark.parametrize("script", [TRANSFORMER, CONVOLUTIONS], ids=["transformer", "convolutions"])
def test_a_step_is_repeated_to_the_bit(script: str, sides: dict[str, Sides]) -> None:
    """Every module is judged, and the loss is that of the training."""
    base, found = sides[script].base, sides[script].judge(script)
    assert (found.answer, found.exit_code, found.unjudged, found.notes) == ("noise", 0, {}, [])
    assert found.modules == len(base.rows) - 1
    assert all(max(one.units.get("fwd", (0.0,))) < 16 for one in found.errors)
    assert any(max(one.units.get("fwd", (0.0,))) > 0.1 for one in found.errors)


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake.what.replace(" ", "-"), marks=[pytest.mark.slow] * (number % 3 != 0))
        for number, mistake in enumerate(MISTAKES)
    ],
)
def test_a_mistake_is_named(mistake: Mistake, sides: dict[str, Sides]) -> None:
    changed = mistake.script.replace(mistake.old, mistake.new)
    assert changed != mistake.script
    found = sides[mistake.script].judge(changed)
    assert (found.answer, found.exit_code) == (mistake.answer, 1), found.sentence
    assert mistake.module in found.module_names, found.sentence
    own = [one for one in found.findings if one.module == mistake.module]
    assert (own[0].answer, mistake.parts in [one.part for one in own]) == (mistake.answer, True), own
    # Nothing else but the same mistake in other blocks.
    kin = {
        name.rpartition(".")[2] if mistake.module.count(".") > 1 else name.partition(".")[0]
        for name in found.module_names
    }
    assert len(kin) == 1, found.module_names


def test_a_script_goes_on_to_the_next_backward_pass_at_most(sides: dict[str, Sides]) -> None:
    """Where gradients are left is seen there; an evaluation ends it, and so does the script, without an answer."""
    seen: list[str] = []
    mine, end = sides[TRANSFORMER], "\n    optimizer.step()"
    assert end in TRANSFORMER
    for what, added in (
        ("training", ""),
        ("evaluation", "\n    with torch.no_grad(): net(batch)"),
        ("end", "\n    raise SystemExit"),
    ):
        script = TRANSFORMER.replace(end, f"{end}{added}\n    seen.append({what!r})")
        change = StepReplay(mine.capsule, mine.base.answers, goes_on=True)
        change.install()
        with pytest.raises((StepJudged, SystemExit)):
            exec(compile(script, "train.py", "exec"), {"__name__": "__main__", "seen": seen})
        change.stop_following()
        assert change.is_judged
        left = [row for row in change.rows if (row["module"], row["call"]) == ("(gradients)", 1)]
        assert len(left) == (what == "training")
    assert seen == ["training"]


@pytest.mark.parametrize(
    ("what", "operation", "code"),
    [
        ("no scale in attention", "add", "scores = scores + torch.full"),
        ("a mask that is off by one", "triu", "scores = scores + torch.full"),
        ("a residual of double weight", "mul", "2 *"),
        ("a cast too much", "bfloat16", "x.bfloat16()"),
        ("eps of a norm", "", ""),
    ],
)
def test_the_operation_inside_of_a_module_is_named(
    what: str, operation: str, code: str, sides: dict[str, Sides]
) -> None:
    """The first that differs, with its line; a module of one operation is that."""
    (mistake,) = [one for one in MISTAKES if one.what == what]
    changed = mistake.script.replace(mistake.old, mistake.new)
    found = sides[mistake.script].judge(changed)
    (own,) = [one for one in found.findings if (one.module, one.part) == (mistake.module, "fwd")]
    name, _, place = own.operation.partition(" (")
    assert name == operation, own
    if operation:
        line = int(place.rstrip(")").rpartition(":")[2])
        assert code in changed.split("\n")[line - 1], own
        assert own.finding_text.endswith(f", from {own.operation} on")


@pytest.mark.parametrize("name", REWRITES)
def test_the_same_in_other_words_is_noise(name: str, sides: dict[str, Sides]) -> None:
    script, old, new = REWRITES[name]
    assert old in script
    found = sides[script].judge(script.replace(old, new))
    assert found.answer == "noise", found.findings


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if "threads" in one else one for one in SETTINGS]
)
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


def test_another_generator_is_noise(sides: dict[str, Sides], monkeypatch: pytest.MonkeyPatch) -> None:
    """Some torch draws other dropout from an equal state: it gets the masks of the base, and another share is found."""
    draw = torch.dropout

    def other(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return draw(tensor.flip(0), p, train).flip(0)

    monkeypatch.setattr("torch._VF.dropout", other)
    found = sides[TRANSFORMER].judge(TRANSFORMER)
    assert found.answer == "noise", found.findings
    assert found.notes == ["this torch draws other dropout from the same generator; it gets that of the base"]
    assert (
        sides[TRANSFORMER].judge(TRANSFORMER.replace("Dropout(0.1)", "Dropout(0.2)")).module_names[0]
        == "blocks.0.drop"
    )


def test_without_modes_what_has_dropout_is_not_judged(
    sides: dict[str, Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 1.13 its mask cannot be the one of the type that is trained in; everything else is judged."""
    monkeypatch.setattr(one_step, "TorchFunctionMode", object)
    found = sides[TRANSFORMER].judge(TRANSFORMER)
    assert (found.answer, list(found.findings)) == ("noise", [])
    assert set(found.unjudged.values()) == {"it has dropout, which replay repeats from torch 1.13 on"}
    assert set(found.unjudged) == {"Net", "blocks.0", "blocks.1", "blocks.0.drop", "blocks.1.drop"}
    (mistake,) = [one for one in MISTAKES if one.what == "GELU by tanh"]
    assert (
        sides[TRANSFORMER].judge(mistake.script.replace(mistake.old, mistake.new)).module_names[0]
        == "blocks.0.act"
    )


@pytest.mark.parametrize(("version", "kind"), [((1, 11), int), ((1, 12), torch.Tensor)])
def test_an_optimizer_gets_its_count_of_steps_as_its_torch_keeps_it(
    version: tuple[int, int], kind: type, sides: dict[str, Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tensor its bias correction is one of fp32, and another function."""
    mine = sides[TRANSFORMER]
    monkeypatch.setattr(one_step, "VERSION", version)
    change = watched(TRANSFORMER, StepReplay(mine.capsule, mine.base.answers))
    counts = {type(state["step"]) for state in change.optimizers[0].state.values()}
    assert counts == {kind}


def test_a_script_without_a_seed_gives_another_batch_each_time(tmp_path: Path) -> None:
    """Which is no finding, but a note."""
    other = Sides(CONVOLUTIONS.replace("torch.manual_seed(0)", "torch.seed()"), tmp_path / "capsule.pt", 1)
    found = other.judge(other.script)
    assert "(batch)" not in found.module_names
    assert found.notes[0] == "the script has another batch at this step; seed it, so that targets fit too"


def test_a_step_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcompare.script.replay.one_step.MAX_BYTES", 10_000)
    keeper = watched(CONVOLUTIONS, StepKeeper(str(tmp_path / "capsule.pt"), 1))
    assert "step 1 needs 0 MB of weights, optimizer state and batch, more than 0 MB" in keeper.fault
    assert not list(tmp_path.iterdir())


def test_the_program_is_for_old_pythons() -> None:
    """It imports torch and the standard library, and is read by Python 3.7."""
    tree = ast.parse(Path(one_step.__file__).read_text(encoding="utf-8"), feature_version=(3, 7))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name.partition(".")[0] for name in names} - {"torch", *sys.stdlib_module_names}
