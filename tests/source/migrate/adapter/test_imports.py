"""Imports of Apex that become imports of the adapter."""

import re
import sys
from types import ModuleType

import pytest

from ampcompare.source.amp_names import ADAPTER
from ampcompare.source.migrate.adapter.imports import ALWAYS_THERE, adapt_text
from ampcompare.source.migrate.adapter.mark import OFFERED
from ampcompare.source.migrate.read.finding import BY_HAND, NOTE
from ampcompare.source.migrate.rewrite import migrate_text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from apex import amp\n", "import torch_amp_adapter as amp\n"),
        ("from apex import amp as mixed\n", "import torch_amp_adapter as mixed\n"),
        ("import apex.amp as amp\n", "import torch_amp_adapter as amp\n"),
        ("import apex\napex.amp.initialize()\n", "import torch_amp_adapter as apex\napex.amp.initialize()\n"),
        ("import apex.amp\napex.amp.initialize()\n", "import torch_amp_adapter as apex\napex.amp.initialize()\n"),
        ("import os, apex\n", "import torch_amp_adapter as apex\nimport os\n"),
        ("from apex.amp import scale_loss as s\n", "from torch_amp_adapter import scale_loss as s\n"),
        ("from apex.amp._amp_state import _amp_state\n", "from torch_amp_adapter import _amp_state\n"),
        ("from apex.amp.frontend import initialize\n", "from torch_amp_adapter import initialize\n"),
        (
            "from apex.amp._amp_state import master_params\nclip(master_params(optimizer))\n",
            "from torch_amp_adapter import master_params\nclip(master_params(optimizer))\n",
        ),
        (
            "from apex.parallel import DistributedDataParallel as DDP, convert_syncbn_model\n",
            "from torch_amp_adapter import DistributedDataParallel as DDP\n"
            "from torch_amp_adapter import convert_syncbn_model\n",
        ),
        ("from apex.parallel.distributed import DistributedDataParallel\n",
         "from torch_amp_adapter import DistributedDataParallel\n"),
        ("from apex.optimizers.fused_adam import FusedAdam\n", "from torch_amp_adapter import FusedAdam\n"),
        ("from apex.amp import *\ninitialize()\n", "from torch_amp_adapter import initialize\ninitialize()\n"),
        (
            "def train():\n    from apex import amp\n    return amp\n",
            "def train():\n    import torch_amp_adapter as amp\n    return amp\n",
        ),
        (
            "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n",
            "import torch_amp_adapter as amp\n",
        ),
        (
            "try:\n    from apex import amp\n    has_apex = True\nexcept ImportError:\n    has_apex = False\n",
            "import torch_amp_adapter as amp\nhas_apex = True\n",
        ),
        # An adapter that is not found must be an error, and not what a script does without Apex.
        (
            "try:\n    from apex import amp\n    tune()\nexcept ImportError:\n    amp = None\n",
            "import torch_amp_adapter as amp\n"
            "try:\n    import torch_amp_adapter as amp\n    tune()\nexcept ImportError:\n    amp = None\n",
        ),
        (
            "def train():\n    try:\n        from apex import amp\n    except Exception:\n        amp = None\n"
            "    else:\n        print(amp)\n",
            "def train():\n    import torch_amp_adapter as amp\n    try:\n        import torch_amp_adapter as amp\n"
            "    except Exception:\n        amp = None\n    else:\n        print(amp)\n",
        ),
        # What is not used is not needed.
        (
            "try:\n    from apex import amp\n    from apex.multi_tensor_apply import multi_tensor_applier\n"
            "    from apex.fp16_utils import *\nexcept ImportError:\n    raise\n",
            "import torch_amp_adapter as amp\n",
        ),
        (
            "from apex import amp\nif 'state_dict' in amp.__dict__:\n    amp.state_dict()\n",
            "import torch_amp_adapter as amp\nif 'state_dict' in amp.__dict__:\n    amp.state_dict()\n",
        ),
        # What the adapter lacks and torch has.
        (
            "from apex.fp16_utils import *\nfrom apex.parallel import create_syncbn_process_group\nimport torch\n"
            "from apex import normalization\nto_python_float(x)\ncreate_syncbn_process_group(8)\n"
            "normalization.FusedRMSNorm(8)\n",
            "import torch\nimport torch_amp_adapter as normalization\nx.item()\n"
            "torch.distributed.new_subgroups(8)[0]\ntorch.nn.RMSNorm(8, eps=1e-5)\n",
        ),
        (
            "from apex.optimizers import FusedAdagrad\nFusedAdagrad(p)\n",
            "import torch\ntorch.optim.Adagrad(p, fused=True)\n",
        ),
        (
            "from apex.parallel import ReduceOp\nreduce(x, ReduceOp.SUM)\n",
            "import torch\nreduce(x, torch.distributed.ReduceOp.SUM)\n",
        ),
        (
            'import sys\nm = sys.modules.get("apex.amp")\n',
            'import sys\nm = sys.modules.get("torch_amp_adapter")\n',
        ),
        ('import sys\nhas = "apex" in sys.modules\n', 'import sys\nhas = "torch_amp_adapter" in sys.modules\n'),
        ("import sys\nm = sys.modules['apex']\n", 'import sys\nm = sys.modules["torch_amp_adapter"]\n'),
        (
            "import importlib.util\nhas = importlib.util.find_spec('apex') is not None\n",
            'import importlib.util\nhas = importlib.util.find_spec("torch_amp_adapter") is not None\n',
        ),
        (
            'import importlib\namp = importlib.import_module("apex.amp")\n',
            'import importlib\namp = importlib.import_module("torch_amp_adapter")\n',
        ),
        # What only a module of Apex itself shows.
        (
            "from apex.amp.scaler import LossScaler\nisinstance(1, LossScaler)\n",
            "from torch_amp_adapter import LossScaler\nisinstance(1, LossScaler)\n",
        ),
        (
            "from apex import amp\nisinstance(1, amp.scaler.LossScaler)\n",
            "import torch_amp_adapter as amp\nisinstance(1, amp.scaler.LossScaler)\n",
        ),
    ],
)  # fmt: skip
def test_imports_change(before: str, after: str) -> None:
    migration = adapt_text(before)
    assert migration.text == after
    assert {each.message for each in migration.findings} <= {ALWAYS_THERE}
    assert adapt_text(after).text == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import apex\nprint(1)\n", "print(1)\n"),
        ("import apex, sys\nprint(sys)\n", "import sys\nprint(sys)\n"),
        (
            "from apex import amp\n__all__ = ['amp']\n",
            "import lib.torch_amp_adapter as amp\n__all__ = ['amp']\n",
        ),
        (
            "from apex import amp, parallel\namp.initialize\n",
            "import lib.torch_amp_adapter as amp\namp.initialize\n",
        ),
        ("try:\n    import apex\n    has = True\nexcept ImportError:\n    has = False\n", None),
    ],
)
def test_an_import_that_nothing_uses_goes_from_a_script_alone(before: str, after: str | None) -> None:
    """That of the adapter would run the package in which it lies."""
    kept = adapt_text(before, "lib.torch_amp_adapter").text
    assert "import lib.torch_amp_adapter" in kept
    assert adapt_text(before, "lib.torch_amp_adapter", is_imported=False).text == (
        kept if after is None else after
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("from apex.optimizers import FusedLAMB\nFusedLAMB([])\n", "apex.optimizers.FusedLAMB"),
        ("from apex.fp16_utils import FP16_Optimizer\nFP16_Optimizer(1)\n", "apex.fp16_utils.FP16_Optimizer"),
        ("from apex import amp\nhandle = amp.init()\n", "apex.amp.init"),
        ("import apex\napex.contrib.sparsity.ASP\n", "apex.contrib.sparsity.ASP"),
        ("import importlib.metadata\nimportlib.metadata.version('apex')\n", "the installed package apex"),
    ],
)
def test_what_the_adapter_lacks_is_named_and_left(text: str, named: str) -> None:
    migration = adapt_text(text)
    assert migration.text == text
    assert named in migration.findings[0].message


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import importlib\nHAS = importlib.util.find_spec('apex') is not None\nif HAS: from apex import amp\n", [2]),
        ("import sys\nfrom apex import amp\nif 'apex' in sys.modules:\n    amp.initialize(net)\n", [3]),
        ("try:\n    from apex import amp\n    HAS = True\nexcept ImportError:\n    HAS = False\nprint(amp)\n", [5]),
        ("try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nif amp:\n    print(amp)\n", [4]),
        ("try:\n    from apex import amp\nexcept ImportError:\n    amp = None\nassert amp\namp.initialize()\n", []),
        ("try:\n    from apex import amp\n    HAS = True\nexcept ImportError:\n    HAS = False\nassert HAS\n", []),
        ("try:\n    from apex import amp\nexcept ImportError:\n    raise RuntimeError('no apex')\nprint(amp)\n", []),
        ("import importlib\namp = importlib.import_module('apex.amp')\n", []),
    ],
)  # fmt: skip
def test_a_question_for_apex_is_named_whose_answer_is_always_yes(code: str, lines: list[int]) -> None:
    """Without Apex the script took another way, which no longer runs: as one that trains by torch.amp."""
    found = [each for each in adapt_text(code).findings if "the adapter always is" in each.message]
    assert [each.line for each in found] == lines


