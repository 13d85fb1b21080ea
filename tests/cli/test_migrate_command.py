"""The command line of `migrate`: patch on stdout, remarks on stderr, exit codes."""

from pathlib import Path

import pytest

from ampcompare.cli import main

SCRIPT = "import torch\nfrom apex.parallel import convert_syncbn_model\nmodel = convert_syncbn_model(model)\n"
KEPT = "from apex import amp\n\n\ndef start(net, optimizer, options):\n    amp.initialize(net, optimizer, **options)\n"
ORDINARY = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for _ in range(3):
    loss = model(torch.randn(8, 4)).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LEFT = "from apex.fp16_utils import FP16_Optimizer\noptimizer = FP16_Optimizer(optimizer)\n"


def test_the_default_prints_a_patch_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    assert main(["migrate", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("--- a/")
    assert "+model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)" in output.out
    assert "1 file: 1 to rewrite" in output.err
    assert path.read_text(encoding="utf-8") == SCRIPT


def test_the_next_command_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left by hand has a line that works."""
    module, script = tmp_path / "module.py", tmp_path / "train.py"
    for file in (module, script):
        file.write_text(SCRIPT, encoding="utf-8")
    for paths, named in (([script], script), ([tmp_path], "SCRIPT.py")):
        assert main(["migrate", *map(str, paths)]) == 0
        assert capsys.readouterr().err.splitlines()[-1].endswith(f": ampcompare migrate --verify {named} -- ARGS")
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    assert "--verify" not in capsys.readouterr().err
    script.write_text(LEFT, encoding="utf-8")
    assert main(["migrate", str(script)]) == 1
    assert "`import ampcompare.apex; ampcompare.apex.install()`" in capsys.readouterr().err.splitlines()[-1]


def test_write_changes_files_and_a_second_run_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    assert main(["migrate", "--write", str(path)]) == 0
    written = path.read_text(encoding="utf-8")
    assert "apex" not in written
    capsys.readouterr()
    assert main(["migrate", "--write", str(path)]) == 0
    assert "nothing to rewrite" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == written


def test_what_is_left_by_hand_gives_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(LEFT, encoding="utf-8")
    (tmp_path / "b.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "c.py").write_text("print 'apex'", encoding="utf-8")
    assert main(["migrate", "--write", str(tmp_path / "a.py")]) == 1
    assert main(["migrate", "--write", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "a.py:2:13: by hand: FP16_Optimizer" in errors
    assert "c.py: not migrated: line 1: not Python 3" in errors
    assert "1 line left by hand in 1 of them; 1 not migrated" in errors
    assert "apex" not in (tmp_path / "b.py").read_text(encoding="utf-8")


def test_what_a_rewrite_leaves_by_hand_moves_with_the_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the adapter lacks runs on with the engine."""
    (tmp_path / "a.py").write_text(KEPT, encoding="utf-8")
    assert main(["migrate", "--rewrite", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": ampcompare migrate --adapter {tmp_path}")
    (tmp_path / "b.py").write_text(LEFT, encoding="utf-8")
    assert main(["migrate", "--rewrite", str(tmp_path)]) == 1
    *_, first, second = capsys.readouterr().err.splitlines()
    assert "--adapter" in first
    assert f"in {tmp_path / 'b.py'} runs on with `import ampcompare.apex" in second


def test_a_training_is_rewritten_or_takes_the_adapter_with_its_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason, the file that is added, and the counts are said; a rewrite of the same files is asked for."""
    (tmp_path / "a.py").write_text(ORDINARY, encoding="utf-8")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "+scaler = torch.amp.GradScaler" in capsys.readouterr().out
    (tmp_path / "layers.py").write_text("from apex.normalization import FusedLayerNorm\n", encoding="utf-8")
    (tmp_path / "b.py").write_text(f"import layers\n{KEPT}", encoding="utf-8")
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert "b.py takes the adapter: line 6: its arguments are passed as * or **" in errors
    assert "layers.py takes the adapter: it runs with b.py, which takes the adapter" in errors
    assert f"added {tmp_path / 'torch_amp_adapter.py'}: Apex's functions on torch.autocast, for 2 files" in errors
    assert "3 files: 1 rewritten, 2 moved to the adapter" in errors
    assert "scaler" in (tmp_path / "a.py").read_text(encoding="utf-8")
    assert "torch_amp_adapter" in (tmp_path / "layers.py").read_text(encoding="utf-8")
    assert main(["migrate", "--adapter", "--rewrite", str(tmp_path)]) == 2
    assert "--rewrite is not for --adapter, which keeps the code" in capsys.readouterr().err


def test_the_adapter_is_a_file_and_changed_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A patch by default; with `--write` files, and a second run finds nothing."""
    (tmp_path / "a.py").write_text(KEPT, encoding="utf-8")
    assert main(["migrate", "--adapter", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("--- /dev/null\n+++ b/")
    assert "+import torch_amp_adapter as amp" in output.out
    assert output.err.splitlines()[-1].endswith("migrate --adapter --verify " + str(tmp_path / "a.py") + " -- ARGS")
    assert not (tmp_path / "torch_amp_adapter.py").exists()
    assert main(["migrate", "--adapter", "--write", str(tmp_path)]) == 0
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == KEPT.replace(
        "from apex import amp", "import torch_amp_adapter as amp"
    )
    assert "SPDX" in (tmp_path / "torch_amp_adapter.py").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["migrate", "--adapter", "--write", str(tmp_path)]) == 0
    assert "nothing to rewrite" in capsys.readouterr().err


def test_the_adapter_names_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(LEFT, encoding="utf-8")
    assert main(["migrate", "--adapter", "--write", str(tmp_path)]) == 1
    assert "a.py:2:13: by hand: the adapter has no apex.fp16_utils.FP16_Optimizer" in capsys.readouterr().err
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == LEFT
    assert not (tmp_path / "torch_amp_adapter.py").exists()
    assert main(["migrate", "--adapter", "--torch-version", "2.6", str(tmp_path)]) == 2
