"""The whole examination: which checks run, in which order, and which run in parallel.

Checks of one function are here: accelerators besides CUDA, optional packages, and switches that change numbers or times
and that no line of a script shows.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from ampcompare.api.doctor.apex import examine_apex
from ampcompare.api.doctor.ask import ask
from ampcompare.api.doctor.finding import Check, Verdict, worst
from ampcompare.api.doctor.gpu import driver_version, examine_gpus, has_nvidia_gpu
from ampcompare.api.doctor.machine import (
    cpu_flags,
    examine_collectives,
    examine_machine,
    examine_processor,
    examine_python,
    examine_torch,
    examine_vision,
)
from ampcompare.api.doctor.needs import ArmNeeds, MachineFacts, examine_arm
from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.base.environment.gpus import ACCELERATORS, accelerator_of, why_no_accelerator
from ampcompare.base.environment.packages import installed_version
from ampcompare.base.processes.call import TIME_LIMIT, Answer
from ampcompare.base.version import __version__

__all__ = [
    "EXTRAS",
    "VARIABLES",
    "Examination",
    "examine",
    "examine_accelerators",
    "examine_extras",
    "examine_numerics",
    "kinds_to_ask_for",
    "render",
]

# Extra: its distributions, and what it adds.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "html": (("jinja2",), "report.html, the report as a page"),
    "gpu": (("nvidia-ml-py",), "the GPU's clock, temperature and other processes along with times"),
    "tensorboard": (("tensorboard",), "curves as event files"),
    "wandb": (("wandb",), "records as runs of W&B: ampcompare export --to wandb"),
    "mlflow": (("mlflow-skinny",), "records as runs of MLflow: ampcompare export --to mlflow"),
    "ray": (("ray",), "cells as tasks of Ray"),
    "slurm": (("submitit",), "cells as jobs of Slurm"),
    "timm": (("timm",), "its models by name: --arch timm:resnet50"),
    "hf": (("transformers", "datasets"), "its language models and data sets by name: --arch hf:gpt2, --data hf:PATH"),
    "lightning": (("lightning",), "arms and guards in its Trainer: ampcompare.integrations.lightning"),
    "notebook": (("ipykernel", "nbclient", "nbformat"), "notebooks, run from the command line"),
    "triton": (("triton",), "unscaling and master copies of O2 in two kernels, on a GPU"),
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
        "overrides every TF32 switch of torch: 0 turns TF32 off and 1 on, and fp32 arms change speed by 2 to 5 times",
    ),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "warning",
        "turns TF32 on (1) or off (0) for fp32 matrix products, whatever the script says",
    ),
    "ONEDNN_DEFAULT_FPMATH_MODE": ("warning", "lets oneDNN compute fp32 products on the CPU in bf16, f16 or tf32"),
    "DNNL_DEFAULT_FPMATH_MODE": ("warning", "lets oneDNN compute fp32 products on the CPU in bf16, f16 or tf32"),
    "ONEDNN_MAX_CPU_ISA": ("warning", "hides instructions of the CPU from oneDNN: other times, other rounding"),
    "ATEN_CPU_CAPABILITY": ("warning", "hides instructions of the CPU from torch: other times, other rounding"),
    "MKL_CBWR": ("note", "fixes MKL's code path: reproducible, slower"),
    "CUDA_LAUNCH_BLOCKING": ("warning", "waits after every kernel: step times are invalid"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("warning", "switches torch's memory cache off: times and peaks mean nothing"),
    "PYTORCH_CUDA_ALLOC_CONF": ("note", "changes torch's memory cache: peaks compare only with the same setting"),
    "PYTORCH_ALLOC_CONF": ("note", "changes torch's memory cache: peaks compare only with the same setting"),
    "CUDA_VISIBLE_DEVICES": ("note", "hides GPUs and renumbers the rest"),
    "CUBLAS_WORKSPACE_CONFIG": ("note", "fixes cuBLAS's workspace: reproducible, perhaps slower"),
    "TORCHDYNAMO_DISABLE": ("note", "switches torch.compile off"),
    "AMPCOMPARE_APEX_STRICT": ("note", "brings the defects of Apex back into engine=compat"),
}
ON_CUDA_ONLY = ("NVIDIA_", "TORCH_ALLOW_TF32_CUBLAS_", "CUDA_", "CUBLAS_", "PYTORCH_CUDA_", "PYTORCH_NO_CUDA_")
SWITCHES = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCHDYNAMO_DISABLE", "AMPCOMPARE_APEX_STRICT")
MARKS: dict[Verdict, str] = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
PLURALS: dict[Verdict, str] = {"problem": "problems", "warning": "warnings"}
NAMED = 18  # columns of a name


def kinds_to_ask_for() -> list[str]:
    """Return the types that torch may have here; asking torch for them costs a process."""
    return [kind for kind in ACCELERATORS if not why_no_accelerator(kind)]


def examine_accelerators(answer: Answer | None) -> list[Check]:
    """Return a finding for each accelerator.

    Args:
        answer: of the probe `accelerators`; None where torch certainly has none.
    """
    if answer is None:
        return []
    if not answer.done:
        return [Check("GPU", "accelerators", "unknown", "warning", f"querying torch failed: {answer.failure}")]
    arms = [name for name, spec in BUILT_IN.items() if not spec.elsewhere({})]
    findings = []
    for device in answer.value["devices"]:
        name, failure = device["name"], device["failure"]
        reason = f"--device {name} trains {', '.join(arms)} in one process; other backends know CPUs and CUDA only"
        if failure:
            reason = f"a small fp16 product fails: {failure}"
        title = ACCELERATORS[accelerator_of(name)].title
        findings.append(Check("GPU", name, title, "problem" if failure else "ok", reason, facts=device))
    return findings


def examine_extras() -> list[Check]:
    """Check for each extra whether its distributions are installed."""
    findings = []
    for name, (distributions, purpose) in EXTRAS.items():
        versions = {distribution: installed_version(distribution) for distribution in distributions}
        missing = [distribution for distribution, version in versions.items() if version is None]
        if missing:
            remedy = (f"pip install {' '.join(missing)}",)
            findings.append(Check("Extras", name, "not installed", "note", purpose, remedy, {"missing": missing}))
        else:
            value = ", ".join(f"{distribution} {version}" for distribution, version in versions.items())
            findings.append(Check("Extras", name, value, "ok", purpose, facts={"missing": []}))
    return findings


def examine_numerics(facts: dict[str, Any] | None, environment: Mapping[str, str]) -> list[Check]:
    """Check torch's TF32 switches, and each variable that is set and changes numbers or times silently.

    Args:
        facts: value of the probe `torch_build`; None where torch does not import.
        environment: variables by name.
    """
    findings = []
    if facts is not None:
        findings.append(_tf32(facts))
    on_cpu = facts is not None and facts["cuda"] is None
    for name, (verdict, effect) in VARIABLES.items():
        value = environment.get(name)
        if value is None or (name in SWITCHES and value in ("", "0")):
            continue
        if on_cpu and name.startswith(ON_CUDA_ONLY):
            findings.append(Check("Numerics", name, value, "note", f"on CUDA it {effect}", (f"unset {name}",)))
        else:
            findings.append(Check("Numerics", name, value, verdict, f"it {effect}", (f"unset {name}",)))
    if all(finding.name == "tf32" for finding in findings):
        findings.append(
            Check("Numerics", "variables", "none set", "ok", f"of the {len(VARIABLES)} that affect results or times")
        )
    return findings


def _tf32(facts: dict[str, Any]) -> Check:
    products, convolutions = facts["tf32_products"], facts["tf32_convolutions"]
    values = {"products": products, "convolutions": convolutions}
    value = f"matrix products {_switch(products)}, convolutions {_switch(convolutions)}"
    if facts["cuda"] is None:
        return Check("Numerics", "tf32", value, "ok", "of no effect without CUDA", facts=values)
    if products == convolutions:
        return Check("Numerics", "tf32", value, "ok", "", facts=values)
    reason = (
        "torch's default: on a GPU of capability 8.0 or later fp32 arms convolve in TF32 (10 bits of mantissa, as "
        "fp16) and multiply in fp32, so a speed-up over fp32 depends on this switch"
    )
    return Check(
        "Numerics",
        "tf32",
        value,
        "note",
        reason,
        ("export NVIDIA_TF32_OVERRIDE=0  # strict fp32 in all arms",),
        values,
    )


def _switch(value: bool | None) -> str:
    return "unknown" if value is None else "on" if value else "off"


@dataclass(frozen=True)
class Examination:
    """All findings, in the order in which they are read, and the arms that were asked for."""

    findings: tuple[Check, ...]
    arms: tuple[ArmNeeds, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all; an arm that cannot run is a problem."""
        return "problem" if any(not arm.fits for arm in self.arms) else worst(self.findings)

    def data(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ampcompare": __version__,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "arms": [{**asdict(arm), "fits": arm.fits} for arm in self.arms],
        }