@pytest.mark.parametrize("of_timm", ["from timm.utils import ApexScaler\n", "from timm.utils import *\n"])
def test_a_file_whose_loss_timm_scales_by_apex_stays(of_timm: str) -> None:
    """It calls the installed Apex, which knows nothing of what the adapter initialized."""
    text = f"from apex import amp\n{of_timm}amp.initialize(1)\nscaler = ApexScaler()\n"
    migration = adapt_text(text)
    assert migration.text == text
    assert [(each.line, "NativeScaler" in each.message) for each in migration.findings] == [(4, True)]


def test_optimizers_stay_with_the_one_that_steps_them() -> None:
    """`FP16_Optimizer` takes a fused optimizer of Apex, and not torch's, which the adapter has in its place."""
    text = "from apex.optimizers import FP16_Optimizer, FusedAdam\nFP16_Optimizer(FusedAdam([]))\n"
    migration = adapt_text(text)
    assert migration.text == text
    assert [each.line for each in migration.findings] == [2]


def test_what_the_adapter_lacks_stays_next_to_what_it_has() -> None:
    before = (
        "import apex\nfrom apex.optimizers import FusedAdam, FusedLAMB\n"
        "apex.amp.initialize(1)\napex.contrib.xentropy.loss(2)\nFusedAdam([]), FusedLAMB([])\n"
    )
    migration = adapt_text(before)
    assert migration.text == (
        "import torch_amp_adapter\nimport apex\n"
        "from torch_amp_adapter import FusedAdam\nfrom apex.optimizers import FusedLAMB\n"
        "torch_amp_adapter.amp.initialize(1)\napex.contrib.xentropy.loss(2)\nFusedAdam([]), FusedLAMB([])\n"
    )
    assert [each.line for each in migration.findings] == [4, 5]


