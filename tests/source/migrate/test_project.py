"""Files and folders: what cannot be read or parsed is reported, and what is written keeps its mode and encoding."""

import json
import stat
from pathlib import Path

import pytest

from ampcompare.source.migrate import project
from ampcompare.source.migrate.project import find_numerical_lint_mistakes, migrate_file
from ampcompare.source.migrate.rewrite import Migration, migrate_text
from ampcompare.source.versions import Versions

SCRIPT = (
    "import torch\nfrom apex.parallel import convert_syncbn_model\nmodel = convert_syncbn_model(model)  # é\n"
)
RESULT = "import torch\nmodel = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # é\n"


@pytest.mark.parametrize(
    ("head", "encoding"), [("", "utf-8"), ("", "utf-8-sig"), ("# -*- coding: latin-1 -*-\n", "latin-1")]
)
def test_a_written_file_keeps_encoding_and_mode(tmp_path: Path, head: str, encoding: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes((head + SCRIPT).encode(encoding))
    path.chmod(0o750)
    migrate_file(path).write()
    assert path.read_bytes() == (head + RESULT).encode(encoding)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_a_notebook_is_rewritten_cell_by_cell(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["from apex import amp"]},
        {
            "cell_type": "code",
            "metadata": {},
            "outputs": [1],
            "execution_count": 3,
            "source": ["%time\n", SCRIPT],
        },
    ]
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}), encoding="utf-8"
    )
    result = migrate_file(path)
    result.write()
    after = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert "".join(after[1]["source"]) == "%time\n" + RESULT
    assert after[0] == cells[0]
    assert after[1]["outputs"] == [1]


def test_a_patch_can_be_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("train.py")
    path.write_text(SCRIPT.rstrip("\n"), encoding="utf-8")
    patch = migrate_file(path).diff()
    assert patch.startswith("--- a/train.py\n+++ b/train.py\n")
    assert patch.count("\\ No newline at end of file") == 2


def test_a_result_that_is_not_python_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(project, "migrate_text", lambda *_: Migration("import torch\nreturn\n", []))
    result = migrate_file(path)
    assert result.lines() == [
        f"{path}: not migrated: 'return' outside function in line 2 of its rewritten form; it stays as it is; please "
        "report it"
    ]
    assert not result.is_changed


LOOP = """import torch
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for x in data:
    optimizer.zero_grad()
    loss = model(x).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    {first}
    {second}
"""


def test_a_mistake_of_the_script_stays_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(LOOP.format(first="scheduler.step()", second="optimizer.step()"), encoding="utf-8")
    result = migrate_file(path, examine=find_numerical_lint_mistakes)
    assert [line.partition(": ")[2] for line in result.lines()] == [
        "note: line 8 of the result: AMP213: `optimizer` steps after it, in line 9"
    ]
    assert result.num_lines_by_hand == 0


