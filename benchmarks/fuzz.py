"""What mutated checkpoints do to the commands that read them: exit codes, memory, time, and whether code of them runs.

    python benchmarks/fuzz.py [--count 500] [--seed 0] [--keep DIR]

Each file is a checkpoint of a short run with entries replaced, removed or moved and its checksum computed again; or one
with bytes flipped, cut or repeated; or a pickle, an archive, a safetensors or tar file made to attack readers. It is
read by `convert --inspect`, by `convert --to native` and `--to apex`, and by a run that resumes from it, each in a
process forked from this one. Its memory is the growth of the largest resident set of that process. An audit hook sees
whether a reader starts a command, connects or removes a folder; a call in the file would leave a mark. A fault is an
exit code other than 0, 1 and 2, a traceback, a message of several lines, code that ran, or memory beyond 200 MiB and
ten times the size of the file. Exit code 1 if there is a fault; `--keep` keeps these files.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
import xxhash
from safetensors.torch import save

from ampcompare.cli import main
from ampcompare.experiment.launch.worker.cell import run_cell
from ampcompare.runs.settings.config import RunConfig
from ampcompare.training.checkpoint.store.file import read_checkpoint
from ampcompare.training.checkpoint.store.frame import COMMENT, COMMENT_SIZE

ARMS = ("apex:O1,engine=compat", "half:bn_fp32", "native:bf16", "apex:O2,engine=compat,loss_scale=64", "fp32")
MEMORY = 200 << 20
SECONDS = 60
CALLED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "shutil.rmtree")


class Outcome(NamedTuple):
    """What one command made of one file: its exit code, growth of memory in bytes, seconds, and a fault or ""."""

    code: int
    grown: int
    seconds: float
    fault: str


def _config(arm: str, **values: Any) -> RunConfig:
    recipe = {
        "data": {"name": "synthetic", "train_size": 64, "val_size": 32, "image_size": 8},
        "model": {"arch": "convnet", "args": {"width": 4}},
        "batch_size": 16,
        "epochs": 2,
        "ema_decay": 0.9,
    }
    return RunConfig.model_validate({"recipe": recipe, "arm": arm, "drain_every": 1, "device": "cpu", **values})


def _with_checksum(data: bytes) -> bytes:
    """Return an archive without a comment as a checkpoint whose checksum is right."""
    plain = data[:-2] + bytes(2)
    comment = COMMENT.format(xxhash.xxh3_128(plain).hexdigest()).encode()
    return plain[:-2] + len(comment).to_bytes(2, "little") + comment


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


# Mutations of structure.


def places(value: Any, deepest: int = 12) -> list[tuple[Any, Any]]:
    """Return every entry of nested dicts and lists, as the container and the key."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    below = [place for _, item in items if deepest > 0 for place in places(item, deepest - 1)]
    return [(value, key) for key, _ in items] + below


def _odd(old: Any, chance: random.Random) -> Any:
    """Return a value that does not belong there."""
    nested: Any = []
    for _ in range(chance.choice([3, 70, 200])):
        nested = [nested]
    odd = [None, -1, 2**63, -(2**200), 1e308, float("nan"), "\0", "é" * 3000, b"\xff", nested, {1: 2}, [[]], (None,)]
    odd += [torch.empty(0), torch.zeros(1).expand(2**31), torch.ones(3, dtype=torch.bool), torch.zeros(2, 2).t()]
    if isinstance(old, torch.Tensor):
        odd += [old.to(torch.bfloat16), old.to(torch.float64), old.reshape(-1)[:1], torch.cat([old.reshape(-1)] * 2)]
        odd += [torch.full_like(old, 3), old.unsqueeze(0), torch.nn.Parameter(old.float()), old.to_sparse()]
    if type(old) in (int, float):
        odd += [old + 1, -old, str(old), bool(old), complex(old)]
    return chance.choice(odd)


