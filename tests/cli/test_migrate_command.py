"""The command line of `migrate`: patch on stdout, remarks on stderr, exit codes."""

import re
import shlex
from pathlib import Path

import click
import pytest

from ampcompare.cli import main
from ampcompare.cli.group import cli
from ampcompare.cli.help import Command

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


def test_the_default_prints_a_patch_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert (
            capsys.readouterr()
            .err.splitlines()[-1]
            .endswith(f": ampcompare migrate --verify {named} -- ARGS")
        )
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    assert "--verify" not in capsys.readouterr().err
    script.write_text(LEFT, encoding="utf-8")
    assert main(["migrate", str(script)]) == 1
    assert "`import ampcompare.apex; ampcompare.apex.install()`" in capsys.readouterr().err.splitlines()[-1]


def test_write_changes_files_and_a_second_run_finds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_training_takes_the_adapter_with_its_project(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What speaks against a rewrite, the file that is added, and the counts are said; a rewrite is asked for."""
    (tmp_path / "a.py").write_text(ORDINARY, encoding="utf-8")
    assert main(["migrate", "--rewrite", str(tmp_path)]) == 0
    assert "+scaler = torch.amp.GradScaler" in capsys.readouterr().out
    (tmp_path / "layers.py").write_text("from apex.normalization import FusedLayerNorm\n", encoding="utf-8")
    (tmp_path / "b.py").write_text(f"import layers\n{KEPT}", encoding="utf-8")
    assert main(["migrate", "--write", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert "b.py takes the adapter: line 6: its arguments are passed as * or **" in errors
    assert "layers.py takes the adapter: it runs with b.py, which is not rewritten" in errors
    assert "a.py takes the adapter: nothing in its text speaks against a rewrite for torch.amp" in errors
    assert (
        f"added {tmp_path / 'torch_amp_adapter.py'}: Apex's functions on torch.autocast, for 3 files"
        in errors
    )
    assert "3 files: 3 moved to the adapter" in errors
    assert "GradScaler" not in (tmp_path / "a.py").read_text(encoding="utf-8")
    assert "torch_amp_adapter" in (tmp_path / "layers.py").read_text(encoding="utf-8")
    assert main(["migrate", "--adapter", "--rewrite", str(tmp_path)]) == 2
    assert "--rewrite is not for --adapter, which keeps the code" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "is_said"), [(["pkg/b.py"], True), (["b.py"], False), (["pkg/__init__.py", "pkg/b.py"], False)]
)
def test_an_adapter_that_no_package_holds_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], is_said: bool
) -> None:
    """Below `src/`, in a package without `__init__.py`: an installation has the package, and not the adapter."""
    (tmp_path / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "setup.cfg").write_text("[options]\npackages = find_namespace:\npackage_dir =\n    = src\n")
    for name in names:
        (tmp_path / "src" / name).write_text("" if name.endswith("__init__.py") else KEPT, encoding="utf-8")
    (tmp_path / "src" / "main.py").write_text("from pkg import b\n", encoding="utf-8")
    assert main(["migrate", str(tmp_path / "src")]) == 0
    assert ("where this project is installed, its setup must name it" in capsys.readouterr().err) == is_said


def test_the_adapter_is_a_file_and_changed_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patch by default; with `--write` files, and a second run finds nothing."""
    (tmp_path / "a.py").write_text(KEPT, encoding="utf-8")
    assert main(["migrate", "--adapter", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("--- /dev/null\n+++ b/")
    assert "+import torch_amp_adapter as amp" in output.out
    assert output.err.splitlines()[-1].endswith(
        "migrate --adapter --verify " + str(tmp_path / "a.py") + " -- ARGS"
    )
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


def test_the_dependency_on_apex_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It can go where nothing is left; lines that only speak of Apex ask for nothing."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(KEPT, encoding="utf-8")
    url = "apex @ git+https://github.com/NVIDIA/apex.git@22.04-dev"
    (tmp_path / "setup.py").write_text(
        f'from setuptools import setup\n\nsetup(\n    name="pkg",\n    install_requires=["torch", "{url}"],\n'
        '    extras_require={"apex": ["ninja"]},\n    description="with apex",\n)\n',
        encoding="utf-8",
    )
    (tmp_path / "requirements.txt").write_text(
        "# apex, as of NVIDIA\ntorch\napex==0.1\n-e git+ssh://x/apex-utils\n"
    )
    (tmp_path / "environment.yml").write_text(
        "dependencies:\n  - nvidia-apex=0.1\n  - apexpy\n", encoding="utf-8"
    )
    assert main(["migrate", str(tmp_path / "pkg")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    unless = "unless a file that was not named here, or another package, imports it"
    assert said.count(f"the dependency on Apex can go, {unless}") == 3
    for place in (
        "setup.py:5: `install_requires",
        "requirements.txt:3: `apex==0.1`",
        "environment.yml:2: `- nvidia-",
    ):
        assert place in said
    (tmp_path / "pkg" / "b.py").write_text(LEFT, encoding="utf-8")
    assert main(["migrate", str(tmp_path / "pkg")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("the dependency on Apex stays as long as a file needs it") == 3
    assert main(["migrate", str(tmp_path / "pkg" / "b.py")]) == 1  # nothing moves
    assert "dependency on Apex" not in capsys.readouterr().err


def test_the_dependency_is_named_where_a_package_is_no_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text(KEPT, encoding="utf-8")
    (tmp_path / "setup.py").write_text(
        'EXTRAS = {\n    "apex": ["git+https://github.com/NVIDIA/apex"],\n}\n', encoding="utf-8"
    )
    assert main(["migrate", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (
        'setup.py:2: `"apex": ["git+https://github.com/NVIDIA/apex"]`: the dependency on Apex can go' in said
    )


def test_what_the_engine_lacks_too_runs_on_with_apex_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = "apex.parallel.sync_batchnorm_kernel.SyncBatchnormFunction"
    (tmp_path / "a.py").write_text(
        "from {} import {}\nSyncBatchnormFunction.apply(1)\n".format(*kernel.rsplit(".", 1))
    )
    (tmp_path / "b.py").write_text(LEFT + "import apex.contrib\nfrom apex.parallel import LARC\nLARC.LARC\n")
    assert main(["migrate", str(tmp_path)]) == 1
    *_, second, first = capsys.readouterr().err.splitlines()
    assert f"what is left in {tmp_path / 'b.py'} runs on with `import ampcompare.apex" in second
    assert (
        f"{tmp_path / 'a.py'} needs {kernel}, which neither the adapter nor ampcompare's engine has" in first
    )


def test_comments_are_no_rewrite_and_no_adapter_takes_what_imports_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where `amp` comes from a star import of a file that is not there, all its calls are named."""
    text = ORDINARY.replace("from apex import amp\n", "from lib.utils import *\n")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    for words, done in (([], "to mark; --write does it"), (["--write"], "marked")):
        assert main(["migrate", *words, str(tmp_path / "train.py")]) == 1
        errors = capsys.readouterr().err
        assert f"1 file: 1 {done}; 2 lines left by hand in 1 of them" in errors
        assert "train.py:6:" in errors
        assert "--adapter" not in errors
        assert "runs on with `import ampcompare.apex" in errors


def test_a_file_without_an_import_of_apex_is_not_said_to_run_on_with_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ORDINARY.replace("from apex import amp\n", "import torch.cuda.amp as amp\n")
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    main(["migrate", "--rewrite", str(tmp_path / "train.py")])
    assert "ampcompare.apex" not in capsys.readouterr().err


def test_a_reason_for_the_adapter_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ORDINARY.replace(
        "    loss = model", "    for each in model.half().parameters():\n        pass\n    loss = model"
    )
    made = ORDINARY.replace("torch.optim.SGD(model.parameters(), lr=0.1)", "make(model)")
    for name, each in (("a", text), ("b", made)):
        (tmp_path / f"{name}.py").write_text(each, encoding="utf-8")
    assert main(["migrate", str(tmp_path)]) == 0
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert "takes the adapter: line 8: " in first
    assert ";" not in first
    assert second.endswith(
        "what makes `optimizer` is `make(model)`, and only calls of torch's own optimizers are read"
    )


SAVED = 'torch.save({"amp": amp.state_dict()}, "x")\namp.load_state_dict(torch.load("x")["amp"])\n'
LIBRARY = "from apex import amp\n\n\ndef start(net, optimizer):\n    amp.initialize(net, optimizer, opt_level=LEVEL)\n"


def test_every_command_that_is_named_can_be_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its options and the files that are there, without running it."""
    folder = tmp_path / "with space"
    folder.mkdir()
    monkeypatch.chdir(folder)
    texts = {"a.py": ORDINARY, "b.py": LIBRARY, "c.py": ORDINARY + SAVED, "d.py": LEFT, "e.py": KEPT}
    for name, text in {**texts, "OLD": "", "SCRIPT.py": ORDINARY, "ARGS": ""}.items():
        Path(name).write_text(text, encoding="utf-8")
    outer = str(folder)
    for words in (
        ["a.py"], [f"{outer}/b.py"], [outer], ["--rewrite", "a.py"], ["--rewrite", outer], ["--adapter", "b.py"],
        ["--rewrite", "e.py", "d.py"], ["--adapter", "d.py"], ["--rewrite", "--write", "c.py"],
        ["--verify", "--no-preflight", f"{outer}/d.py"], ["--verify", "--adapter", "--no-preflight", "d.py"],
    ):  # fmt: skip
        main(["migrate", *words])
    commands = re.findall(r"ampcompare ([a-z]+ [^\n;]*)", capsys.readouterr().err)
    assert len(commands) > 7
    assert {each.split()[0] for each in commands} == {"migrate", "convert"}
    for text in commands:
        name, *words = shlex.split(text)
        parent = click.Context(cli)
        command = cli.get_command(parent, name)
        assert isinstance(command, Command)
        with command.make_context(name, words, parent=parent) as context:
            command.resolve_options(context)
            assert all(Path(each).exists() for each in context.params.get("paths", ())), text


def test_a_dependency_on_apex_stays_while_a_file_imports_a_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requirements.txt").write_text("apex\n")
    (tmp_path / "layers.py").write_text(
        "from apex.optimizers import FusedLAMB\nfrom apex.normalization import FusedLayerNorm\n"
        "norm, make = FusedLayerNorm(4), FusedLAMB\n"
    )
    assert main(["migrate", "--rewrite", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "the dependency on Apex stays as long as a file needs it" in said


def test_no_adapter_is_written_for_files_that_need_none_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer becomes torch's; the training that it runs with stays on Apex."""
    (tmp_path / "README.md").touch()
    (tmp_path / "loop.py").write_text(
        "import torch\nimport norms\nfrom apex import amp\nfrom apex.contrib.optimizers import FP16_Optimizer\n"
        "model, optimizer = amp.initialize(norms.Net(), FP16_Optimizer(optimizer))\n"
        "with amp.scale_loss(model(x), optimizer) as loss:\n    loss.backward()\noptimizer.step()\n"
    )
    (tmp_path / "norms.py").write_text(
        "try:\n    from apex.normalization import FusedRMSNorm as RMSNorm\n"
        "except ImportError:\n    from own import RMSNorm\nnorm = RMSNorm(4)\n"
    )
    main(["migrate", "--write", str(tmp_path)])
    said = capsys.readouterr().err
    assert not (tmp_path / "torch_amp_adapter.py").exists()
    assert "takes the adapter" not in said
    assert "try" not in (tmp_path / "norms.py").read_text()


def test_what_the_engine_makes_when_it_is_asked_for_is_not_said_to_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps.py").write_text(
        "from apex.optimizers import FP16_Optimizer\nclass Steps(FP16_Optimizer):\n    pass\n"
    )
    main(["migrate", str(tmp_path)])
    said = capsys.readouterr().err
    assert "runs on with `import ampcompare.apex" in said
    assert "nor ampcompare's engine has" not in said
