"""The backend `accelerate`: Hugging Face Accelerate.

Source: accelerate 1.15.
"""

from ampcompare.backends.library import Library
from ampcompare.backends.library_spec import library_spec
from ampcompare.backends.spec import ContractTestArm

LIBRARY = Library(("accelerate",), ("accelerate",), "pip install accelerate", extra="accelerate")
SPEC = library_spec(
    "Hugging Face Accelerate",
    LIBRARY,
    summary="Hugging Face Accelerate: no, fp16 or bf16",
    implementation="accelerate:Accelerate",
    option="mixed_precision",
    arms={"no": "fp32", "fp16": "native:fp16", "bf16": "native:bf16"},
    does=(
        (
            "casts",
            "autocast around the model's own forward, which prepare() replaces; outputs come back in fp32",
        ),
        (
            "loss scale",
            "fp16: dynamic, by torch's GradScaler, updated after each optimizer's step; else none",
        ),
        ("many optimizers", "refused in fp16: each step would update the scale of the others"),
        ("one per process", "a second Accelerator of another precision is refused by accelerate"),
    ),
    script=lambda asked: (
        "from accelerate import Accelerator",
        f'accelerator = Accelerator(mixed_precision="{asked}")',
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "loss = criterion(model(x), y)",
        "accelerator.backward(loss)",
        "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        "optimizer.step()",
    ),
    contract=(
        ContractTestArm("accelerate:no"),
        ContractTestArm("accelerate:bf16"),
        ContractTestArm("accelerate:fp16", skips_steps=True, shares_steps=False),
    ),
)
