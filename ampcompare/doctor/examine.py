"""The whole examination: which checks run, in which order, and which run in parallel; and the shorter checks."""

import itertools
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.base.environment.gpus import ACCELERATORS, non_cuda_accelerator_type, why_no_accelerator
from ampcompare.base.environment.packages import installed_version
from ampcompare.base.environment.variables import APEX_STRICT
from ampcompare.base.processes.call import TIME_LIMIT, ChildAnswer
from ampcompare.base.version import __version__
from ampcompare.doctor.apex import examine_apex
from ampcompare.doctor.finding import VERDICTS, Check, Verdict, ask
from ampcompare.doctor.gpu import driver_version_and_evidence, examine_gpus, has_nvidia_gpu
from ampcompare.doctor.importers import examine_importers
from ampcompare.doctor.machine import examine_machine, examine_processor, examine_torch, examine_torchvision
from ampcompare.doctor.needs import ArmNeeds, MachineFacts, examine_arm

# Extra: its distributions, and what it adds.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "stats": (("numpy", "scipy"), "verdicts: judge, report"),
    "lsp": (("pygls", "lsprotocol"), "a language server for editors: ampcompare lsp"),
    "html": (("jinja2",), "report.html, the report as a page"),
    "gpu": (("nvidia-ml-py",), "the GPU's clock, temperature and other processes along with times"),
    "tensorboard": (("tensorboard",), "curves as event files"),
    "wandb": (("wandb",), "records as runs of W&B: ampcompare export --to wandb"),
    "mlflow": (("mlflow-skinny",), "records as runs of MLflow: ampcompare export --to mlflow"),
    "ray": (("ray",), "cells as tasks of Ray"),
    "slurm": (("submitit",), "cells as jobs of Slurm"),
    "timm": (("timm",), "its models by name: --arch timm:resnet50"),
    "hf": (
        ("transformers", "datasets"),
        "its language models and data sets by name: --arch hf:gpt2, --data hf:PATH",
    ),
    "lightning": (("lightning",), "arms and guards in its Trainer: ampcompare.integrations.lightning"),
    "notebook": (("ipykernel", "nbclient", "nbformat"), "notebooks, run from the command line"),
    **{
        spec.library.extra: (spec.library.distributions[:1], f"the arms {name}:...")
        for name, spec in BUILT_IN.items()
        if spec.library is not None and spec.library.extra
    },
}
# Variable: gravest verdict that it deserves when set, and what it does.
VARIABLES: dict[str, tuple[Verdict, str]] = {
    "NVIDIA_TF32_OVERRIDE": (
        "warning",
        "turns TF32 on (1) or off (0) everywhere: fp32 arms change speed 2 to 5 times",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("warning", "turns TF32 on (1) or off (0) for fp32 matrix products"),
    "ONEDNN_DEFAULT_FPMATH_MODE": (
        "warning",
        "lets oneDNN compute fp32 products on the CPU in bf16, f16 or tf32",
    ),
    "ONEDNN_MAX_CPU_ISA": (
        "warning",
        "hides instructions of the CPU from oneDNN: other times, other rounding",
    ),
    "ATEN_CPU_CAPABILITY": (
        "warning",
        "hides instructions of the CPU from torch: other times, other rounding",
    ),
    "CUDA_LAUNCH_BLOCKING": ("warning", "waits after every kernel: step times are invalid"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "warning",
        "switches torch's memory cache off: times and peaks mean nothing",
    ),
    "PYTORCH_CUDA_ALLOC_CONF": (
        "note",
        "changes torch's memory cache: peaks compare only with the same setting",
    ),
    "CUDA_VISIBLE_DEVICES": ("note", "hides GPUs and renumbers the rest"),
    APEX_STRICT: ("note", "brings the defects of Apex back into engine=compat"),
}
ON_CUDA_ONLY = ("NVIDIA_", "TORCH_ALLOW_TF32_CUBLAS_", "CUDA_", "PYTORCH_")
SWITCHES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", APEX_STRICT)
MARKS: dict[Verdict, str] = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
NAMED = 18  # columns of a name


def examine_accelerators(answer: ChildAnswer) -> list[Check]:
    """Return a finding for each accelerator of the answer of the probe `accelerators`."""
    if not answer.has_returned:
        return [
            Check("GPU", "accelerators", "unknown", "warning", f"querying torch failed: {answer.failure}")
        ]
    arms = ", ".join(name for name, spec in BUILT_IN.items() if not spec.elsewhere({}))
    findings = []
    for device in answer.value["devices"]:
        name, failure = device["name"], device["failure"]
        reason = f"--device {name} trains {arms} in one process; other backends know CPUs and CUDA only"
        if failure:
            reason = f"a small fp16 product fails: {failure}"
        title = ACCELERATORS[non_cuda_accelerator_type(name)].title
        findings.append(Check("GPU", name, title, "problem" if failure else "ok", reason, facts=device))
    return findings


def examine_extras() -> list[Check]:
    """Check for each extra whether its distributions are installed."""
    findings = []
    for name, (distributions, purpose) in EXTRAS.items():
        versions = {distribution: installed_version(distribution) for distribution in distributions}
        missing = [distribution for distribution, version in versions.items() if version is None]
        value = ", ".join(f"{distribution} {version}" for distribution, version in versions.items())
        remedy = (f"pip install {' '.join(missing)}",) if missing else ()
        shown: tuple[str, Verdict] = ("not installed", "note") if missing else (value, "ok")
        findings.append(Check("Extras", name, *shown, purpose, remedy, {"missing": missing}))
    return findings


def examine_switches_and_variables(
    torch_facts: dict[str, Any] | None, environment: Mapping[str, str]
) -> list[Check]:
    """Check torch's TF32 switches, and each variable that is set and changes numbers or times silently.

    Args:
        torch_facts: value of the probe `torch_build`; None where torch does not import.
        environment: variables by name.
    """
    findings = []
    on_cpu = torch_facts is not None and torch_facts["cuda"] is None
    for name, (verdict, effect) in VARIABLES.items():
        value = environment.get(name)
        if value is None or (name in SWITCHES and value in ("", "0")):
            continue
        for_others = on_cpu and name.startswith(ON_CUDA_ONLY)
        reason = f"on CUDA it {effect}" if for_others else f"it {effect}"
        findings.append(
            Check("Numerics", name, value, "note" if for_others else verdict, reason, (f"unset {name}",))
        )
    if not findings:
        reason = f"of the {len(VARIABLES)} that affect results or times"
        findings.append(Check("Numerics", "variables", "none set", "ok", reason))
    return findings if torch_facts is None else [_check_tf32(torch_facts), *findings]


def _check_tf32(torch_facts: dict[str, Any]) -> Check:
    switches = {kind: torch_facts[f"tf32_{kind}"] for kind in ("products", "convolutions")}
    value = ", ".join(f"{kind} in {'TF32' if switches[kind] else 'fp32'}" for kind in switches)
    if torch_facts["cuda"] is None or switches["products"] == switches["convolutions"]:
        reason = "of no effect without CUDA" if torch_facts["cuda"] is None else ""
        return Check("Numerics", "tf32", value, "ok", reason, facts=switches)
    reason = (
        "torch's default: on a GPU of capability 8.0 or later fp32 arms convolve in TF32 (10 bits of mantissa) and "
        "multiply in fp32, so a speed-up over fp32 depends on this switch"
    )
    remedy = ("export NVIDIA_TF32_OVERRIDE=0  # strict fp32 in all arms",)
    return Check("Numerics", "tf32", value, "note", reason, remedy, switches)


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they are read, and the arms that were asked for."""

    findings: tuple[Check, ...]
    arms: tuple[ArmNeeds, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; an arm that cannot run is a problem."""
        found = [finding.verdict for finding in self.findings] + [
            "problem" for arm in self.arms if not arm.can_run
        ]
        return max(found, key=VERDICTS.index)

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ampcompare": __version__,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "arms": [{**asdict(arm), "fits": arm.can_run} for arm in self.arms],
        }


