"""Which files take the adapter with a training, and which are rewritten."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.source.migrate.adapter.choice import ORDINARY, choose_rewrite_or_adapter
from tests.source.migrate.ordinary.test_training import BASE, NETWORK, OTHER

LAYER = "from apex.normalization import FusedLayerNorm\n"
OWN = BASE.replace('opt_level="O1"', "opt_level=args.level")


def put(folder: Path, **files: str) -> list[Path]:
    """Write files, by their names; return their paths."""
    paths = [folder / f"{name}.py" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def test_a_training_takes_the_adapter_by_default(tmp_path: Path) -> None:
    """Also an ordinary one, with a line that says so, and what runs with it; a layer alone is rewritten."""
    train, _, layers = put(
        tmp_path,
        train=BASE,
        network=f"from layers import Norm\n{NETWORK}",
        layers=LAYER + "Norm = FusedLayerNorm\n",
    )
    choice = choose_rewrite_or_adapter([train, layers])
    taking = {each.path for plan in choice.plans for each in plan.files if each.takes_adapter}
    assert taking == {train, layers}
    assert choice.reasons[train] == ORDINARY
    assert choice.reasons[layers] == "it runs with train.py, which is not rewritten"
    assert not choose_rewrite_or_adapter([train], rewritten="ordinary").reasons
    for path in (train, tmp_path / "network.py"):
        path.unlink()
    (alone,) = choose_rewrite_or_adapter([layers]).rewritten
    assert alone.is_changed


def test_all_that_runs_with_a_training_follows_it(tmp_path: Path) -> None:
    """A layer in a file that it imports; the scripts next to it that do without keep their own way."""
    paths = put(tmp_path, a=OWN, b=BASE, network=LAYER + NETWORK, net=NETWORK)
    choice = choose_rewrite_or_adapter(paths, rewritten="ordinary")
    assert {path.stem for path in choice.reasons} == {"a", "network"}
    assert choice.reasons[paths[2]] == "it runs with a.py, which is not rewritten"
    assert [each.path.stem for each in choice.rewritten if each.is_changed] == ["b"]
    assert [each.path for each in choice.adapters] == [tmp_path / "torch_amp_adapter.py"]
    assert choice.reason_lines()[0].startswith(
        f"{paths[0]} takes the adapter: line 58: amp.initialize gets opt_level=args.level"
    )


def test_a_file_that_no_training_is_seen_to_reach_is_next_to_one_that_takes_the_adapter(
    tmp_path: Path,
) -> None:
    (other, _, layer) = put(tmp_path, a=OWN, network=NETWORK, layer=f"{LAYER}layer = FusedLayerNorm(4)\n")
    choice = choose_rewrite_or_adapter([other, layer], rewritten="ordinary")
    assert choice.reasons[layer] == "a.py next to it does, and whether they run together is not seen"
    assert not choose_rewrite_or_adapter([layer], rewritten="ordinary").reasons


def test_files_without_a_training_are_rewritten(tmp_path: Path) -> None:
    (layer,) = put(tmp_path, layer=LAYER)
    choice = choose_rewrite_or_adapter([layer], rewritten="ordinary")
    assert not choice.reasons
    assert [each.is_changed for each in choice.rewritten] == [True]


@pytest.mark.parametrize(
    ("question", "asks"),
    [
        ("isinstance(m, (nn.Linear, nn.LayerNorm))", True),
        ("isinstance(m, nn.modules.normalization.LayerNorm)", True),
        ("type(m) is nn.LayerNorm", True),
        ("isinstance(m, nn.Linear)", False),
        ("isinstance(m, FusedLayerNorm)", False),
        ("nn.LayerNorm(4)(m)", False),
    ],
)
def test_a_layer_that_is_none_of_torch_is_rewritten_only_where_nothing_asks_for_that(
    tmp_path: Path, question: str, asks: bool
) -> None:
    """Torch's LayerNorm would be initialized, or left out of the weight decay, where Apex's is not."""
    model = f"{LAYER}class Net:\n    norm = FusedLayerNorm(4)\n"
    begin = f"from torch import nn\nfrom model import FusedLayerNorm\ndef begin(m):\n    return {question}\n"
    layer, _ = paths = put(tmp_path, model=model, train=begin)
    choice = choose_rewrite_or_adapter(paths, rewritten="ordinary")
    assert (layer in choice.reasons) == asks
    (result,) = choose_rewrite_or_adapter([layer], rewritten="all").files
    assert bool(result.num_lines_by_hand) == asks
    if asks:
        (finding,) = result.migration.left_by_hand  # type: ignore[union-attr]
        assert "line 4 of train.py asks for torch's LayerNorm" in finding.message


def test_a_training_over_several_files_takes_the_adapter_in_all(tmp_path: Path) -> None:
    """Where another file is not named, the one that is named says so."""
    paths = put(
        tmp_path, train=BASE.replace("import network", "import network, other"), network=NETWORK, other=OTHER
    )
    assert {path.stem for path in choose_rewrite_or_adapter(paths, rewritten="ordinary").reasons} == {
        "train",
        "other",
    }
    assert (
        "a part of Apex's core is in other.py too"
        in choose_rewrite_or_adapter(paths[:1], rewritten="ordinary").reasons[paths[0]]
    )


@pytest.mark.parametrize(
    ("head", "amp"),
    [
        ("import apex.amp\nimport sys\namp = sys.modules['apex.amp']\n", "amp"),
        ("class Tools:\n    from apex import amp\n", "Tools.amp"),
    ],
    ids=["by sys.modules", "in a class"],
)
def test_an_import_that_is_used_unseen_is_not_dropped(tmp_path: Path, head: str, amp: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        f"{head}model, optimizer = {amp}.initialize(model, optimizer)\n"
        f"with {amp}.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\noptimizer.step()\n",
        encoding="utf-8",
    )
    (result,) = choose_rewrite_or_adapter([file], rewritten="ordinary").files
    assert result.migration is not None
    assert "torch_amp_adapter" in result.migration.text


def test_what_the_adapter_lacks_has_no_reason_to_take_it(tmp_path: Path) -> None:
    """It is left by hand as it is."""
    (path,) = put(
        tmp_path, a="from apex.fp16_utils import FP16_Optimizer\noptimizer = FP16_Optimizer(optimizer)\n"
    )
    choice = choose_rewrite_or_adapter([path], rewritten="ordinary")
    assert not choice.reasons
    assert [each.num_lines_by_hand for each in choice.files] == [1]


def test_a_file_that_shares_its_import_of_apex_says_nothing_of_rewrites_elsewhere(tmp_path: Path) -> None:
    """What a rewrite would leave by hand there is no advice where the adapter is imported."""
    shared = "from apex import amp\n"
    paths = put(
        tmp_path, train=OWN.replace("from apex import amp\n", "from shared import *\n"), shared=shared
    )
    reasons = choose_rewrite_or_adapter(
        [*paths, *put(tmp_path, network=NETWORK)], rewritten="ordinary"
    ).reasons
    assert reasons[paths[1]] in (
        "line 1: a rewrite would leave this by hand: train.py has amp from here",
        "it runs with train.py, which takes the adapter",
    )
    assert "migrate it" not in "".join(reasons.values())


def test_a_file_without_apex_says_where_the_adapter_is_found(tmp_path: Path) -> None:
    """The script imports the training from a folder without `__init__.py`: the adapter lies next to the script."""
    (tmp_path / "engine").mkdir()
    script, trainer = tmp_path / "main.py", tmp_path / "engine" / "trainer.py"
    script.write_text("from engine.trainer import fit\n\nfit()\n", encoding="utf-8")
    trainer.write_text(OWN, encoding="utf-8")
    choice = choose_rewrite_or_adapter([script, trainer], rewritten="ordinary")
    assert [each.path for each in choice.adapters] == [tmp_path / "torch_amp_adapter.py"]


def test_functions_stay_decorated_for_apex_beside_a_script_that_stays_in_another_folder(
    tmp_path: Path,
) -> None:
    """How the script reaches them is not seen."""
    texts = {
        "tools/evaluate.py": "from apex import amp\nif __name__ == '__main__':\n    amp.init()\n",
        "detection/layers/nms.py": "from apex import amp\n@amp.float_function\ndef nms(boxes):\n    return boxes\n",
        "detection/layers/boxes.py": "import detection.layers.nms\n",
        "detection/layers/__init__.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    paths = [tmp_path / name for name in texts]
    for rewritten in ("all", "ordinary"):
        choice = choose_rewrite_or_adapter(paths, rewritten=rewritten, within=[tmp_path])
        results = {each.path.stem: each for each in choice.files}
        assert not results["nms"].is_changed
        (finding,) = results["nms"].migration.left_by_hand  # type: ignore[union-attr]
        assert (
            "evaluate.py stays on Apex, and whether this runs with its casts is not seen" in finding.message
        )
    paths[0].write_text("print('nothing of Apex')\n")
    results = {
        each.path.stem: each
        for each in choose_rewrite_or_adapter(paths, rewritten="ordinary", within=[tmp_path]).files
    }
    assert results["nms"].is_changed


def test_functions_stay_decorated_for_apex_where_a_program_that_runs_them_stays(tmp_path: Path) -> None:
    """Torch's casts act below autocast alone, and a script that stays on Apex has none."""
    layers = "from apex import amp\n@amp.float_function\ndef nms(boxes):\n    return boxes\n"
    evaluate = "from apex import amp\nimport layers\namp.init()\nlayers.nms(1)\n"
    paths = put(tmp_path, layers=layers, train=BASE.replace("import network", "import network, layers"),
                network=NETWORK, evaluate=evaluate)  # fmt: skip
    results = {each.path.stem: each for each in choose_rewrite_or_adapter(paths, rewritten="all").files}
    assert not any(results[each].is_changed for each in ("layers", "train"))
    (finding,) = results["layers"].migration.left_by_hand  # type: ignore[union-attr]
    assert finding.message.startswith("evaluate.py stays on Apex, whose casts")
    (broken,) = put(tmp_path, broken="from apex import amp\nprint 'old'\namp.float_function\n")
    results = {
        each.path.stem: each for each in choose_rewrite_or_adapter([*paths, broken], rewritten="all").files
    }
    assert results["broken"].fault is not None
    assert not results["layers"].is_changed
    paths[3].write_text("import layers\nlayers.nms(1)\n")
    results = {each.path.stem: each for each in choose_rewrite_or_adapter(paths, rewritten="all").files}
    assert all(results[each].is_changed for each in ("layers", "train"))


