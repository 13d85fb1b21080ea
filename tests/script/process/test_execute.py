"""A script under `ampcompare exec` sees, prints and ends as it does under plain Python."""

import os
import re
from importlib.util import find_spec

import pytest
import torch

from ampcompare.base.environment.apex import find_installed_apex
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.process.execute import _error_text_with_line, untried_arms_text

WORLD = """
    import pickle
    import sys

    class Thing:
        size: int = 3

    count: int = 1
    print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name, sys.path[:2])
    print(sorted(globals()))
    print(sys.modules["__main__"].Thing is Thing, type(pickle.loads(pickle.dumps(Thing()))))
"""


def assert_same(python, command: list[str], **variables: str) -> None:
    plain = python(*command, **variables)
    ours = python("-m", "ampcompare", "exec", *command, **variables)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_script_sees_the_same_world(write, python) -> None:
    """Arguments, names of the main module, path and pickles of its classes are those of plain Python."""
    write("work/train.py", WORLD)
    folders = os.pathsep.join(filter(None, ["/first", os.environ.get("PYTHONPATH")]))
    command = ["work/train.py", "--lr", "1", "-m", "--engine=x", "--", "--help", "a b"]
    assert_same(python, command, PYTHONPATH=folders)


def test_module_sees_the_same_world(write, python) -> None:
    """Under -m, relative imports work and argv[0] and __spec__ are those of plain Python."""
    write("pack/__init__.py", "")
    write("pack/part.py", "value = 7")
    write("pack/train.py", WORLD + "\n    from .part import value\n    print(value)")
    write("pack/__main__.py", "from .part import value; print(value, __package__, __name__)")
    assert_same(python, ["-m", "pack.train", "--lr", "1"])
    assert_same(python, ["-m", "pack"])


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit('no data')",
        "import sys; sys.exit()",
        "raise SystemExit(256 + 7)",
        "def f(n): return f(n - 1) if n else [][1]\nf(3)",
        "import atexit; atexit.register(print, 'bye')\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    raise ValueError('later') from error",
        "x = (",
        "import sys; sys.excepthook = lambda *args: print('mine', args[0].__name__); 1 / 0",
        "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'bye'); print('x'); raise KeyboardInterrupt",
    ],
)
def test_script_ends_the_same(source: str, write, python) -> None:
    """Exit codes, tracebacks, hooks and deaths by a signal, of Ctrl-C too, are those of plain Python."""
    write("train.py", source)
    assert_same(python, ["train.py"])


@pytest.mark.parametrize(
    "command, code, said",
    [
        (["absent.py"], 2, "there is no script absent.py"),
        (["-m", "absent.train"], 2, "there is no module absent.train"),
        (["-m", "here.absent"], 2, "there is no module here.absent"),
        (["folder"], 2, "folder is no source file of Python"),
        (["--engine", "nvidia", "train.py"], 4, "is a clone of the repository; install it"),
        (["--record", "train.py/x.jsonl", "train.py"], 4, "cannot write the record"),
    ],
)
def test_what_cannot_run_is_one_line(command: list[str], code: int, said: str, write, forked) -> None:
    """What is our fault or the caller's, before the script starts, is one line and a documented exit code."""
    write("train.py", "print('started')")
    write("folder/data.txt", "")
    write("here/__init__.py", "")
    write("apex/setup.py", "")
    done = forked("-m", "ampcompare", "exec", *command)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_arms_of_an_advice_are_said_to_be_untried() -> None:
    """Under `exec` nothing has tried them; a preflight of `compare` does."""
    settings = ExecSettings(name="train.py", arm="native:fp16")
    said = untried_arms_text(["native:bf16", "fp32"], settings)
    assert said.startswith(
        "native:bf16 and fp32 were not tried here: `ampcompare compare --dry-run --arm native:fp16"
    )
    assert untried_arms_text([], settings) == ""


@pytest.mark.skipif(find_installed_apex().has_amp, reason="NVIDIA's Apex is here")
def test_an_arm_that_names_its_engine_gets_no_other(write, forked) -> None:
    write("train.py", "")
    done = forked("-m", "ampcompare", "exec", "--arm", "O2,engine=nvidia", "train.py")
    assert done.returncode == 4
    assert "apex is not installed" in done.stderr


