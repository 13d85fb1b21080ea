"""Recorded scenarios on this device: our engine against the recording, and against the real Apex on the same device.

The recording was made on a CPU, so dtypes, loss scales and skipped steps must be equal, and numbers need not be. The
real Apex, where its sources are given, runs on this very device with the same deterministic kernels: then every bit of
every step must be equal. Where bits differ, our engine runs again: a scenario that differs from itself says nothing of
Apex.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import ROOT
from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Report

TESTS = ROOT / "tests" / "apex"
RECORDINGS = TESTS / "golden" / "apex-25.05"
RECORDED = 98
UNSUPPORTED = "!unsupported"  # by the CPU of the recording
# Every kind of step that the recordings hold, once.
REHEARSED = (
    "basic-O1-convnet-sgd",
    "basic-O2-transformer-adam",
    "basic-O3-mlp-sgd",
    "accumulate-delay-O2-convnet-sgd",
    "add-param-group-O2",
    "resume-init-then-load-O1-convnet-sgd",
)
WHATEVER_THE_KERNELS = (
    *("step", "out_dtypes", "loss_dtypes", "param_dtypes"),
    *("grad_dtypes", "master_dtypes", "master_grad_dtypes"),
    *("buffer_dtypes", "skipped", "scalers"),
)
# Scaled half gradients that nobody reads: Apex frees or keeps them as it likes.
INFORMATIVE = ("grads_sha",)
# O1 of the real Apex cannot cast these modules on a newer torch; the recording undid torch's changes.
BROKEN_IN_APEX = ("nn.GRU", "nn.LSTM", "nn.RNN")
STRICT = ("resume-init-then-load-O2-convnet-sgd", "resume-load-then-init-O2-mlp-adam")


def run(context: Context, report: Report) -> None:
    """Replay the scenarios, then the table of casts of O1."""
    files = sorted(RECORDINGS.glob("*.json"))
    if context.rehearse:
        files = [file for file in files if file.stem in REHEARSED]
    count = len(REHEARSED) if context.rehearse else RECORDED
    report.check("the recordings are there", len(files) == count, f"{len(files)} of {count}")
    ours = _replay_in_groups(context, files)
    recorded = {file.stem: json.loads(file.read_text()) for file in files}
    same_bits = 0
    for name, recording in recorded.items():
        found = unlike(recording, ours[name])
        report.check(f"{name}: dtypes, scales and skipped steps as recorded", not found, found)
        same_bits += ours[name].get("steps") == recording["steps"]
    report.figures["scenarios"] = len(files)
    report.figures["equal_to_the_recording_bit_for_bit"] = same_bits
    casts = context.in_child(replay_casts, context.device, None)
    wanted = json.loads((TESTS / "golden" / "o1-casts.json").read_text())["rows"]
    for name, row in wanted.items():
        judged = {key: code for key, code in row["O1"].items() if code != UNSUPPORTED}
        wrong = {key: casts[name][key] for key, code in judged.items() if code != casts[name][key]}
        report.check(f"O1 cast {name}", not wrong, f"{wrong}, recorded {row['O1']}")
    report.says = (
        f"{len(files)} scenarios with the dtypes, scales and skips of Apex 25.05 ({same_bits} with all its bits), "
        f"{len(wanted)} rows of O1 casts"
    )
    if context.apex_src is None:
        report.leave_out("not compared with genuine Apex (no --apex-src)")
        return
    _compare_with_apex(context, report, files, ours)
    _compare_casts(context, report, casts)


def _replay_in_groups(context: Context, files: list[Path]) -> dict[str, Any]:
    groups = [files[start :: context.jobs] for start in range(min(context.jobs, len(files)))]
    paths = [[str(file) for file in group] for group in groups]
    parts = context.at_once(lambda group: context.in_child(replay, group, context.device, None), paths)
    return {name: result for part in parts for name, result in part.items()}


def _compare_with_apex(context: Context, report: Report, files: list[Path], ours: dict[str, Any]) -> None:
    source = str(context.apex_src)

    def genuine(file: Path) -> dict[str, Any]:
        try:
            return context.in_child(replay, [str(file)], context.device, source)[file.stem]  # type: ignore[no-any-return]
        except RuntimeError as error:
            return {"error": str(error)}

    rows: dict[str, str] = {}
    for file, theirs in zip(files, context.at_once(genuine, files), strict=True):
        name = file.stem
        if "error" in theirs:
            rows[name] = f"Apex itself fails: {theirs['error'].strip().splitlines()[-1]}"
            continue
        difference = bits(theirs, ours[name])
        if not difference:
            rows[name] = "equal bits"
        elif bits(ours[name], _replay_in_groups(context, [file])[name]):
            rows[name] = "not reproducible on this device"
            continue
        else:
            rows[name] = difference
        report.check(f"{name}: the bits of genuine Apex", not difference, difference)
    report.figures["against_apex"] = rows
    equal = sum(text == "equal bits" for text in rows.values())
    apart = [
        f"{name} ({text})"
        for name, text in rows.items()
        if text.startswith(("Apex itself", "not reproducible"))
    ]
    report.says += f", {equal} scenarios with the bits of genuine Apex on this device"
    report.check("genuine Apex took part", equal > 0, "no scenario could be compared")
    if apart:
        report.leave_out(f"{len(apart)} scenarios against genuine Apex: {'; '.join(apart[:3])}")


def _compare_casts(context: Context, report: Report, ours: dict[str, Any]) -> None:
    theirs = context.in_child(replay_casts, context.device, str(context.apex_src))
    for name, row in theirs.items():
        wrong = {key: (ours[name][key], code) for key, code in row.items() if ours[name][key] != code}
        if wrong and name in BROKEN_IN_APEX:
            report.leave_out(f"O1 cast {name} against genuine Apex, whose O1 cannot cast it on this torch")
            continue
        report.check(f"O1 cast {name} as genuine Apex", not wrong, f"ours and theirs: {wrong}")


def unlike(recording: dict[str, Any], result: dict[str, Any]) -> str:
    """Say where a replay differs from a recording in what no kernel can change; "" where it does not."""
    if "error" in result:
        return result["error"].strip().splitlines()[-1]  # type: ignore[no-any-return]
    if result["initial"] != recording["initial"]:
        return "other initial weights"
    if len(result["steps"]) != len(recording["steps"]):
        return f"{len(result['steps'])} steps, recorded {len(recording['steps'])}"
    for want, got in zip(recording["steps"], result["steps"], strict=True):
        for key in WHATEVER_THE_KERNELS:
            if want[key] != got[key]:
                return f"step {want['step']}: {key} is {got[key]}, recorded {want[key]}"
    if recording["final"]["amp_state_dict"] != result["final"]["amp_state_dict"]:
        return f"amp.state_dict() is {result['final']['amp_state_dict']}"
    return ""


def bits(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Say where two replays on one device differ first; "" if nowhere."""
    for one, other in zip(theirs["steps"], ours["steps"], strict=True):
        for key in one:
            if key not in INFORMATIVE and one[key] != other[key]:
                return f"step {one['step']}: {key} is {other[key]}, of Apex {one[key]}"
    return "the final state" if theirs["final"] != ours["final"] else ""


