"""The backend `fabric`: Lightning Fabric.

Source: lightning-fabric 2.6.
"""

from ampcompare.backends.library import Library
from ampcompare.backends.library_spec import library_spec
from ampcompare.backends.spec import ContractTestArm

LIBRARY = Library(
    ("lightning_fabric", "lightning.fabric"),
    ("lightning-fabric", "lightning"),
    "pip install lightning-fabric",
    extra="fabric",
)
SPEC = library_spec(
    "Lightning Fabric",
    LIBRARY,
    summary="Lightning Fabric: 32-true, 16-mixed, bf16-mixed, 16-true or bf16-true",
    implementation="fabric:Fabric",
    option="precision",
    loop="Fabric",
    arms={
        "32-true": "fp32",
        "16-mixed": "native:fp16",
        "bf16-mixed": "native:bf16",
        "16-true": "half",
        "bf16-true": "half:bf16",
    },
    does=(
        (
            "casts",
            "mixed: inputs cast, autocast around the module, outputs in fp32; true: weights and inputs cast, "
            "outputs in fp32",
        ),
        (
            "loss scale",
            "16-mixed: dynamic, by torch's GradScaler, updated after each optimizer's step; else none",
        ),
        ("many optimizers", "refused in 16-mixed: each step would update the scale of the others"),
    ),
    script=lambda asked: (
        "from lightning_fabric import Fabric  # or: from lightning.fabric import Fabric",
        f'fabric = Fabric(precision="{asked}", devices=1)',
        "model, optimizer = fabric.setup(model, optimizer)",
        "loss = criterion(model(x), y)",
        "fabric.backward(loss)",
        "fabric.clip_gradients(model, optimizer, max_norm=1.0)",
        "optimizer.step()",
    ),
    contract=(
        ContractTestArm("fabric:32-true"),
        ContractTestArm("fabric:bf16-mixed"),
        ContractTestArm("fabric:16-mixed", skips_steps=True, shares_steps=False),
        ContractTestArm("fabric:16-true"),
        ContractTestArm("fabric:bf16-true"),
    ),
)