@pytest.mark.parametrize(
    ("code", "notes"),
    [
        ("DDP(model)", 1),
        ("wrap(DDP)", 1),
        ("DDP(model, delay_allreduce=True)", 0),
        ("DDP(model, device_ids=[0])", 0),
        ("def wrap(model: DDP) -> tuple[DDP, int]: pass", 0),
        ("held: list[DDP] = []", 0),
        ("isinstance(model, (DDP, int))", 0),
        ("type(model) is DDP", 0),
    ],
)
def test_parameters_without_gradient_are_an_error_of_the_wrapper(code: str, notes: int) -> None:
    """The one of the adapter is torch's; what Apex would refuse was never Apex's, and a type makes none."""
    text = f"from apex.parallel import DistributedDataParallel as DDP\n{code}\n"
    found = adapt_text(text).findings
    assert [each.line for each in found if "pass delay_allreduce=True" in each.message] == [2] * notes
    found = migrate_text(text).findings
    assert [each.line for each in found if "takes parameters that never get a gradient" in each.message] == [
        2
    ] * notes


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            "parallel.DistributedDataParallel(net, gradient_predivide_factor=2, prof=True, num_allreduce_streams=2)",
            "",
        ),
        (
            "parallel.DistributedDataParallel(net, retain_allreduce_buffers=True)",
            "keeps no allreduce_buffers",
        ),
        ("optimizers.FusedSGD(w, lr=1, momentum=0.5)", ""),
        ("optimizers.FusedSGD(w, lr=1, wd_after_momentum=True)", "has no option wd_after_momentum"),
        ("optimizers.FusedAdam(w, adam_w_mode=False)", ""),
        ("optimizers.FusedAdam(w, set_grad_none=True)", "has no option set_grad_none"),
        ("optimizers.FusedAdam(w, max_grad_norm=1.0)", "has no option max_grad_norm"),
        ("optimizers.FusedAdam(w, bias_correction=True)", ""),
        ("optimizers.FusedAdam(w, bias_correction=False)", "always corrects the bias"),
        ("optimizers.FusedAdam(w, 0.1, False)", "always corrects the bias"),
        ("normalization.FusedLayerNorm(2, memory_efficient=True)", "has no option memory_efficient"),
        ("parallel.SyncBatchNorm(2, fuse_relu=True)", "has no option fuse_relu"),
    ],
)
def test_options_that_the_adapter_does_not_take_are_named_where_they_are_given(call: str, says: str) -> None:
    found = adapt_text(f"from apex import normalization, optimizers, parallel\n{call}\n").findings
    found = [each for each in found if "never get a gradient" not in each.message]
    assert [each.line for each in found] == [2] * bool(says)
    assert says in "".join(each.message for each in found)