class _Genuine:
    """`apex.amp` behind the calls of a replay, which closes a session between two scenarios."""

    def __init__(self, amp: Any) -> None:
        self._amp = amp
        self._amp_state = SimpleNamespace(close=self._close)

    def initialize(self, *args: Any, strict: bool = False, **options: Any) -> Any:
        return self._amp.initialize(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._amp, name)

    def _close(self) -> None:
        """Take O1's patches back and forget scalers, as a new process would."""
        state = self._amp._amp_state
        if getattr(state, "handle", None) is not None:
            state.handle._deactivate()
        vars(state).clear()
        type(state).__init__(state)


def _prepare_amp(device: str, apex_src: str | None) -> Any:
    """Ask for deterministic kernels, and return the amp to drive: ours, or the real one of some sources."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    for folder in (str(TESTS), str(TESTS / "amp")):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if apex_src is None:
        return importlib.import_module("ampcompare.apex.amp")
    from genuine import load_amp

    return _Genuine(load_amp(Path(apex_src), kernels=False, weight_cache=True, device=device))


def replay(paths: list[str], device: str, apex_src: str | None) -> dict[str, Any]:
    """Replay scenarios in this process; return by name what became of them, or an error."""
    amp = _prepare_amp(device, apex_src)
    replayed = importlib.import_module("golden_replay")
    results: dict[str, Any] = {}
    for path in paths:
        scenario = json.loads(Path(path).read_text())["scenario"]
        try:
            results[Path(path).stem] = replayed.Replay(
                scenario, scenario["name"] in STRICT, amp, device
            ).run()
        except Exception as error:
            results[Path(path).stem] = {"error": f"{type(error).__name__}: {error}"}
    return results


def replay_casts(device: str, apex_src: str | None) -> dict[str, dict[str, str]]:
    """Return, by row and dtypes of the inputs, the dtype that each expression has under O1."""
    amp = _prepare_amp(device, apex_src)
    import torch

    casts = importlib.import_module("test_o1_casts")
    model = torch.nn.Linear(2, 2).to(device)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    return {
        name: {key: casts.outcome(row, key, device) for key in row["O1"]} for name, row in casts.ROWS.items()
    }
