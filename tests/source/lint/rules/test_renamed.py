"""Names that newer versions of torch and transformers have replaced, and versions that do not have the new ones."""

import pytest

from ampcompare.source.lint.check import check_text
from ampcompare.source.lint.run import LintSelection, fixed_text_rest_and_num_fixes
from ampcompare.source.versions import Versions

BEFORE = """import torch
from torch import backends
from transformers import AutoModel as Model, pipeline

torch.backends.cuda.matmul.allow_tf32 = args.tf32
backends.cudnn.allow_tf32 = False
torch.set_float32_matmul_precision("high")
model = Model.from_pretrained("gpt2", torch_dtype=torch.float16)
answer = pipeline("text-generation", torch_dtype="auto", device=0)
"""
SWITCHED = """torch.backends.cuda.matmul.fp32_precision = "tf32" if args.tf32 else "ieee"
torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.rnn.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"
"""
OLD_SWITCHES = "\n".join(BEFORE.splitlines()[4:7]) + "\n"


def _fixed(text: str, versions: Versions) -> str:
    selection = LintSelection(select=("AMP313", "AMP314"), versions=versions)
    return fixed_text_rest_and_num_fixes(text, check_text(text, selection.reports_code, versions), selection)[
        0
    ]


@pytest.mark.parametrize(
    ("versions", "tf32", "dtype"),
    [
        (Versions((2, 9), (4, 56)), True, True),
        (Versions((2, 13), (5, 0)), True, True),
        (Versions((2, 8), (4, 55)), False, False),
        (Versions((0, 0), (0, 0)), False, False),
    ],
)
def test_names_are_new_from_the_version_on_that_has_them(versions: Versions, tf32: bool, dtype: bool) -> None:
    after = BEFORE.replace(OLD_SWITCHES, SWITCHED) if tf32 else BEFORE
    after = after.replace("torch_dtype=", "dtype=") if dtype else after
    assert _fixed(BEFORE, versions) == after


@pytest.mark.parametrize(
    "line",
    [
        # torch raises where this is read after a new switch was set
        "print(torch.backends.cuda.matmul.allow_tf32)",
        'torch.set_float32_matmul_precision("medium")',
        "torch.set_float32_matmul_precision(args.precision)",
    ],
)
def test_switches_of_tf32_are_fixed_together_or_not_at_all(line: str) -> None:
    text = f"import torch\ntorch.backends.cudnn.allow_tf32 = True\n{line}\n"
    found = check_text(text, lambda code: code == "AMP313")
    assert [(finding.line, finding.edits) for finding in found] == [(2, ()), (3, ())]


def test_a_switch_is_named_as_the_module_knows_torch() -> None:
    text = "import torch as pt\npt.backends.cuda.matmul.allow_tf32 = True\n"
    assert _fixed(text, Versions((2, 13), (5, 0))).endswith(
        'pt.backends.cuda.matmul.fp32_precision = "tf32"\n'
    )
    text = "from torch.backends import cudnn\ncudnn.allow_tf32 = True\n"
    assert _fixed(text, Versions((2, 13), (5, 0))) == text


@pytest.mark.parametrize(
    "text",
    [
        "from diffusers import DDPMPipeline\nDDPMPipeline.from_pretrained('a', torch_dtype=None)\n",
        "from transformers import AutoModel\nAutoModel.from_pretrained('a', dtype='auto', torch_dtype=None)\n",
        "def load(torch_dtype=None): ...\nload(torch_dtype='auto')\n",
        "import torch\ntry:\n    torch.backends.fp32_precision = 'tf32'\nexcept AttributeError:\n"
        "    torch.backends.cuda.matmul.allow_tf32 = True\n",
    ],
)
def test_other_names_and_fallbacks_are_left(text: str) -> None:
    assert check_text(text, lambda code: code in ("AMP313", "AMP314")) == []


def test_a_torch_without_the_new_names_of_amp_keeps_the_old_ones() -> None:
    text = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
    assert check_text(text, lambda code: code == "AMP302", Versions((2, 3), (0, 0))) == []
    assert check_text(text, lambda code: code == "AMP302", Versions((2, 4), (0, 0)))[0].edits


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from torch.cuda import amp\nscaler = amp.GradScaler()\nwith amp.autocast(False, dtype):\n    pass\n",
            'from torch import amp\nscaler = amp.GradScaler("cuda")\n'
            'with amp.autocast("cuda", enabled=False, dtype=dtype):\n    pass\n',
        ),
        (
            "import torch.cpu.amp as a\nwith a.autocast():\n    pass\nwrap = a.custom_fwd(cast_inputs=None)\n",
            'import torch.amp as a\nwith a.autocast("cpu"):\n    pass\n'
            'wrap = a.custom_fwd(device_type="cpu", cast_inputs=None)\n',
        ),
        (
            "import torch\nwith torch.cuda.amp.autocast(True, torch.float16, False):\n    pass\n",
            'import torch\nwith torch.amp.autocast("cuda", enabled=True, dtype=torch.float16, cache_enabled=False):\n'
            "    pass\n",
        ),
    ],
)
def test_uses_of_amp_are_renamed_with_their_import(before: str, after: str) -> None:
    """Under any name; arguments by position get their names, since their order is another."""
    selection = LintSelection(select=("AMP302", "AMP303"))
    assert (
        fixed_text_rest_and_num_fixes(before, check_text(before, selection.reports_code), selection)[0]
        == after
    )


@pytest.mark.parametrize("line", ["print(amp)", "amp.common.x()", "f = amp.GradScaler"])
def test_an_import_of_amp_with_another_use_is_left(line: str) -> None:
    found = check_text(
        f"from torch.cuda import amp\ns = amp.GradScaler()\n{line}\n", lambda code: code == "AMP302"
    )
    assert [finding.edits for finding in found] == [()]