def examine(arms: Sequence[Arm] = (), *, seconds: float = TIME_LIMIT) -> Examination:
    """Examine this machine as a script in the current folder would find it.

    Args:
        arms: those to report on one by one.
        seconds: time limit of each child process.
    """
    environment = dict(os.environ)
    with ThreadPoolExecutor(max_workers=3) as pool:
        torch_asked = pool.submit(ask, "torch_build", seconds=seconds)
        vision_asked = pool.submit(_vision, seconds)
        apex_asked = pool.submit(examine_apex, seconds=seconds)
        torch_told = torch_asked.result()
        built_for_gpus = torch_told.done and (torch_told.value["cuda"] or torch_told.value["hip"])
        kinds = kinds_to_ask_for()
        others_told = ask("accelerators", seconds=seconds, options={"kinds": kinds}) if kinds else None
        gpus_told = ask("gpus", seconds=seconds) if built_for_gpus else None
        vision_told, apex = vision_asked.result(), apex_asked.result()
    build = torch_told.value if torch_told.done else None
    torch_findings = examine_torch(torch_told, has_gpu=has_nvidia_gpu())
    torch_version = build["version"] if build else installed_version("torch")
    devices = tuple(gpus_told.value.get("devices", ())) if gpus_told and gpus_told.done else ()
    findings = [examine_python(), *torch_findings, examine_vision(vision_told, torch_version)]
    if build:
        findings.append(examine_collectives(build, gpus_told.value.get("nccl") if gpus_told else None))
    findings.append(apex)
    findings += examine_gpus(gpus_told, driver=driver_version(), hip=build["hip"] if build else None)
    findings += examine_accelerators(others_told)
    findings += examine_processor(build, cpu_flags())
    findings += examine_numerics(build, environment)
    findings += examine_machine(environment)
    findings += examine_extras()
    facts = MachineFacts(torch_findings[0], devices, apex, build["bf16_instructions"] if build else None)
    return Examination(tuple(findings), tuple(examine_arm(arm, facts) for arm in arms))