def test_a_mistake_that_only_the_result_has_is_left_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lint finds it there; the finding names the line before and after."""
    path = tmp_path / "train.py"
    text = LOOP.format(
        first="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", second="optimizer.step()"
    )
    path.write_text(text, encoding="utf-8")
    assert migrate_file(path, examine=find_numerical_lint_mistakes).lines() == []
    wrong = project.migrate_text(text).text.replace("    scaler.unscale_(optimizer)\n", "")
    monkeypatch.setattr(project, "migrate_text", lambda *_: Migration(wrong, []))
    result = migrate_file(path, examine=find_numerical_lint_mistakes)
    assert result.lines() == [
        f"{path}:9:1: by hand: line 8 of the result: AMP201: the gradients are still scaled by `scaler`"
    ]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clip_that_begins_to_act_is_noted(tmp_path: Path, level: str) -> None:
    """Under O2 it clipped the fp16 copies, which no step uses; a file that stays as it is has no such note."""
    path = tmp_path / "train.py"
    text = LOOP.format(
        first="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", second="optimizer.step()"
    )
    path.write_text(text.replace("O1", level), encoding="utf-8")
    notes = [
        line for line in migrate_file(path, examine=find_numerical_lint_mistakes).lines() if "AMP104" in line
    ]
    assert [
        note.endswith("so this had no effect; in the result it has, and training differs") for note in notes
    ] == [True] * (level == "O2")
    inside = "with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n    optimizer.step()\n"
    path.write_text(text.replace("O1", level) + inside, encoding="utf-8")
    assert not any(
        "had no effect" in line for line in migrate_file(path, examine=find_numerical_lint_mistakes).lines()
    )


@pytest.mark.parametrize("line", ["from shared import *", "from shared import amp"])
def test_amp_that_another_file_passes_on_is_left_by_hand(tmp_path: Path, line: str) -> None:
    (tmp_path / "shared.py").write_text("from apex import amp\n")
    path = tmp_path / "train.py"
    path.write_text(f"{line}\nwith amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()\n")
    assert [each.message for each in migrate_file(path).migration.findings] == [
        "scale_loss is called on what no import of this file makes apex.amp, and it may lead there"
    ]
    path.write_text(path.read_text().replace("shared", "mxnet.contrib"))
    assert not migrate_file(path).num_lines_by_hand or "*" in line


def test_a_file_that_initializes_is_found_in_another_folder_of_the_project(tmp_path: Path) -> None:
    for name in ("README.md", "pack/__init__.py", "pack/engine/__init__.py", "tools/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tools" / "train.py").write_text(
        "from apex import amp\nfrom pack.engine.loop import train\n"
        "model, optimizer = amp.initialize(model, optimizer)\n"
    )
    path = tmp_path / "pack" / "engine" / "loop.py"
    path.write_text(
        "from apex import amp\n\n\ndef train(model, optimizer, xs):\n    for x in xs:\n"
        "        y = model(x)\n        with amp.scale_loss(y, optimizer) as scaled:\n            scaled.backward()\n"
        "        optimizer.step()\n"
    )
    assert (
        "a part of Apex's core is in ../../tools/train.py too"
        in migrate_file(path).migration.findings[0].message
    )


@pytest.mark.slow
def test_a_question_for_apex_stays_where_a_file_that_asks_it_does(tmp_path: Path) -> None:
    """A file that still imports Apex must not be told that it is there; one that is rewritten must."""
    asked = tmp_path / "settings.py"
    asked.write_text(
        "def has_apex():\n    try:\n        from apex import amp\n        return True\n"
        "    except ImportError:\n        return False\n"
    )
    script = tmp_path / "train.py"
    text = (
        "import torch\nfrom settings import has_apex\n\nif has_apex():\n    from apex import amp\n"
        "model = torch.nn.Linear(2, 2).cuda()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer = amp.initialize(model, optimizer)\nfor x in torch.ones(2, 2).cuda():\n"
        "    optimizer.zero_grad()\n    with amp.scale_loss(model(x).sum(), optimizer) as loss:\n"
        "        loss.backward()\n    optimizer.step()\n"
    )
    script.write_text(text)
    assert not migrate_file(script).num_lines_by_hand
    assert [each.kind for each in migrate_file(asked).migration.findings] == ["note"]
    script.write_text(text.replace("model, optimizer)\nfor", "model, optimizer, **options)\nfor"))
    assert migrate_file(script).num_lines_by_hand
    (finding,) = migrate_file(asked).migration.findings
    assert finding.message.startswith("train.py is left by hand and imports Apex")
    assert "import amp" in migrate_file(asked).migration.text


OLD = """import torch
from torch.cuda.amp import GradScaler, autocast

torch.backends.cudnn.allow_tf32 = True
scaler = GradScaler()
with autocast():
    loss = model(x)
"""


def test_deprecated_names_of_torch_are_renewed_with_and_without_apex(tmp_path: Path) -> None:
    """As far as the version has the new ones; a second run changes nothing."""
    path = tmp_path / "train.py"
    for text in (
        OLD,
        OLD + "from apex.parallel import convert_syncbn_model\nmodel = convert_syncbn_model(model)\n",
    ):
        path.write_text(text, encoding="utf-8")
        old = migrate_file(path, versions=Versions((2, 3), (0, 0)))
        assert old.migration is None or old.migration.text.startswith(OLD)
        new = migrate_file(path, versions=Versions((2, 9), (0, 0))).migration.text
        assert 'scaler = GradScaler("cuda")\nwith autocast("cuda"):\n' in new
        assert (
            'torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "tf32"'
            in new
        )
        assert "apex" not in new
        path.write_text(new, encoding="utf-8")
        assert not migrate_file(path, versions=Versions((2, 9), (0, 0))).is_changed


OPTIMIZER = "from apex.optimizers import FusedSGD\n\n\ndef make(net):\n    return FusedSGD(net.parameters(), lr=0.1)\n"


def test_an_optimizer_that_the_projects_own_scaler_steps_is_not_fused(tmp_path: Path) -> None:
    """GradScaler calls the step of a fused one where it skips it, and the project may count calls."""
    (tmp_path / "optimizers.py").write_text(OPTIMIZER)
    (tmp_path / "train.py").write_text(
        "from torch.amp import GradScaler\nfrom optimizers import make\nscaler = GradScaler()\n"
    )
    migration = migrate_file(tmp_path / "optimizers.py").migration
    assert migration is not None
    assert "return torch.optim.SGD(net.parameters(), lr=0.1)" in migration.text


@pytest.mark.parametrize(("torch", "is_fused"), [((2, 2), False), ((2, 3), True)])
def test_a_fused_optimizer_is_one_of_the_version(torch: tuple[int, int], is_fused: bool) -> None:
    text = migrate_text(OPTIMIZER, versions=Versions(torch)).text
    assert ("fused=True" in text) is is_fused
    assert "torch.optim.SGD(net.parameters(), lr=0.1" in text
