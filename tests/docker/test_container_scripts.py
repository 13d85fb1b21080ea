"""`scripts/docker-build`, `docker-run` and `docker-test` with stand-ins for the engines: what they would call."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Writes each call to the file "calls"; plays a docker whose daemon answers or not, and containers of buildah.
ENGINE = """#!/bin/bash
name=${0##*/}
if [ "$1" = info ]; then exit "${STUB_DAEMON:-0}"; fi
printf '%s' "$name" >>"$STUB_CALLS"
printf ' [%s]' "$@" >>"$STUB_CALLS"
echo >>"$STUB_CALLS"
if [ "$1" = from ]; then echo box-1; fi
exit "${STUB_EXIT:-0}"
"""


@dataclass
class Frame:
    """A copy of the scripts, a user's folder, and a PATH that has only what tests put there."""

    root: Path
    bin: Path
    user: Path

    def has(self, *names: str) -> None:
        """Install stand-ins for these engines."""
        for name in names:
            (self.bin / name).write_text(ENGINE, encoding="utf-8")
            (self.bin / name).chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script from the user's folder."""
        environment = {"PATH": str(self.bin), "STUB_CALLS": str(self.root / "calls"), **variables}
        command = [str(self.bin / "bash"), str(self.root / "scripts" / script), *arguments]
        return subprocess.run(
            command,
            env=environment,
            cwd=self.user,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def calls(self) -> list[str]:
        """Return what the engines were asked to do, each argument in brackets."""
        path = self.root / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    """A machine without a GPU and without any engine."""
    made = Frame(tmp_path / "a checkout", tmp_path / "bin", tmp_path / "my work")
    for folder in (made.bin, made.user, made.root / "ampcompare" / "base"):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "scripts", made.root / "scripts")
    shutil.copy(ROOT / "ampcompare/base/version.py", made.root / "ampcompare/base")
    for name in ("bash", "cat", "dirname", "find", "grep", "id", "mkdir", "mktemp", "rm", "sed", "tail"):
        program = shutil.which(name)
        assert program is not None
        (made.bin / name).symlink_to(program)
    return made


@pytest.mark.parametrize("script", ["docker-build", "docker-run", "docker-test"])
def test_no_engine(frame: Frame, script: str) -> None:
    """Without any engine there is one line that says so, and exit code 4."""
    done = frame.run(script)
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        f"scripts/{script}: no docker, podman or buildah here: install one, or use scripts/demo, which needs none"
    ]


def test_docker_without_daemon(frame: Frame) -> None:
    """A client of docker whose daemon is down is not taken for an engine; podman is used where it is."""
    frame.has("docker")
    done = frame.run("docker-build", STUB_DAEMON="1")
    assert done.returncode == 4
    assert "daemon of docker does not answer" in done.stderr
    frame.has("podman")
    assert frame.run("docker-build", STUB_DAEMON="1").returncode == 0
    assert frame.calls()[0].startswith("podman [build] [--format] [docker]")


def test_build_of_each_kind(frame: Frame) -> None:
    """The kind names file and image; options of the environment and of the caller reach the builder, these last."""
    frame.has("docker")
    frame.run("docker-build", "cpu", "--pull", CONTAINER_BUILD_OPTIONS="--build-arg TORCH_INDEX=")
    frame.run("docker-build", "gpu")
    cpu, gpu = frame.calls()
    assert cpu.endswith(
        "[--build-arg] [TORCH_INDEX=] [--pull] [-f] [docker/Dockerfile.cpu] [-t] [ampcompare:cpu] [.]"
    )
    assert "[--build-arg] [VERSION=0." in cpu
    assert "--format" not in cpu
    assert gpu.endswith("[-f] [docker/Dockerfile] [-t] [ampcompare:gpu] [.]")


def test_kind_follows_the_machine(frame: Frame) -> None:
    """Without a kind it is cpu, and gpu where a GPU answers."""
    frame.has("docker")
    frame.run("docker-build")
    (frame.bin / "nvidia-smi").symlink_to("/bin/true")
    frame.run("docker-build")
    assert [call.rpartition("[-t] ")[2] for call in frame.calls()] == [
        "[ampcompare:cpu] [.]",
        "[ampcompare:gpu] [.]",
    ]


def test_run_mounts_the_users_folder(frame: Frame) -> None:
    """The folder of the caller is mounted whatever its name, with both volumes of the image, as the caller."""
    frame.has("docker")
    assert frame.run("docker-run", "cpu", "compare", "--tag", "two words").returncode == 0
    (call,) = frame.calls()
    for option in (
        f"[--volume] [{frame.user}:/workspace]",
        f"[--volume] [{frame.user}/runs:/workspace/runs]",
        f"[--volume] [{frame.user}/data:/workspace/data]",
        f"[--user] [{os.getuid()}:{os.getgid()}]",
    ):
        assert option in call
    assert call.endswith("[--entrypoint] [ampcompare] [ampcompare:cpu] [compare] [--tag] [two words]")
    assert "gpus" not in call
    assert (frame.user / "runs").is_dir()


def test_gpu_is_passed_on(frame: Frame) -> None:
    """docker and podman each have their own word for it, and buildah none."""
    frame.has("docker", "podman", "buildah")
    frame.run("docker-run", "gpu", "list")
    frame.run("docker-run", "gpu", "list", CONTAINER_ENGINE="podman")
    refused = frame.run("docker-run", "gpu", "list", CONTAINER_ENGINE="buildah")
    docker, podman = frame.calls()
    assert "[--gpus] [all]" in docker
    assert "[--device] [nvidia.com/gpu=all]" in podman
    assert refused.returncode == 4
    assert "buildah passes no GPU on" in refused.stderr


def test_buildah_names_the_command(frame: Frame) -> None:
    """buildah knows no entry point, so the command is named; volumes that would hide the mounts are dropped."""
    frame.has("buildah")
    assert frame.run("docker-run", "cpu", "list").returncode == 0
    made, changed, ran, removed = frame.calls()
    assert made == "buildah [from] [ampcompare:cpu]"
    assert changed == "buildah [config] [--volume] [/workspace/runs-] [--volume] [/workspace/data-] [box-1]"
    assert ran.endswith("[box-1] [--] [ampcompare] [list]")
    assert removed == "buildah [rm] [box-1]"
