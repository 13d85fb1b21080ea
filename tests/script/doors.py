"""The cross of arms, doors and optimizers in scripts: what ran is what was declared, or the arm was refused at once."""

TYPES = (
    *("state=fp32", "state=bf16", "masters=fp32", "masters=fp32,grads=fp32", "masters=fp32,state=bf16"),
    *("kahan", "rounding=stochastic", "keep_fp32=0"),
)
ARMS = [
    *("fp32", "apex:O0", "apex:O1", "apex:O2", "apex:O3", "apex:O4", "apex:O5", "apex:O2,masters=none"),
    *("apex:O2,keep_fp32=0", "apex:O1,loss_scale=128"),
    *("apex:O1,cast_model_outputs=bf16", "half", "half:bf16"),
    *("half:bn_fp32", "half:loss_scale=64", "half:dynamic", "half:masters=fp32,dynamic"),
    *(f"half:bf16,{option}" for option in TYPES),
    *("native:bf16", "native:fp16", "native:bf16,state=bf16"),
    *("native:fp16,state=bf16", "native:fp16,keep_fp32=0"),
    *("native:bf16,weights=bf16", *(f"native:bf16,weights=bf16,{option}" for option in TYPES)),
    *("gemm:mxfp8,keep=none", "gemm:nvfp4,sr,keep=none,over=half:bf16+masters=fp32"),
]

HEAD = """import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = {optimizer}
x = torch.linspace(-1, 1, 24).reshape(6, 4)
"""
TAIL = """
print([param.double().sum().item() for param in model.parameters()])
"""
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=0.05)",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)",
}
DOORS = {
    "plain": """
for step in range(8):
    for part in range(2):
        (model(x * (step + part + 1)).float().square().mean() / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "autocast": """
for step in range(8):
    for part in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x * (step + part + 1)).float().square().mean() / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "scaler": """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(8):
    for part in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x * (step + part + 1)).float().square().mean() / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
""",
    "apex.amp": """
from apex import amp
model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
for step in range(8):
    for part in range(2):
        loss = model(x * (step + part + 1)).float().square().mean() / 2
        with amp.scale_loss(loss, optimizer, delay_unscale=part == 0) as scaled_loss:
            scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "FP16_Optimizer": """
from apex.fp16_utils import FP16_Optimizer, network_to_half
model = network_to_half(model)
optimizer = FP16_Optimizer({optimizer}, dynamic_loss_scale=True, verbose=False)
for step in range(8):
    for part in range(2):
        optimizer.backward(model(x * (step + part + 1)).float().square().mean() / 2, update_master_grads=part == 1)
    optimizer.step()
    optimizer.zero_grad()
""",
    "closure": """
for step in range(8):
    def closure():
        optimizer.zero_grad()
        loss = 0.0
        for part in range(2):
            loss = model(x * (step + part + 1)).float().square().mean() / 2
            loss.backward()
        return loss
    optimizer.step(closure)
""",
}
"""What users write, without a library, by name."""

LIBRARY_DOORS: dict[str, str] = {
    "accelerate": """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(8):
    for part in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x * (step + part + 1)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
""",
    "lightning": """
import lightning
from torch.utils.data import DataLoader

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model
    def training_step(self, batch, index):
        return self.net(batch).float().square().mean()
    def configure_optimizers(self):
        return optimizer

trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=8, accumulate_grad_batches=2, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(torch.cat([x * (part + 1) for part in range(16)]), batch_size=6))
""",
    "trainer": """
from transformers import Trainer, TrainingArguments

class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, inputs, labels=None):
        out = self.net(inputs)
        return {"loss": out.float().square().mean(), "logits": out}

arguments = TrainingArguments("trained", max_steps=8, per_device_train_batch_size=6, gradient_accumulation_steps=2,
                              report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, max_grad_norm=0.0,
                              lr_scheduler_type="constant")
data = [{"inputs": row, "labels": 0} for part in range(16) for row in x * (part + 1)]
Trainer(Wrapped(), arguments, train_dataset=data, optimizers=(optimizer, None)).train()
""",
}


def script_of(door: str, optimizer: str) -> str:
    """Return the text of a script."""
    text = HEAD + {**DOORS, **LIBRARY_DOORS}[door] + TAIL
    return text.replace("{optimizer}", OPTIMIZERS[optimizer])