def _mutated_state(state: Any, chance: random.Random) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        holder, key = chance.choice(places(state))
        kind = chance.randrange(6)
        if kind <= 2:
            holder[key] = _odd(holder[key], chance)
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[chance.choice([0, "", "x" * 5000, (1, "a"), None, b"k"])] = holder.pop(key)
        else:
            other, name = chance.choice(places(state))
            with contextlib.suppress(LookupError):
                holder[key], other[name] = other[name], holder[key]
    return _with_checksum(_saved(state))


# Mutations of bytes.


def _mutated_bytes(good: bytes, chance: random.Random) -> bytes:
    data = bytearray(good[:-COMMENT_SIZE])
    for _ in range(chance.randint(1, 12)):
        place = chance.randrange(len(data))
        size = chance.choice([1, 4, 60, 2000])
        kind = chance.randrange(5)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place : place + size] = data[chance.randrange(len(data)) :][:size]
        elif kind == 2:
            del data[place : place + size]
        elif kind == 3:
            data[place : place + 4] = struct.pack("<I", chance.choice([0, 1, 2**31 - 1, 2**32 - 1]))
        else:
            data[place:place] = chance.randbytes(size)
    return _with_checksum(bytes(data)) if chance.random() < 0.8 and len(data) > 2 else bytes(data)


# Files made to attack.


class _Call:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _program(chance: random.Random, mark: str) -> bytes:
    """Return a pickle that calls, repeats or nests what a loader may give it."""
    name = chance.choice([
        *("builtins eval", "builtins exec", "os system", "posix system", "subprocess Popen", "builtins getattr"),
        *("torch load", "torch.hub load", "importlib import_module", "runpy run_path", "webbrowser open", "pty spawn"),
        *("builtins bytearray", "builtins list", "builtins set", "collections OrderedDict", "collections Counter"),
        *("_codecs encode", "torch.storage _load_from_bytes", "torch._utils _rebuild_tensor_v2", "numpy zeros"),
        *("torch._utils _rebuild_parameter", "torch zeros", "functools reduce", "operator attrgetter", "builtins type"),
        *("numpy.core.multiarray scalar", "numpy.core.multiarray _reconstruct", "copyreg _reconstructor"),
        *("torch.serialization _get_layout", "collections defaultdict", "torch Size", "builtins complex"),
    ])  # fmt: skip
    module, attribute = name.split()
    text = f"open({mark!r},'w')".encode()
    first = chance.choice([b"X" + struct.pack("<I", len(text)) + text, b"J\xff\xff\xff\x7f", b"]", b"}", b"N"])
    if chance.random() < 0.4:
        size = chance.choice([10**3, 10**5, 10**6])
        first = b"X" + struct.pack("<I", size) + b"a" * size
    call = f"c{module}\n{attribute}\n".encode()
    times = chance.choice([1, 50, 3000])
    arguments = chance.choice([b"h\x00\x85", b"h\x00h\x00\x86", b"h\x00h\x00h\x00\x87", b")", b"h\x00K\x03\x86"])
    tail = chance.choice([b"", b"}b", b"h\x00b", b"N\x85b", b"(h\x00h\x00u", b"(h\x00e"])
    begin = b"\x80" + bytes([chance.choice([2, 4])])
    return begin + first + b"q\x000" + call + b"q\x010](" + (b"h\x01" + arguments + b"R" + tail) * times + b"e."


