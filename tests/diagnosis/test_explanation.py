"""Explanations made from tables: rightly worded, and runnable where they show a script."""

import shlex
import warnings
from typing import Any

import pytest
import torch

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import BUILT_IN
from ampcompare.diagnosis.explain import bytes_per_parameter, explain_arm
from ampcompare.results.report.terminal import Terminal

ARMS = [
    *("fp32", "apex:O0", "apex:O1", "apex:O2", "apex:O3"),
    *("native:fp16", "native:bf16", "half", "half:bn_fp32"),
    *("apex:O3,keep_batchnorm_fp32=true,loss_scale=128", "apex:O2,min_loss_scale=1", "half:bf16"),
    *("apex:O3,master_weights=true", "half:loss_scale=64", "native:fp16,init_scale=1024,growth_interval=100"),
    *("half:masters=fp32,dynamic", "half:dynamic", "half:masters=fp32,bn_fp32", "half:bf16,masters=fp32"),
    *("apex:O2,cast_model_outputs=fp16", "apex:O1,loss_scale=128", "apex:O0,loss_scale=dynamic"),
    *("actnn:bits=2", "actnn:bits=8,over=native:bf16"),
    *("half:keep_fp32=2", "native:fp16,keep_fp32=BatchNorm*"),
    *("apex:O4", "apex:O5", "apex:O5,loss_scale=dynamic", "apex:O5,keep_batchnorm_fp32=false,loss_scale=128"),
    *("half:bf16,kahan", "half:bf16,rounding=stochastic,state=fp32"),
    *("half:bf16,masters=fp32,grads=fp32,reduce=bf16",),
    *("native:bf16,weights=bf16", "native:fp16,state=bf16,reduce=bf16"),
    *("apex:O2,keep_fp32=*.norm|lm_head", "apex:O1,keep_fp32=LayerNorm", "apex:O3,keep_fp32=2"),
]
LIBRARIES = [
    *("accelerate:no", "accelerate:bf16", "fabric:32-true"),
    *("fabric:bf16-mixed", "fabric:16-true", "mmengine:fp32"),
    *("accelerate:fp16", "fabric:16-mixed", "fabric:bf16-true", "mmengine:fp16", "mmengine:bf16", "horovod"),
    *("fp8:tensorwise", "fp8:rowwise,over=half:bf16"),
]


@pytest.mark.parametrize(
    ("arm", "twin"),
    [
        ("fp32", "apex:O0"),
        ("apex:O2", "native:float16"),
        ("apex:O3", "half"),
        ("apex:O3,keep_batchnorm_fp32=true,loss_scale=128", "half:bn_fp32,loss_scale=128"),
        ("apex:O3,master_weights=true", "native:float16"),
        ("native:fp16", "apex:O1"),
        ("native:bf16", None),
        ("half", "apex:O3"),
        ("half:masters=fp32,dynamic", "apex:O2,loss_scale=dynamic,keep_batchnorm_fp32=false"),
        ("fp32:tf32", "apex:O0"),
        ("apex:O4", "native:bf16"),
        ("apex:O5", "half:bf16,bn_fp32,masters=fp32"),
        ("apex:O2,keep_fp32=head", "native:fp16,keep_fp32=head"),
    ],
)
def test_twins(arm: str, twin: str | None) -> None:
    """Each arm has the twin with the same numbers or the nearest, itself an arm; bf16 has none in Apex."""
    found = explain_arm(Arm.parse(arm)).parts.twin
    assert found == (None if twin is None else str(Arm.parse(twin)))
    assert found is None or str(Arm.parse(found)) == found


@pytest.mark.parametrize(
    ("arm", "sgd", "adam"),
    [
        ("fp32", 12, 16),
        ("apex:O1", 14, 18),
        ("apex:O2", 16, 20),
        ("apex:O3", 6, 8),
        ("half", 6, 8),
        ("half:bf16,kahan", 8, 10),
        ("half:bf16,rounding=stochastic,state=fp32", 8, 12),
        ("half:bf16,masters=fp32,state=bf16", 14, 16),
        ("native:bf16,state=bf16", 12, 14),
        ("native:bf16,weights=bf16,masters=fp32", 16, 20),
    ],
)
def test_bytes_per_parameter(arm: str, sgd: int, adam: int) -> None:
    """The sums are those of weights, gradients, masters, kept casts and state."""
    held = bytes_per_parameter(Arm.parse(arm))
    assert (held.total(1), held.total(2)) == (sgd, adam)


@pytest.mark.parametrize("arm", [*ARMS, *LIBRARIES])
def test_text_fits(arm: str) -> None:
    """At 80 columns every line fits but those of a script, and every arm named can be parsed."""
    text = Terminal(80).render(explain_arm(Arm.parse(arm)))
    assert text.endswith("\n")
    assert not [line for line in text.splitlines() if len(line) > 80 and not line.startswith("    ")]
    compared = next(line for line in text.splitlines() if "ampcompare compare" in line)
    for word in compared.split("--arm ")[1:]:
        Arm.parse(shlex.split(word)[0])


@pytest.mark.parametrize("arm", ARMS)
def test_scripts_run(arm: str) -> None:
    """The lines shown for an arm and for its twin make a step that changes the weights."""
    parts = explain_arm(Arm.parse(arm)).parts
    for script in (parts.script, parts.twin_script):
        if script:
            assert _step("\n".join(script))


@pytest.mark.parametrize("arm", LIBRARIES[:6])
def test_scripts_of_libraries_run(arm: str) -> None:
    """The lines shown for a library that is installed make a step that changes the weights."""
    backend = arm.partition(":")[0]
    library = BUILT_IN[backend].library
    if library.why_missing():
        pytest.skip(library.why_missing())
    library.load(backend)  # whose imports may warn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fabric warns where there is an srun that did not start it
        assert _step("\n".join(explain_arm(Arm.parse(arm)).parts.script))


def _step(script: str) -> bool:
    """Run a script's lines on the CPU, with our engine for Apex; tell whether a weight moved."""
    lines = script.replace("from apex import amp", "from ampcompare.apex import amp").replace(
        '"cuda"', '"cpu"'
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    scope: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "criterion": torch.nn.CrossEntropyLoss(),
        "clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
        "x": torch.randn(6, 4),
        "y": torch.tensor([0, 1, 2, 0, 1, 2]),
    }
    before = model[0].weight.detach().float().clone()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Apex announces its own removal
            exec(lines, scope)
        return not torch.equal(before, model[0].weight.detach().float())
    finally:
        if "amp.initialize" in lines:
            scope["amp"]._amp_state.close()


def test_backend_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampcompare.backends.catalog.third_party_backends", lambda: {"mine": "json:loads"})
    explanation = explain_arm(Arm.parse("mine:level=3"))
    assert explanation.memory is None
    assert "of which nothing is known here" in Terminal(120).render(explanation)
    assert explanation.data()["bytes_per_parameter"] is None