def examine(
    arms: Sequence[Arm] = (), scripts: Sequence[Path] = (), *, seconds: float = TIME_LIMIT
) -> Examination:
    """Examine this machine as a script in the current folder would find it.

    Args:
        arms: of which it is said whether they can run here.
        scripts: files and folders of which it is said what their imports of Apex get; by default the Python files of
            the current folder.
        seconds: time limit of each library that is tried.
    """
    kinds = [kind for kind in ACCELERATORS if not why_no_accelerator(kind)]
    with ThreadPoolExecutor(max_workers=4) as pool:
        vision = pool.submit(ask, "torchvision_import", seconds=seconds)
        apex_asked = pool.submit(examine_apex, seconds=seconds)
        importers_found = pool.submit(lambda: examine_importers(apex_asked.result(), scripts))
        torch = ask("torch_build", seconds=seconds)
        build = torch.value if torch.has_returned else None
        others = ask("accelerators", seconds=seconds, options={"kinds": kinds}) if kinds else None
        gpus = ask("gpus", seconds=seconds) if build and (build["cuda"] or build["hip"]) else None
        torch_check, apex = examine_torch(torch, has_gpu=has_nvidia_gpu()), apex_asked.result()
        vision_check = examine_torchvision(
            vision.result(), build["version"] if build else installed_version("torch")
        )
    devices = gpus.value.get("devices", ()) if gpus and gpus.has_returned else ()
    python = Check("Software", "python", f"{platform.python_version()} ({sys.executable})", "ok")
    findings = [python, torch_check, vision_check]
    findings += examine_gpus(
        gpus,
        driver=driver_version_and_evidence(),
        hip=build["hip"] if build else None,
        build_known=build is not None,
    )
    findings += examine_accelerators(others) if others and torch.has_returned else []
    findings += examine_processor(build)
    findings += examine_switches_and_variables(build, os.environ)
    findings += examine_machine(os.environ)
    findings += [apex, *importers_found.result()]
    findings += examine_extras()
    facts = MachineFacts(torch_check, tuple(devices), apex, build["bf16_instructions"] if build else None)
    return Examination(tuple(findings), tuple(examine_arm(arm, facts) for arm in arms))


