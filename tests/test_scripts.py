"""The scripts that set up, in a copy of what they read, with a stand-in for Python: nothing is installed."""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Plays the interpreter, its venv module, pip, and the tools; writes each call to the file "calls".
PYTHON_STUB = r"""#!/bin/bash
case "$1 $2" in
    "-c "*version_info*) echo "${STUB_VERSION:-3.11}" ;;
    "-c "*ensurepip*) exit "${STUB_NO_VENV:-0}" ;;
    "- "*) printf '%s' "${STUB_PACKAGES:-}"; exit "${STUB_NO_TORCH:-1}" ;;
    "-m venv")
        shift 2
        echo "venv $*" >>calls
        mkdir -p .venv/bin .venv/lib/python3.11/site-packages
        cp "$0" .venv/bin/python
        printf '#!/bin/bash\necho "ampcompare $*" >>calls\nexit "${STUB_COMMAND:-0}"\n' >.venv/bin/ampcompare
        chmod +x .venv/bin/ampcompare
        echo "VIRTUAL_ENV=$PWD/.venv" >.venv/bin/activate
        case "$*" in *system*) kept=true ;; *) kept=false ;; esac
        echo "include-system-site-packages = $kept" >.venv/pyvenv.cfg
        ;;
    "-m pip")
        shift 2
        echo "pip $*" >>calls
        [ -z "${STUB_INTERRUPT:-}" ] || { kill -INT $PPID; exit 1; }
        [ -z "${STUB_PIP:-}" ] || { printf "$STUB_PIP\n" >&2; exit 1; }
        ;;
    *)
        echo "python $* threads=${OMP_NUM_THREADS:-}" >>calls
        [ "$2" != "${STUB_FAILING:-}" ]
        ;;
esac
"""
LARGE = 20 * 1024 * 1024
NO_WHEEL = "ERROR: No matching distribution found for torch"
NO_NETWORK = (
    "WARNING: Retrying after connection broken by NewConnectionError\\nERROR: No matching "
    "distribution found for torch"
)


@dataclass
class Frame:
    """A copy of what the scripts read, with a PATH on which the stand-ins come first."""

    root: Path
    bin: Path
    environment: dict[str, str] = field(default_factory=dict)

    def program(self, name: str, text: str) -> Path:
        """Put an executable on the PATH."""
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of the copy from another folder, as a user may."""
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.root),
            **self.environment,
            **variables,
        }
        environment.setdefault("STACK_PYTHON", "none")  # whatever torch the machine has
        return subprocess.run(
            [str(self.root / script), *arguments],
            env=environment,
            cwd=self.root.parent,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def fails(self, **variables: str) -> str:
        """Run the tests' script, expect it to end with exit code 4, and return its last line."""
        done = self.run("scripts/test", **variables)
        assert done.returncode == 4, done
        assert "Traceback" not in done.stderr
        lines = done.stderr.splitlines()
        assert all(line.startswith("scripts/test: ") for line in lines), lines
        return lines[-1]

    def calls(self) -> list[str]:
        """Return what the stand-ins were asked to do, in order."""
        path = self.root / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def installations(self) -> int:
        """Return how often the project itself was installed."""
        return sum(" -e " in call for call in self.calls())


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    """A fresh copy, on a machine with Python 3.11, much space and no GPU."""
    root, programs = tmp_path / "a checkout", tmp_path / "bin"
    programs.mkdir()
    for folder in ("scripts", "constraints", ".ci"):
        shutil.copytree(ROOT / folder, root / folder)
    shutil.copy(ROOT / "setup.py", root)
    for name in ("packages", "containers"):  # which would install packages and build images for minutes
        (root / ".ci" / name).write_text(f'#!/bin/bash\necho .ci/{name} >>"{root}/calls"\n', encoding="utf-8")
    made = Frame(root, programs)
    made.program("python3", PYTHON_STUB)
    made.program("nvidia-smi", "#!/bin/bash\nexit 9\n")
    made.program("df", f"#!/bin/bash\necho Filesystem\necho /dev/disk 1 1 {LARGE} 1% /\n")
    return made


def test_second_call_installs_nothing(frame: Frame) -> None:
    """The first call installs, the second goes straight to pytest and says nothing."""
    first = frame.run("scripts/test")
    assert (first.returncode, frame.installations()) == (0, 1)
    assert "installing into .venv" in first.stderr
    before = len(frame.calls())
    second = frame.run("scripts/test")
    assert (second.returncode, second.stderr) == (0, "")
    assert frame.calls()[before:] == ["python -m pytest --numprocesses auto --dist loadgroup threads=1"]