def _vision(seconds: float) -> Answer:
    """Ask about torchvision only if it is installed, since the answer needs an import of torch."""
    if installed_version("torchvision") is None:
        return Answer({}, "raised", "not installed")
    return ask("vision", seconds=seconds)


def render(examination: Examination, *, width: int, style: Callable[[str, Verdict], str]) -> str:
    """Return the report, wrapped to `width` columns; a line to be pasted is never wrapped.

    Args:
        style: gives a word the color of its verdict.
    """
    lines: list[str] = []
    group = None
    for finding in examination.findings:
        if finding.group != group:
            lines += ["", finding.group]
            group = finding.group
        lines += _finding(finding, width, style)
    if examination.arms:
        lines += ["", "Arms"]
        for arm in examination.arms:
            lines += _arm(arm, width, style)
    return "\n".join([*lines[1:], "", *_summary(examination, width, style), ""])


def _finding(finding: Check, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    text = _sentence(finding.value, finding.reason)
    return _entry(finding.name, finding.verdict, text, finding.remedy, width, style)


def _arm(arm: ArmNeeds, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    verdict: Verdict = "ok" if arm.fits else "problem"
    said = _sentence(
        f"runs on {arm.device}" if arm.fits else "cannot run here", ". ".join(arm.notes if arm.fits else arm.missing)
    )
    return _entry(arm.arm, verdict, said, arm.remedy, width, style)


def _sentence(value: str, reason: str) -> str:
    return f"{value}; {reason}" if reason else value


def _entry(
    name: str,
    verdict: Verdict,
    text: str,
    remedy: tuple[str, ...],
    width: int,
    style: Callable[[str, Verdict], str],
) -> list[str]:
    indent = " " * (2 + 8 + NAMED)
    wrapped = textwrap.wrap(
        " ".join(text.split()), max(width - len(indent), 30), break_long_words=False, break_on_hyphens=False
    )
    if len(name) >= NAMED:
        wrapped.insert(0, "")
    mark = style(MARKS[verdict], verdict) + " " * (8 - len(MARKS[verdict]))
    first = f"  {mark}{name:<{NAMED}}{wrapped[0]}".rstrip()
    return [first, *(indent + line for line in wrapped[1:]), *(f"{indent}$ {line}" for line in remedy)]


def _summary(examination: Examination, width: int, style: Callable[[str, Verdict], str]) -> list[str]:
    lines = []
    for verdict, plural in PLURALS.items():
        names = [finding.name for finding in examination.findings if finding.verdict == verdict]
        if verdict == "problem":
            names += [arm.arm for arm in examination.arms if not arm.fits]
        if names:
            count = style(f"{len(names)} {plural if len(names) > 1 else verdict}", verdict)
            lines += textwrap.wrap(f"{count}: {', '.join(names)}", width)
    return lines or ["No problems found."]
