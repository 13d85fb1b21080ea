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


def _places(value: Any, depth: int = 0) -> list[tuple[Any, Any]]:
    """Return every entry of the dicts and lists of a state, as the container and the key."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    below = [place for _, item in items if depth < 12 for place in _places(item, depth + 1)]
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
        holder, key = chance.choice(_places(state))
        kind = chance.randrange(6)
        if kind <= 2:
            holder[key] = _odd(holder[key], chance)
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[chance.choice([0, "", "x" * 5000, (1, "a"), None, b"k"])] = holder.pop(key)
        else:
            other, name = chance.choice(_places(state))
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
    holder, key = chance.choice(_places(state))
    holder[key] = _Call(chance.choice([exec, eval]), f"open({mark!r},'w')")
    file = io.BytesIO()
    torch.save(state, file)
    return _with_checksum(file.getvalue())


# One command in a process of its own.


def forked(command: Callable[[], int], mark: Path, log: Path, *, starts_none: bool = True) -> Outcome:
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


@click.command()
@click.option("--count", default=500, show_default=True, help="mutated files")
@click.option("--seed", default=0, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="folder for files that break a rule")
def fuzz(count: int, seed: int, keep: Path | None) -> None:
    """Read mutated checkpoints, and print what came of it."""
    with tempfile.TemporaryDirectory() as name:
        faults = _all(count, seed, Path(name), keep)
    raise SystemExit(bool(faults))


def _all(count: int, seed: int, scratch: Path, keep: Path | None) -> int:
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    good: dict[str, Path] = {}
    for number, arm in enumerate(ARMS):
        folder = scratch / f"good{number}"

        def made(arm: str = arm, folder: Path = folder) -> int:
            folder.mkdir()
            return int(run_cell(_config(arm, saving={"every_steps": 5, "keep_last": 9}), folder).status != "completed")

        outcome = forked(made, scratch / "mark", scratch / "log", starts_none=False)
        if outcome.code:
            raise click.ClickException(f"the run of {arm} ended with {outcome}: {(scratch / 'log').read_text()}")
        good[arm] = sorted((folder / "checkpoints").glob("step-*.pt"))[0]
        outcome = forked(
            lambda arm=arm: _resumed(arm, good[arm], scratch / "cell"),
            scratch / "mark",
            scratch / "log",
            starts_none=False,
        )
        if outcome.code:
            raise click.ClickException(f"{arm} cannot resume: {outcome}: {(scratch / 'log').read_text()}")
    path, out, mark = scratch / "mutated.pt", scratch / "out.pt", scratch / "mark"
    codes: Counter[tuple[str, int]] = Counter()
    worst: list[tuple[float, int, int, str]] = []
    slowest, faults = 0.0, 0
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        arm = chance.choice(ARMS)
        kind = chance.choice(["structure", "structure", "bytes", "crafted", "crafted"])
        while True:
            try:
                if kind == "structure":
                    data = _mutated_state(read_checkpoint(good[arm]), chance)
                elif kind == "bytes":
                    data = _mutated_bytes(good[arm].read_bytes(), chance)
                else:
                    data = _crafted(read_checkpoint(good[arm]), chance, str(mark))
                break
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, RecursionError):
                continue  # torch cannot write that, or nothing is left to mutate
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
            outcome = forked(command, mark, scratch / "log", starts_none=what != "resume")
            codes[what, outcome.code] += 1
            slowest = max(slowest, outcome.seconds)
            bound = max(MEMORY, 10 * len(data))
            worst.append((outcome.grown / bound, outcome.grown >> 20, len(data), f"{what} of {kind} {number}"))
            fault = outcome.fault or (
                f"{outcome.grown >> 20} MiB for {len(data):,} bytes" if outcome.grown > bound else ""
            )
            if fault:
                faults += 1
                last = (scratch / "log").read_text(errors="replace").strip().splitlines()[-1:]
                print(f"FAULT {what} of {kind} {number} ({arm}): {fault}: {''.join(last)[:300]}", flush=True)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, keep / f"{number}.pt")
                    shutil.copy(scratch / "log", keep / f"{number}-{what.replace(' ', '-')}.log")
    print(f"{count} files, {sum(codes.values())} commands, {faults} faults; the slowest took {slowest:.1f} s")
    for (what, code), times in sorted(codes.items()):
        print(f"  {what:10} exit code {code}: {times}")
    print("most memory, in MiB beyond the start, of files of so many bytes:")
    for _, grown, size, what in sorted(worst, reverse=True)[:20]:
        print(f"  {grown:5d} {size:10,d}  {what}")
    return faults


if __name__ == "__main__":
    fuzz()