def test_interrupted_installation_starts_afresh(frame: Frame) -> None:
    """What a killed installation left behind is removed, not taken as complete."""
    frame.run("scripts/test")
    (frame.root / ".venv" / ".installing").write_text("999999999\n", encoding="utf-8")
    (frame.root / ".venv" / "half-written").touch()
    assert frame.run("scripts/test").returncode == 0
    assert frame.installations() == 2
    assert not (frame.root / ".venv" / "half-written").exists()


def test_moved_checkout_starts_afresh(frame: Frame) -> None:
    """An environment copied with its checkout names the old folder inside, so it is made anew."""
    frame.run("scripts/test")
    frame.root = shutil.copytree(frame.root, frame.root.parent / "elsewhere")
    frame.run("scripts/test")
    assert sum(call.startswith("venv") for call in frame.calls()) == 2


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"STUB_VERSION": "3.8"}, ["Python 3.11 to 3.14 is needed", "is 3.8"]),
        ({"PYTHON": "/nowhere/python"}, ["/nowhere/python cannot be run"]),
        ({"STUB_NO_VENV": "1"}, ["lacks venv and ensurepip", "python3-venv"]),  # as Debian's Python
    ],
)
def test_an_unfit_python_is_one_line(frame: Frame, variables: dict[str, str], parts: list[str]) -> None:
    """Too old, missing, or without a module that it needs: the line says which, and nothing is called."""
    line = frame.fails(**{"PYTHON": str(frame.bin / "python3"), **variables})
    assert [part for part in parts if part not in line] == []
    assert frame.calls() == []


def test_little_space_is_one_line(frame: Frame) -> None:
    """Too little space is found before anything is downloaded."""
    frame.program("df", f"#!/bin/bash\necho Filesystem\necho /dev/disk 1 1 {1024 * 1024} 99% /\n")
    assert "has 1 GB free, and 2 GB are needed" in frame.fails()
    assert frame.calls() == []
    frame.program("nvidia-smi", "#!/bin/bash\necho GPU 0\n")
    assert "8 GB are needed" in frame.fails()


@pytest.mark.parametrize(
    ("output", "parts", "environments"),
    [
        (
            NO_NETWORK,
            ["the package registry cannot be reached", "No matching distribution found for torch"],
            1,
        ),
        ("ERROR: Could not install: [Errno 28] No space left on device", ["the disk is full"], 2),
        ("ERROR: pip broke", ["pip broke"], 2),
    ],
)
def test_a_failed_installation_is_one_line(
    frame: Frame, output: str, parts: list[str], environments: int
) -> None:
    """After it the next call installs; into the same environment only where pip had surely changed nothing."""
    line = frame.fails(STUB_PIP=output)
    assert [part for part in parts if part not in line] == []
    assert sum(call.startswith("pip") for call in frame.calls()) == 1
    assert frame.run("scripts/test").returncode == 0
    assert frame.installations() == 1
    assert sum(call.startswith("venv") for call in frame.calls()) == environments


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the plain torch has no CUDA, and there is one source"
)
def test_no_wheel_is_one_line(frame: Frame) -> None:
    """No wheel of torch: PyTorch's own CPU index is asked too, for torch alone, then one line names the Python."""
    line = frame.fails(STUB_PIP=NO_WHEEL)
    assert "there is no CPU wheel of torch 2.13.0+cpu for Python 3.11" in line
    first, second = [call for call in frame.calls() if call.startswith("pip")]
    assert first == "pip install --retries 1 --no-deps torch==2.13.0+cpu"
    assert "--index-url https://" in second
    assert second.endswith("--no-deps torch==2.13.0+cpu")


def test_cpu_machine_gets_no_cuda(frame: Frame) -> None:
    """Without a GPU torch and torchvision come first and alone, and everything is held to the CPU pins."""
    frame.run("scripts/test")
    pips = [call for call in frame.calls() if call.startswith("pip")]
    assert pips == [
        "pip install --retries 1 --no-deps torch==2.13.0+cpu",
        "pip install --retries 1 --no-deps torchvision==0.28.0+cpu",
        "pip install --retries 1 -c constraints/cpu.txt -e "
        ".[torch,dev,html,slurm,tensorboard,accelerate,fabric,fp8,notebook]",
    ]


def test_gpu_machine_gets_the_cuda_pair(frame: Frame) -> None:
    """With a GPU the pair of the CUDA pins comes from the registry in one step."""
    frame.program("nvidia-smi", "#!/bin/bash\necho GPU 0\n")
    frame.run("scripts/test")
    pips = [call for call in frame.calls() if call.startswith("pip")]
    assert pips == [
        "pip install --retries 1 -c constraints/cuda.txt -e "
        ".[torch,dev,html,slurm,tensorboard,accelerate,fabric,fp8,notebook]"
    ]