def test_state_that_the_adapter_lacks_is_named() -> None:
    text = "from apex import amp\namp._amp_state.loss_scalers[0].loss_scale()\namp._amp_state.handle._deactivate()\n"
    (finding,) = adapt_text(text).findings
    assert (finding.line, finding.message) == (
        3,
        "_amp_state of the adapter has no handle; change or remove this",
    )
    text = "from apex.amp._amp_state import _amp_state\nfor each in _amp_state.loss_scalers:\n    each._has_overflow\n"
    assert not adapt_text(text).findings
    (finding,) = adapt_text("from apex.amp._amp_state import _amp_state as state\nstate.handle\n").findings
    assert finding.message.startswith("_amp_state of the adapter has no handle")


def test_a_question_for_apex_that_an_import_of_it_still_answers_is_said_to_be_one() -> None:
    text = (
        "try:\n    from apex import amp\n    import amp_C\n    has_apex = True\n"
        "except ImportError:\n    has_apex = False\nif has_apex:\n    print(amp.state_dict(), amp_C.scale)\n"
    )
    migration = adapt_text(text)
    assert "import amp_C" in migration.text
    (note,) = [each.message for each in migration.findings if each.kind == NOTE]
    assert note.startswith(
        "this still asks whether Apex is there, by an import of what the adapter has not (import amp_C)"
    )
    (note,) = [
        each.message
        for each in adapt_text(text.replace("    import amp_C\n", "").replace(", amp_C.scale", "")).findings
    ]
    assert note.startswith("this asks whether Apex is there; the adapter always is")


