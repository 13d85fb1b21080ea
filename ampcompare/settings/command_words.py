"""What people type after `--`: a script, or what they start one with otherwise, such as python or torchrun."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ampcompare.base.errors import ConfigError

PYTHON = re.compile(r"(?:python|pythonw|pypy)(?:\d(?:\.\d+)?)?(?:\.exe)?")
SILENT = ("-u", "-B", "-q")  # options of python that change nothing of a training
# Launchers that are written in Python, by the words that start them, and the module which the same words run.
LAUNCHERS = {
    ("accelerate", "launch"): "accelerate.commands.launch",
    ("accelerate-launch",): "accelerate.commands.launch",
    ("deepspeed",): "deepspeed.launcher.runner",
}
# What starts ranks without being Python: a cell is one command, and its ranks are started by --nproc-per-node.
RANK_STARTERS = ("mpirun", "mpiexec", "srun", "horovodrun", "orterun", "prun")
# What runs any command: ampcompare itself is to be started by it.
WRAPPERS = (
    "uv", "poetry", "pipenv", "pdm", "hatch", "rye", "conda", "mamba", "micromamba", "nohup", "time", "nice", "taskset",
    "numactl", "env", "sudo", "xvfb-run", "stdbuf", "timeout", "docker", "apptainer", "singularity",
)  # fmt: skip
SHELLS = ("bash", "sh", "zsh", "make")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


def words_after_python_of_command(words: Sequence[str]) -> list[str]:
    """Return the words after `python` of a command: the path of a script or `-m` and a module, and the arguments.

    A file of the working directory is a script, whatever its name.

    Raises:
        ConfigError: the command is started by what cannot run in a cell; it says what does the same.
    """
    rest = list(words)
    if not rest or Path(rest[0]).is_dir():
        return rest
    first = Path(rest[0]).name
    if Path(rest[0]).is_file() and not PYTHON.fullmatch(first):
        return rest
    if ASSIGNMENT.fullmatch(rest[0]):
        raise ConfigError(f"{rest[0]} sets a variable; set it before the command: {rest[0]} ampcompare ...")
    if PYTHON.fullmatch(first):
        return words_after_python_of_command(_words_after_python(rest))
    for start, module in LAUNCHERS.items():
        if (first, *rest[1 : len(start)]) == start:
            return ["-m", module, *rest[len(start) :]]
    if first == "torchrun":
        found = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", " ".join(rest))
        raise ConfigError(
            f"torchrun is started by ampcompare: --nproc-per-node {found[1] if found else 1} -- "
            f"{_script_part_of_command(rest)}"
        )
    if first in RANK_STARTERS:
        raise ConfigError(
            f"{first} cannot start the ranks of a cell; ampcompare does: --nproc-per-node N -- "
            f"{_script_part_of_command(rest)}"
        )
    if first in WRAPPERS or first in SHELLS:
        whom = "the command in its file" if first in SHELLS else _script_part_of_command(rest)
        how = (
            "give what it runs"
            if first in SHELLS
            else f"start ampcompare by it, {first} ... ampcompare, and give"
        )
        raise ConfigError(f"{first} is no Python script; {how} after --: {whom}")
    if first in ("lightning", "fabric") and rest[1:2] == ["run"]:
        raise ConfigError(
            f"{first} run sets ranks and precision, which --nproc-per-node and --arm do here; give the script after "
            f"--: {_script_part_of_command(rest)}"
        )
    return rest


def why_no_module(module: str, arguments: Sequence[str]) -> str:
    """Return why there is no module to run, and what to do; of a launcher that is not installed what does the same.

    Args:
        arguments: of the module, in which a launcher has its script.
    """
    launcher = next((" ".join(words) for words, name in LAUNCHERS.items() if name == module), "")
    if not launcher:
        return f"there is no module {module} to run; check its name and PYTHONPATH"
    text = " ".join(arguments)
    found = re.search(r"--(?:num_gpus|num_processes|nproc[-_]per[-_]node)[= ](\d+)", text)
    package = module.partition(".")[0]
    whose = "" if launcher == package else f", so there is no {launcher}"
    return (
        f"{package} is not installed{whose}; ampcompare starts ranks itself: "
        f"--nproc-per-node {found[1] if found else 'N'} -- {_script_part_of_command(arguments)}"
    )


def _words_after_python(words: list[str]) -> list[str]:
    """Return the words behind the interpreter and its options."""
    written, *rest = words
    if os.sep in written and os.path.realpath(os.path.dirname(written)) != os.path.realpath(
        os.path.dirname(sys.executable)
    ):
        raise ConfigError(
            f"cells run in the Python of ampcompare, {sys.executable}, not in {written}; install ampcompare there, and "
            "start it from there"
        )
    while rest and rest[0] in SILENT:
        rest.pop(0)
    if rest and rest[0] == "-c":
        raise ConfigError("python -c has no file that could be compared; write its code into a script")
    if rest and rest[0].startswith("-") and rest[0] != "-m":
        raise ConfigError(
            f"python's option {rest[0]} is not passed to cells; leave it out, or set its variable, such as "
            "PYTHONOPTIMIZE or PYTHONWARNINGS, before the command"
        )
    return rest


def _script_part_of_command(words: Sequence[str]) -> str:
    """Return the script of a command with what follows it, as it stands after `--`."""
    place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    return "train.py" if place is None else shlex.join(words[place:])
