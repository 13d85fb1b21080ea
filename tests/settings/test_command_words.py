"""What people type after `--` becomes a script or a module, or is answered with what does the same."""

import re
import sys
from pathlib import Path

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.settings.command_words import why_no_module, words_after_python_of_command


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py --lr 1", "train.py --lr 1"),
        ("python3.11 -u train.py", "train.py"),
        ("python -m pkg.train --lr 1", "-m pkg.train --lr 1"),
        ("python -m torch.distributed.launch train.py", "-m torch.distributed.launch train.py"),
        ("python -m torch.distributed.run train.py", "-m torch.distributed.run train.py"),
        (
            "accelerate launch --num_processes 2 train.py",
            "-m accelerate.commands.launch --num_processes 2 train.py",
        ),
        ("accelerate-launch train.py", "-m accelerate.commands.launch train.py"),
        ("deepspeed --num_gpus 2 train.py", "-m deepspeed.launcher.runner --num_gpus 2 train.py"),
        ("/usr/bin/env/absent.py", "/usr/bin/env/absent.py"),
    ],
)
def test_what_starts_a_script_is_read(typed: str, words: str) -> None:
    assert words_after_python_of_command(typed.split()) == words.split()


def test_the_interpreter_of_ampcompare_is_dropped() -> None:
    """By its path too, which a user pastes."""
    assert words_after_python_of_command([sys.executable, "train.py"]) == ["train.py"]


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("/opt/other/bin/python train.py", "not in /opt/other/bin/python; install ampcompare there"),
        ("python -c pass", "write its code into a script"),
        ("python -O train.py", "PYTHONOPTIMIZE"),
        ("CUDA_VISIBLE_DEVICES=0 python train.py", "CUDA_VISIBLE_DEVICES=0 ampcompare"),
        ("mpirun -n 2 python train.py --lr 1", r"--nproc-per-node N -- train\.py --lr 1"),
        (
            "torchrun --standalone --nproc_per_node=2 train.py --lr 1",
            r": --nproc-per-node 2 -- train\.py --lr 1",
        ),
        ("torchrun --nproc-per-node 4 train.py", r": --nproc-per-node 4 -- train\.py"),
        ("srun train.py", r"--nproc-per-node N -- train\.py"),
        ("uv run train.py --lr 1", r"uv \.\.\. ampcompare, and give after --: train\.py --lr 1"),
        ("bash train.sh", "bash is no Python script; give what it runs"),
        ("lightning run model train.py", r"--nproc-per-node and --arm do here.*train\.py"),
    ],
)
def test_what_cannot_run_in_a_cell_is_answered(typed: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        words_after_python_of_command(typed.split())
    assert "\n" not in str(caught.value)


def test_a_file_is_a_script_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("torchrun").write_text("")
    assert words_after_python_of_command(["torchrun", "--lr", "1"]) == ["torchrun", "--lr", "1"]


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        (
            "deepspeed --num_gpus 2 train.py --lr 1",
            r"deepspeed is not .*: --nproc-per-node 2 -- train\.py --lr 1$",
        ),
        (
            "deepspeed train.py",
            r"^deepspeed is not installed; ampcompare .*: --nproc-per-node N -- train\.py$",
        ),
        (
            "accelerate launch --num_processes=4 train.py",
            r"^accelerate is not installed, so there is no accelerate launch; .*-node 4 -- train\.py$",
        ),
        (
            "python -m pkg.train --lr 1",
            "^there is no module pkg.train to run; check its name and PYTHONPATH$",
        ),
    ],
)
def test_a_launcher_that_is_not_installed_is_named(typed: str, why: str) -> None:
    _, module, *arguments = words_after_python_of_command(typed.split())
    assert re.search(why, why_no_module(module, arguments))