@pytest.mark.parametrize(
    ("line", "asks"),
    [("has = sys.modules.get('apex') is not None", 1), ("amp = sys.modules.get('apex').amp", 0)],
)
def test_a_question_for_loaded_apex_has_a_note_under_the_adapter(line: str, asks: int) -> None:
    migration = adapt_text(f"import sys\n{line}\n")
    assert '.get("torch_amp_adapter")' in migration.text
    assert [each.message for each in migration.findings] == [ALWAYS_THERE] * asks


def test_what_stands_in_the_place_of_apex_stays_and_is_named() -> None:
    """As a test does that puts a bogus module there, by another line too."""
    text = "import sys\nfrom apex import amp\nname = 'apex'\nsys.modules[name] = bogus\nsys.modules['apex'] = old\n"
    migration = adapt_text(text + "amp.state_dict()\nprint('apex' in sys.modules)\n")
    assert "sys.modules['apex'] = old" in migration.text
    assert '"torch_amp_adapter" in sys.modules' in migration.text
    (note,) = [each for each in migration.findings if "in the place of Apex" in each.message]
    assert note.line == 5


def test_a_module_of_a_package_has_its_full_name() -> None:
    text = "from apex import amp\nfrom apex.amp import scale_loss\n"
    assert adapt_text(text, f"pkg.{ADAPTER}").text == (
        "import pkg.torch_amp_adapter as amp\nfrom pkg.torch_amp_adapter import scale_loss\n"
    )


@pytest.mark.parametrize(
    ("own", "depth", "expected"),
    [
        ("from .net import x\n", 0, "from . import torch_amp_adapter as amp"),
        ("from ..net import x\n", 1, "from .. import torch_amp_adapter as amp"),
        ("from .net import x\n", 1, "import pack.torch_amp_adapter as amp"),
        ("from pack.net import x\n", 0, "import pack.torch_amp_adapter as amp"),
        ("try:\n    from .net import x\nexcept ImportError:\n    from net import x\n", 0,
         "import pack.torch_amp_adapter as amp"),
        ("from .net import x\n", None, "import pack.torch_amp_adapter as amp"),
    ],
)  # fmt: skip
def test_a_module_whose_imports_are_relative_imports_the_adapter_so(
    own: str, depth: int | None, expected: str
) -> None:
    """One package may be imported under two names: by scripts in it and above it."""
    layers = "from apex.normalization import FusedLayerNorm\nFusedLayerNorm(2)\n"
    result = adapt_text(
        f"{own}from apex import amp\namp.initialize()\n{layers}", "pack.torch_amp_adapter", depth=depth
    )
    assert expected in result.text.splitlines()
    package = (
        expected.split(" as ")[0]
        .removeprefix("import ")
        .replace("from . import ", ".")
        .replace("from .. import ", "..")
    )
    assert f"from {package} import FusedLayerNorm" in result.text.splitlines()


def test_a_relative_module_named_apex_is_not_apex() -> None:
    text = "from .apex import amp\nfrom .. import apex\n"
    assert adapt_text(text).text == text


def test_a_name_of_no_apex_fails_to_import_as_before() -> None:
    """As a replacement of words over many files may write one: Apex is not needed for it."""
    text = (
        "try:\n    from apex.normalization import FusedHouseLayerNorm\n    norm = FusedHouseLayerNorm(2)\n"
        "except ImportError:\n    norm = None\n"
    )
    for migration in (adapt_text(text), migrate_text(text)):
        assert migration.text == text
        assert [each.kind for each in migration.findings] == ["note"]
        assert (
            "no version of Apex has apex.normalization.FusedHouseLayerNorm" in migration.findings[0].message
        )


GUARD = (
    "def is_known(optimizer):\n"
    "    try:\n"
    "        from apex.fp16_utils.fp16_optimizer import FP16_Optimizer\n"
    "        if isinstance(optimizer, FP16_Optimizer):\n"
    "            return True\n"
    "    except ImportError:\n"
    "        {0}\n"
    "    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer\n"
    "    return isinstance(optimizer, FP16_Optimizer)\n"
)