def render_examination(examination: Examination, *, width: int, style: Callable[[str, Verdict], str]) -> str:
    """Return the report, wrapped to `width` columns; a line to be pasted is never wrapped.

    Args:
        examination: what was found.
        width: of a line, in characters.
        style: returns a text in the color of a verdict, or as it is.
    """
    lines: list[str] = []
    checks = [*examination.findings, *map(_check_of_arm, examination.arms)]
    for group, its in itertools.groupby(checks, lambda check: check.group):
        lines += ["", group]
        for check in its:
            lines += _lines_of_check(check, width, style)
    summary = []
    for verdict in reversed(VERDICTS[2:]):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            count = style(f"{len(names)} {verdict}{'s' * (len(names) > 1)}", verdict)
            summary += textwrap.wrap(f"{count}: {', '.join(names)}", width)
    return "\n".join([*lines[1:], "", *(summary or ["No problems found."]), ""])


def _check_of_arm(arm: ArmNeeds) -> Check:
    if arm.can_run:
        return Check("Arms", arm.arm, f"runs on {arm.device}", "ok", ". ".join(arm.notes), arm.remedy)
    return Check("Arms", arm.arm, "cannot run here", "problem", ". ".join(arm.missing), arm.remedy)


def _lines_of_check(check: Check, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    indent = " " * (2 + 8 + NAMED)
    text = f"{check.value}; {check.reason}" if check.reason else check.value
    columns = max(width - len(indent), 30)
    wrapped = textwrap.wrap(" ".join(text.split()), columns, break_long_words=False, break_on_hyphens=False)
    if len(check.name) >= NAMED:
        wrapped.insert(0, "")
    mark = style(MARKS[check.verdict], check.verdict) + " " * (8 - len(MARKS[check.verdict]))
    first = f"  {mark}{check.name:<{NAMED}}{wrapped[0]}".rstrip()
    return [first, *(indent + line for line in wrapped[1:]), *(f"{indent}$ {line}" for line in check.remedy)]
