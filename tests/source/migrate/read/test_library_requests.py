"""Files that ask a library for Apex by a word, and import nothing of it."""

from pathlib import Path

import pytest

from ampcompare.source.migrate.adapter.choice import choose_adapter_for_all, choose_rewrite_or_adapter

ASKING = {
    "transformers": (
        "from transformers import TrainingArguments\n"
        'args = TrainingArguments("out", fp16=True, half_precision_backend="apex")\n',
        'transformers takes the installed Apex by `half_precision_backend="apex"`',
    ),
    "transformers before": (
        'import transformers\nargs = transformers.TrainingArguments(fp16_backend="apex")\n',
        'by `fp16_backend="apex"`',
    ),
    "an attribute": (
        'from transformers import TrainingArguments\nargs.half_precision_backend = "apex"\n',
        'by `half_precision_backend="apex"`',
    ),
    "options in a dict": (
        "import pytorch_lightning as pl\n"
        'options = {"precision": 16, "amp_backend": "apex", "amp_level": "O2"}\ntrainer = pl.Trainer(**options)\n',
        'Lightning takes the installed Apex by `amp_backend="apex"`',
    ),
    "an item": (
        'from lightning import Trainer\noptions["amp_backend"] = "apex"\n',
        'write precision="16-mixed"',
    ),
    "a plugin": (
        "from pytorch_lightning.plugins import ApexMixedPrecisionPlugin\nplugin = ApexMixedPrecisionPlugin('O1')\n",
        "by `ApexMixedPrecisionPlugin`",
    ),
    "ignite": (
        "from ignite.engine import create_supervised_trainer\n"
        'trainer = create_supervised_trainer(net, sgd, loss, amp_mode="apex")\n',
        'write amp_mode="amp", scaler=True',
    ),
    "mmengine": ('optim_wrapper = dict(type="ApexOptimWrapper", opt_level="O1")\n', "take AmpOptimWrapper"),
    "catalyst": ("from catalyst import dl\nengine = dl.APEXEngine(opt_level='O1')\n", "take its AMPEngine"),
    "catalyst before": (
        "from catalyst import dl\nrunner.train(fp16=dict(opt_level='O1'))\n",
        "by `opt_level` in `fp16`",
    ),
    "DeepSpeed": (
        'import deepspeed\nconfig = {"amp": {"enabled": True, "opt_level": "O1"}}\n',
        "DeepSpeed takes the installed Apex by `opt_level` in `amp`",
    ),
}
OTHERS = [
    'from transformers import TrainingArguments\nargs = TrainingArguments(half_precision_backend="auto")  # apex\n',
    'parser.add_argument("--amp_backend", default="apex")\n',
    "class ApexOptimWrapper:\n    pass\nwrapper = ApexOptimWrapper()  # apex\n",
    'import own\nown.train(amp_backend="apex")\n',
    "import own\nown.train(fp16=dict(opt_level='O1'))\n",
]


@pytest.mark.parametrize("case", ASKING)
@pytest.mark.parametrize("way", ["default", "rewrite", "adapter"])
def test_a_library_that_is_asked_for_apex_is_named(tmp_path: Path, case: str, way: str) -> None:
    text, words = ASKING[case]
    path = tmp_path / "train.py"
    path.write_text(text)
    choice = choose_adapter_for_all([path])
    if way != "adapter":
        choice = choose_rewrite_or_adapter([path], rewritten="ordinary" if way == "default" else "all")
    (line,) = [line for each in choice.files for line in each.lines()]
    assert ": by hand: " in line
    assert words in line
    assert not any(each.is_changed for each in choice.files)
    assert not choice.reason_lines()


@pytest.mark.parametrize("text", OTHERS)
def test_what_asks_no_library_is_not_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    assert not [
        line
        for each in choose_rewrite_or_adapter([path], rewritten="ordinary").files
        for line in each.lines()
    ]