@pytest.mark.parametrize("rewritten", ["ordinary", "all"])
def test_a_question_for_apex_to_another_package_is_left_by_hand(tmp_path: Path, rewritten: Any) -> None:
    """As of a copy of the Trainer of transformers: fp16 could never be switched on without Apex."""
    text = OWN.replace(
        "from apex import amp\n", "from extras.utils import is_apex_available\nfrom apex import amp\n"
    )
    text += "\nif not is_apex_available():\n    raise ImportError\n"
    paths = put(tmp_path, train=text)
    (result,) = choose_rewrite_or_adapter(paths, rewritten=rewritten).files
    assert result.is_changed
    messages = [each.message for each in result.migration.left_by_hand]  # type: ignore[union-attr]
    assert [
        each for each in messages if each.startswith("extras.utils.is_apex_available asks for the installed")
    ]
    (tmp_path / "extras").mkdir()
    (tmp_path / "extras" / "utils.py").write_text(
        "def is_apex_available():\n    return True\n", encoding="utf-8"
    )
    (result,) = choose_rewrite_or_adapter(paths, rewritten=rewritten).files
    messages = [each.message for each in result.migration.left_by_hand]  # type: ignore[union-attr]
    assert not [each for each in messages if "is_apex_available" in each]


def test_what_lies_next_to_a_training_that_stays_is_said_to(tmp_path: Path) -> None:
    """No file is said to take the adapter that stays on Apex."""
    train = f"from apex.contrib.optimizers import FP16_Optimizer\n{OWN}FP16_Optimizer(optimizer)\n"
    layer = "from apex.normalization import FusedLayerNorm\nnorm = FusedLayerNorm(4)\n"
    choice = choose_rewrite_or_adapter(put(tmp_path, train=train, layers=layer), rewritten="ordinary")
    (reason,) = choice.reasons.values()
    assert reason == "train.py next to it is not rewritten, and whether they run together is not seen"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ('opt_level="O1"', "opt_level=args.level", ["amp.initialize gets opt_level=args.level"]),
        (
            "import torch\n",
            "import mylib\nimport torch\n",
            ["this line imports mylib, and what it does with networks or gradients is not read"],
        ),
        (
            "import torch\n",
            "import mylib\nimport torch\ntorch.set_default_dtype(torch.float32)\n",
            ["this line imports mylib", "this line names set_default_dtype"],
        ),
    ],
    ids=["ordinary", "level by an option", "package", "two words"],
)
def test_a_rewrite_notes_what_the_text_does_not_prove(
    tmp_path: Path, old: str, new: str, expected: list[str]
) -> None:
    """An ordinary training has no note, and of another one the questions behind the first are asked too."""
    (path, _) = paths = put(tmp_path, train=BASE.replace(old, new, 1), network=NETWORK)
    result = next(
        each for each in choose_rewrite_or_adapter(paths, rewritten="all").files if each.path == path
    )
    assert result.migration is not None
    assert result.takes_adapter is False
    assert result.is_changed
    notes = [each.message for each in result.migration.findings if "does not prove" in each.message]
    assert len(notes) == len(expected)
    for note, words in zip(notes, expected, strict=True):
        assert note.startswith(f"the text does not prove this right: {words}")


def test_a_rewrite_notes_each_question_that_can_be_asked(tmp_path: Path) -> None:
    """The level is an option, and a package gets the model: two answers, each with its line."""
    text = BASE.replace('opt_level="O1"', "opt_level=args.level").replace(
        "import torch\n", "import mylib\nimport torch\n", 1
    )
    path, _ = paths = put(tmp_path, train=text, network=NETWORK)
    first = choose_rewrite_or_adapter(paths, rewritten="all").files[0]
    assert first.path == path
    assert first.migration is not None
    notes = [each for each in first.migration.findings if "does not prove" in each.message]
    assert {each.line for each in notes} == {
        1 + next(k for k, line in enumerate(text.splitlines()) if word in line)
        for word in ("import mylib", "args.level")
    }