def test_what_runs_only_where_apex_is_there_is_no_work() -> None:
    """Nor is the class of another library that a later import gives the same name."""
    result = adapt_text(GUARD.format("pass"))
    assert [(each.line, each.kind) for each in result.findings] == [(4, NOTE)]
    assert result.text == GUARD.format("pass")
    result = adapt_text(GUARD.format("raise"))
    assert [(each.line, each.kind) for each in result.findings] == [(4, BY_HAND)]
    mixed = GUARD.replace(
        "        if", "        from apex.parallel import SyncBatchNorm\n        SyncBatchNorm(2)\n        if"
    )
    assert [(each.line, each.kind) for each in adapt_text(mixed.format("pass")).findings] == [(6, BY_HAND)]


DEFINED = {
    "apex.amp.amp": ("half_function", "float_function", "register_half_function"),
    "apex.amp.frontend": ("initialize", "state_dict", "load_state_dict"),
    "apex.amp.handle": ("scale_loss", "disable_casts"),
    "apex.amp.scaler": ("LossScaler",),
    "apex.parallel.distributed": ("DistributedDataParallel",),
    "apex.parallel.optimized_sync_batchnorm": ("SyncBatchNorm",),
    "apex.parallel.sync_batchnorm": ("SyncBatchNorm",),
    "apex.optimizers.fused_adam": ("FusedAdam",),
    "apex.optimizers.fused_sgd": ("FusedSGD",),
    "apex.normalization.fused_layer_norm": ("FusedLayerNorm",),
}


@pytest.mark.parametrize("module", [*(f"apex.{each}" for each in OFFERED), *DEFINED])
@pytest.mark.parametrize(
    "form",
    [
        "import apex\nfound = {0}.{1}\n",
        "import {0}\nfound = {0}.{1}\n",
        "import {0} as inner\nfound = inner.{1}\n",
        "from {2} import {3} as inner\nfound = inner.{1}\n",
        "from {0} import {1}\nfound = {1}\n",
        "from {0} import {1} as inner\nfound = (lambda: inner)()\n",
        "def find():\n    import apex\n    return isinstance(0, ({0}.{1},)) or {0}.{1}\nfound = find()\n",
        "import apex\nfrom apex.contrib import x\nfound = {0}.{1}\napex.contrib.x(found)\n",
    ],
)
def test_what_the_adapter_has_is_found_by_every_name_of_apex(module: str, form: str) -> None:
    """Of the package that shows it, and of the module inside that defines it."""
    parent, _, last = module.rpartition(".")
    for name in DEFINED.get(module, OFFERED.get(last, ())):
        result = adapt_text(form.format(module, name, parent, last))
        text = result.text
        if "contrib" in form:  # for which the import of Apex stays
            text = "\n".join(
                each for each in text.splitlines() if not re.search(r"import apex$|contrib", each)
            )
        names: dict[str, object] = {}
        shown = ModuleType(ADAPTER)
        for each in (*OFFERED, "scaler"):
            setattr(shown, each, shown)
        setattr(shown, name, found := type)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, ADAPTER, shown)
            exec(text, names)
        assert names["found"] is found, result.text


@pytest.mark.parametrize(
    ("use", "count"),
    [
        ("isinstance(model, kinds)", 0),
        ("isinstance(model, (torch.nn.Module, *kinds))", 0),
        ("isinstance(model, kinds + (list,))", 0),
        ("if type(model) in kinds: pass", 0),
        ("kinds[1](model)", 1),
        ("wrap(model, kinds)", 1),
        ("len(kinds)", 1),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "kinds = {0}\n{1}\n",
        "kinds: tuple[type, ...] = {0}\n{1}\n",
        "class Loop:\n    kinds = {0}\n    def run(self, model):\n        {2}\n",
    ],
)
def test_a_class_in_a_tuple_of_types_wraps_nothing(form: str, use: str, count: int) -> None:
    kinds = "(torch.nn.DataParallel, apex.parallel.distributed.DistributedDataParallel)"
    text = form.format(kinds, use, use.replace("kinds", "self.kinds"))
    assert len(adapt_text(f"import apex\nimport torch\n{text}").findings) == count