def test_numbers_of_a_tensor_are_left_out_of_a_message() -> None:
    """As those that torch.distributions prints over many lines; a short tensor stays, in a line of its own."""
    many = torch.randn(40, 90, dtype=torch.float64)
    error = ValueError(f"found invalid values:\n{many}, of (Tensor), and {torch.ones(2)} here\n{many}")
    assert str(error).count("\n") > 10
    assert _error_text_with_line(error) == (
        "ValueError: found invalid values: tensor(...), of (Tensor), and tensor([1., 1.]) here tensor(...)"
    )
    assert _error_text_with_line(ValueError("a tensor(\n[1, 2")) == "ValueError: a tensor(...)"
    assert _error_text_with_line(ValueError("one\ntwo")) == "ValueError: one\ntwo"


def test_error_in_the_parent_package_is_the_scripts_own(write, forked) -> None:
    """A package that fails to import, and is not simply absent, shows its own traceback and no frame of ours."""
    write("pack/__init__.py", "import absent_dependency")
    write("pack/train.py", "")
    done = forked("-m", "ampcompare", "exec", "-m", "pack.train")
    assert done.returncode == 1
    assert "No module named 'absent_dependency'" in done.stderr
    assert "ampcompare" not in done.stderr


def test_options_after_the_script_are_its_own(write, forked) -> None:
    """Ours come before SCRIPT; an unknown one there is a usage error, after it nothing is looked at."""
    write("train.py", "import sys; print(sys.argv[1:])")
    done = forked("-m", "ampcompare", "exec", "train.py", "--opt-level", "O9", "--opt_level=O2")
    assert done.stdout == "['--opt-level', 'O9', '--opt_level=O2']\n"
    assert forked("-m", "ampcompare", "exec", "--opt-level", "O9", "train.py").returncode == 2
    assert forked("-m", "ampcompare", "exec").returncode == 2


def test_a_name_that_torch_lacks(write, legacy) -> None:
    """The script's traceback, then the one line with the name, and the exit code of an environment."""
    write(
        "train.py",
        """
        import torch
        from apex import amp

        del torch._amp_foreach_non_finite_check_and_unscale_
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        """,
    )
    done = legacy("train.py")
    assert done.returncode == 4
    assert "lacks torch._amp_foreach_non_finite_check_and_unscale_" in done.stderr.splitlines()[-1]


TRAINS = """
    import torch

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    print("done")
"""


@pytest.mark.slow  # each imports torch four times
@pytest.mark.parametrize("name", ["cuda.py", "inspect.py", "profile.py"])
def test_a_script_with_the_name_of_a_module(name: str, write, python) -> None:
    """It ends as under plain Python, and a line says why; where torch is imported before it, it trains."""
    write(name, TRAINS)
    plain = python(name)
    done = python("-m", "ampcompare", "exec", name)
    assert plain.returncode == done.returncode == 1
    *_, message, said = done.stderr.splitlines()
    assert message == plain.stderr.splitlines()[-1]
    assert re.fullmatch(
        f"ampcompare: {name} was imported by (torch|cProfile) in place of .*try --compat-torch.*", said
    )
    for options in (["--device", "cpu"], ["--record", "steps.jsonl"]):
        done = python("-m", "ampcompare", "exec", *options, name)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_file_in_place_of_a_module_is_named(write, forked) -> None:
    """A file next to the script that lacks what a library wants; and one whose own mistake it is."""
    write("socket.py", "")
    write("mine.py", "")
    write("train.py", "import ftplib")
    write("own.py", "import mine; mine.absent")
    done = forked("-m", "ampcompare", "exec", "train.py")
    assert done.returncode == 1
    assert "socket.py was imported in place of a module with that name; rename the file" in done.stderr
    assert "in place of" not in forked("-m", "ampcompare", "exec", "own.py").stderr


def test_a_torchvision_for_another_torch_can_be_imported(write, forked) -> None:
    """One from PyPI, built for CUDA, lacks its operators next to a torch for CPUs; libraries import it too."""
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    write("train.py", "from torchvision import models\nprint(type(models.resnet18()).__name__)")
    done = forked("-m", "ampcompare", "exec", "train.py")
    assert (done.returncode, done.stdout) == (0, "ResNet\n"), done.stderr