def _crafted(state: Any, chance: random.Random, mark: str) -> bytes:
    kind = chance.randrange(9)
    program = _program(chance, mark)
    if kind <= 2:
        return program
    if kind in (3, 4):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", chance.choice([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED])) as archive:
            archive.writestr("archive/data.pkl", program)
            archive.writestr(chance.choice(["archive/data/0", "../../up", "/abs", "archive/data/0" * 300]), bytes(4096))
            archive.writestr("archive/version", b"3\n")
        return _with_checksum(file.getvalue()) if kind == 4 else file.getvalue()
    if kind == 5:
        data = bytearray(save({f"w{number}": torch.zeros(8) for number in range(chance.choice([1, 40]))}))
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        old, new = chance.choice([
            *((b"[8]", b"[9999999999]"), (b"[8]", b"[-8]"), (b"F32", b"F99"), (b"[8]", b"[" * 3000)),
            (b'"w0"', b'"\\ud800"'),
            *((b"[0,32]", b"[32,0]"), (b"[0,32]", b"[0,1e9]"), (b"[8]", b"[8" + b",1" * 5000 + b"]"), (b"{", b"")),
        ])  # fmt: skip
        header = header.replace(old, new)
        size = chance.choice([len(header)] * 5 + [2**62, 0])
        return struct.pack("<Q", size) + bytes(header) + bytes(data[-32:])
    if kind == 6:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in ("sys_info", "pickle", "storages", "../../evil"):
                info = tarfile.TarInfo(name)
                info.size = len(program)
                tar.addfile(info, io.BytesIO(program))
        return file.getvalue()
    if kind == 7:
        head = (
            pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
        )
        return head + program + pickle.dumps(["0"], 2) + bytes(64)
    holder, key = chance.choice(places(state))
    holder[key] = _Call(chance.choice([exec, eval]), f"open({mark!r},'w')")
    file = io.BytesIO()
    torch.save(state, file)
    return _with_checksum(file.getvalue())


# One command in a process of its own.


def forked(command: Callable[[], int], mark: Path, log: Path, *, starts_none: bool = True) -> Outcome:
    """Run a command in a child; with `starts_none`, see whether it starts a command, connects or removes a folder."""
    begin = time.monotonic()
    child = os.fork()
    if not child:
        code = 199
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with log.open("w") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        signal.alarm(SECONDS)
        try:
            if starts_none:
                sys.addaudithook(lambda event, _: mark.touch() if event in CALLED else None)
            code = command()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            log.with_suffix(".memory").write_text(str(grown * 1024))
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seconds = time.monotonic() - begin
    memory = log.with_suffix(".memory")
    grown = int(memory.read_text()) if memory.exists() else 0
    memory.unlink(missing_ok=True)
    text = log.read_text(errors="replace")
    fault = ""
    if mark.exists():
        fault = "code ran"
        mark.unlink()
    elif code not in (0, 1, 2):
        fault = f"exit code {code}"
    elif "Traceback" in text or "internal error" in text:
        fault = "traceback"
    elif code and len([line for line in text.splitlines() if line.startswith(("ampcompare: ", "Error: "))]) != 1:
        fault = "not one line"
    return Outcome(code, grown, seconds, fault)


class Reader:
    """Runs commands on mutated files, and counts what comes of it.

    Attributes:
        mark: a file that the code in a mutated file would make.
        log: what the last command printed.
        faults: commands that broke a rule.
    """

    def __init__(self, scratch: Path, keep: Path | None) -> None:
        self.mark, self.log, self.keep = scratch / "mark", scratch / "log", keep
        self.codes: Counter[tuple[str, int]] = Counter()
        self.faults, self.slowest = 0, 0.0
        self.worst: list[tuple[float, int, int, str]] = []

    def must(self, what: str, command: Callable[[], int]) -> None:
        """Run a command that prepares; it has to end with 0."""
        outcome = forked(command, self.mark, self.log, starts_none=False)
        if outcome.code:
            raise click.ClickException(f"{what} ended with {outcome}: {self.log.read_text()}")

    def read(self, what: str, command: Callable[[], int], label: str, file: Path, *, starts_none: bool = True) -> None:
        """Run one command on a mutated file, and keep the file if it breaks a rule.

        Args:
            label: of the file, for the lines that are printed and for the names of what is kept.
        """
        size = file.stat().st_size
        outcome = forked(command, self.mark, self.log, starts_none=starts_none)
        self.codes[what, outcome.code] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        bound = max(MEMORY, 10 * size)
        self.worst.append((outcome.grown / bound, outcome.grown >> 20, size, f"{what} of {label}"))
        fault = outcome.fault or (f"{outcome.grown >> 20} MiB for {size:,} bytes" if outcome.grown > bound else "")
        if not fault:
            return
        self.faults += 1
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        print(f"FAULT {what} of {label}: {fault}: {''.join(last)[:300]}", flush=True)
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            name = label.replace(" ", "-")
            shutil.copy(file, self.keep / f"{name}{file.suffix}")
            shutil.copy(self.log, self.keep / f"{name}-{what.replace(' ', '-')}.log")

    def summarize(self, count: int) -> None:
        """Print counts, and the commands that took most memory."""
        commands = sum(self.codes.values())
        print(f"{count} files, {commands} commands, {self.faults} faults; the slowest took {self.slowest:.1f} s")
        for (what, code), times in sorted(self.codes.items()):
            print(f"  {what:10} exit code {code}: {times}")
        print("most memory, in MiB beyond the start, of files of so many bytes:")
        for _, grown, size, what in sorted(self.worst, reverse=True)[:20]:
            print(f"  {grown:5d} {size:10,d}  {what}")