@pytest.mark.parametrize(
    ("use", "count"),
    [
        ("class Own(FusedAdam):\n    pass\n", 1),
        ("print(isinstance(optimizer, (FusedAdam, SGD)))\n", 1),
        ("print(type(optimizer) is FusedAdam)\n", 1),
        ("def step(optimizer: FusedAdam): pass\n", 0),
        ("FusedAdam(params)\n", 0),
    ],
)
def test_a_function_in_the_place_of_a_class_is_named(use: str, count: int) -> None:
    result = adapt_text(f"from apex.optimizers import FusedAdam\n{use}")
    assert [(each.line, each.kind) for each in result.findings] == [(2, BY_HAND)] * count


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("from apex.amp import _amp_state\nx = _amp_state.loss_scalers[0]\n",
         "from torch_amp_adapter import _amp_state\nx = _amp_state.loss_scalers[0]\n"),
        ("from apex.amp._amp_state import _amp_state as state\nx = state.loss_scalers[0]._loss_scale\n",
         "from torch_amp_adapter import _amp_state as state\nx = state.loss_scalers[0]._loss_scale\n"),
        ("from apex import amp\nx = amp._amp_state.loss_scalers[0]\n",
         "import torch_amp_adapter as amp\nx = amp._amp_state.loss_scalers[0]\n"),
        ("import apex\nx = apex.amp._amp_state._amp_state.loss_scalers\n",
         "import torch_amp_adapter as apex\nx = apex._amp_state.loss_scalers\n"),
        ("from apex.parallel import SyncBatchNorm\nx = SyncBatchNorm.convert(net)\n",
         "from torch_amp_adapter import SyncBatchNorm\nx = SyncBatchNorm.convert(net)\n"),
    ],
)  # fmt: skip
def test_what_a_name_of_the_adapter_has_stays_behind_it(text: str, result: str) -> None:
    assert adapt_text(text).text == result


@pytest.mark.parametrize("name", ["disable_allreduce", "enable_allreduce"])
def test_ways_to_accumulate_with_the_wrapper_of_apex_are_those_of_the_adapter_alone(name: str) -> None:
    text = "from apex.parallel import DistributedDataParallel as DDP\nnet = DDP(net, delay_allreduce=True)\n"
    text += f"net.{name}()\n"
    assert not adapt_text(text).findings
    (finding,) = migrate_text(text).findings
    assert f"has no {name}; to accumulate" in finding.message


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('TABLE = {"adam": "apex.optimizers.FusedAdam"}\nload(TABLE[name])\n', 1),
        ('"apex.optimizers.FusedAdam"\n', 0),
        ('names = ["apex", "apex.amp"]\n', 0),
        ('importlib.import_module("apex.optimizers.fused_adam")\n', 0),
    ],
)
def test_a_text_that_names_a_part_of_apex_is_named(text: str, count: int) -> None:
    """Nothing sees what imports by it."""
    result = adapt_text(f"import importlib\n{text}")
    assert (
        sum("this text names apex.optimizers.FusedAdam" in each.message for each in result.findings) == count
    )


@pytest.mark.parametrize(
    ("name", "is_said"), [("apex.optimizers", True), ("apex.amp", False), ("apex", False)]
)
def test_a_part_of_apex_that_a_text_imports_is_said_to_be_one(name: str, is_said: bool) -> None:
    """`FusedLAMB` is found there before, and in the adapter not."""
    code = (
        f"import importlib\n\ndef find(name):\n    return getattr(importlib.import_module('{name}'), name)\n"
    )
    migration = adapt_text(code)
    assert "torch_amp_adapter" in migration.text
    notes = [each.message for each in migration.findings]
    assert any(f"is taken from {name} here" in each for each in notes) == is_said