def test_torch_of_a_gpu_image_is_used(frame: Frame) -> None:
    """A base Python whose torch works on the GPU lends it: nothing pins or replaces it, at later installations too."""
    frame.program("nvidia-smi", "#!/bin/bash\necho GPU 0\n")
    frame.run("scripts/demo", STUB_NO_TORCH="0")
    frame.run("scripts/test", STUB_NO_TORCH="0")
    setup = [call for call in frame.calls() if call.startswith(("venv", "pip"))]
    assert setup == [
        "venv --system-site-packages .venv",
        "pip install --retries 1 -e .[torch,html]",
        "pip install --retries 1 -e .[torch,dev,html,slurm,tensorboard,accelerate,fabric,fp8,notebook]",
    ]


def test_demo_runs_the_comparison(frame: Frame) -> None:
    """The demo passes its arguments on and its exit code back, and says how to reach the command."""
    done = frame.run("scripts/demo", "--epochs", "1", STUB_COMMAND="3")
    assert (
        frame.calls()[-1] == "ampcompare compare --seeds 0-4 --margin 0.5 --output-dir runs/demo --epochs 1"
    )
    assert done.returncode == 3
    assert "activate" in done.stderr.splitlines()[-1]


def test_several_versions_are_asked_for_at_once(frame: Frame) -> None:
    """Of several `--session` options nox takes the last alone."""
    assert frame.run("scripts/test-versions", "old-stack", "middle-stack", "--", "-k", "kill").returncode == 0
    assert frame.calls()[-1] == "python -m nox --session old-stack middle-stack -- -k kill threads="


@pytest.mark.slow
def test_ci_runs_check_and_tests(frame: Frame) -> None:
    assert frame.run(".ci/run").returncode == 0
    calls = frame.calls()
    needs_packages = [
        calls.index(call) for call in calls if call == ".ci/containers" or " -m pytest " in call
    ]
    assert (
        len(needs_packages) == 4
    )  # images, the collection, the tests, and those that depend on the processor once more
    assert calls.index(".ci/packages") < min(needs_packages)
    asked = [call.split()[2] for call in calls if call.startswith("python")]
    # Some of it at the same time.
    assert sorted(asked) == ["mkdocs", "mypy", "nox", "nox", "pytest", "pytest", "pytest", "ruff", "ruff"]
    assert frame.installations() == 1


@pytest.mark.parametrize(
    "failing", ["pytest", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mypy", "mkdocs", "nox"))]
)
def test_ci_fails_with_any_part_of_it(frame: Frame, failing: str) -> None:
    """The tests and the images run whatever fails."""
    assert frame.run(".ci/run", STUB_FAILING=failing).returncode != 0
    tests = "python -m pytest --numprocesses auto --dist loadgroup -m not slow threads=1"
    assert {tests, ".ci/containers"} <= set(frame.calls())


def test_a_gpu_is_checked_with_the_python_of_the_machine(frame: Frame) -> None:
    """Where python3 has torch nothing is installed, and words go on to the check."""
    done = frame.run("scripts/gpu-check", "--part", "smoke", "--out", "here")
    assert done.returncode == 0
    assert frame.installations() == 0
    calls = (frame.root.parent / "calls").read_text()
    assert "python -m benchmarks.gpu --part smoke --out here threads=1" in calls


def test_wheels_for_a_gpu_check_come_from_a_folder(frame: Frame) -> None:
    """Wheels are unpacked without an index into a folder for this call; where they do not fit, exit code 4 says so."""
    (frame.root.parent / "carried").mkdir()
    (frame.root.parent / "carried" / "one.whl").touch()
    assert frame.run("scripts/gpu-check", "--wheels", "carried").returncode == 0
    pip = next(
        line for line in (frame.root.parent / "calls").read_text().splitlines() if line.startswith("pip")
    )
    assert "--no-index" in pip
    assert pip.endswith("carried/one.whl")
    assert not Path(pip.split("--target ")[1].split()[0]).exists()
    broken = frame.run("scripts/gpu-check", "--wheels", "carried", STUB_PIP="no such tag")
    assert broken.returncode == 4
    assert broken.stderr.splitlines()[-1] == "gpu-check: the wheels in carried do not fit python3"


def test_a_gpu_check_without_torch_sets_up(frame: Frame) -> None:
    """Where python3 has no torch, .venv is set up as for the other scripts, and its interpreter runs the check."""
    frame.program("python3", PYTHON_STUB.replace("case", '[ "$2" != "import torch" ] || exit 1\ncase', 1))
    done = frame.run("scripts/gpu-check", "--rehearse", "--out", "here")
    assert done.returncode == 0, done
    assert frame.installations() == 1
    assert (
        "python -m benchmarks.gpu --rehearse --out here threads=1"
        in (frame.root.parent / "calls").read_text()
    )