def _resumed(arm: str, path: Path, folder: Path) -> int:
    """Resume in this process; return the exit code that the command would end with."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):
        record = run_cell(_config(arm, saving={"resume": str(path)}), folder)
    if record.status != "failed":
        return 0
    print(f"ampcompare: {record.error}")
    return int(record.environment["exit_code"])


def fuzzing(read: Callable[[int, int, Path, Reader], None]) -> click.Command:
    """Return the command line of a program that reads mutated files: `read` gets count, seed, scratch and reader."""

    @click.command(help=sys.modules[read.__module__].__doc__)
    @click.option("--count", default=500, show_default=True, help="mutated files")
    @click.option("--seed", default=0, show_default=True)
    @click.option("--keep", type=click.Path(path_type=Path), help="folder for files that break a rule")
    def fuzz(count: int, seed: int, keep: Path | None) -> None:
        with tempfile.TemporaryDirectory() as name:
            reader = Reader(Path(name), keep)
            read(count, seed, Path(name), reader)
        reader.summarize(count)
        raise SystemExit(bool(reader.faults))

    return fuzz


def _good(arm: str, folder: Path, scratch: Path, reader: Reader) -> Path:
    """Train a run that saves, and return a checkpoint of it that a run can resume from."""

    def made() -> int:
        folder.mkdir()
        return int(run_cell(_config(arm, saving={"every_steps": 5, "keep_last": 9}), folder).status != "completed")

    reader.must(f"the run of {arm}", made)
    path = sorted((folder / "checkpoints").glob("step-*.pt"))[0]
    reader.must(f"the run that resumes {arm}", lambda: _resumed(arm, path, scratch / "cell"))
    return path


def _mutated(kind: str, good: Path, chance: random.Random, mark: Path) -> bytes:
    while True:
        try:
            if kind == "structure":
                return _mutated_state(read_checkpoint(good), chance)
            if kind == "bytes":
                return _mutated_bytes(good.read_bytes(), chance)
            return _crafted(read_checkpoint(good), chance, str(mark))
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, RecursionError):
            continue  # torch cannot write that, or nothing is left to mutate


def read_checkpoints(count: int, seed: int, scratch: Path, reader: Reader) -> None:
    """Read mutated checkpoints."""
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    good = {arm: _good(arm, scratch / f"good{number}", scratch, reader) for number, arm in enumerate(ARMS)}
    path, out = scratch / "mutated.pt", scratch / "out.pt"
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        arm = chance.choice(ARMS)
        kind = chance.choice(["structure", "structure", "bytes", "crafted", "crafted"])
        data = _mutated(kind, good[arm], chance, reader.mark)
        if len(data) > 50 << 20:  # an expanded tensor that was written in full
            continue
        path.write_bytes(data)
        commands: dict[str, Callable[[], int]] = {
            "inspect": lambda: main(["convert", "--inspect", str(path)]),
            "to native": lambda: main(["convert", str(path), str(out), "--to", "native"]),
            "to apex": lambda: main(["convert", str(path), str(out), "--to", "apex", "--apex-layout"]),
            "resume": lambda arm=arm: _resumed(arm, path, scratch / "cell"),
        }
        for what, command in commands.items():
            out.unlink(missing_ok=True)
            reader.read(what, command, f"{kind} {number} {arm}", path, starts_none=what != "resume")


if __name__ == "__main__":
    fuzzing(read_checkpoints)()
