"""What imports of Apex find with the shim on: the user's own code, libraries, and probes, at any order of imports."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HEAD = "from ampcompare.base.shim.finder import install; install({answered})\n"
NOTHING_LEFT = (
    "import sys, importlib.util\n"
    "def left(): return [n for n in sys.modules if n.partition('.')[0] in ('apex', 'amp_C')] + "
    "[importlib.util.find_spec('apex')]\n"
)
# After each, a probe of a library finds nothing.
FORMS = (
    "from apex import amp",
    "import apex",
    "import apex.amp",
    "import apex.amp as other",
    "from apex.parallel import DistributedDataParallel, convert_syncbn_model",
    "from apex.amp._amp_state import maybe_print, _amp_state",
    "from apex.parallel.LARC import LARC",
    "from apex.fp16_utils import *",
    "import amp_C, apex_C, fused_layer_norm_cuda",
    "import importlib; importlib.import_module('apex.optimizers')",
    "importlib.import_module('apex.amp._amp_state')",
    "__import__('apex.normalization')",
    "from apex import amp, optimizers",
)
MISSING = (
    "import apex.nothing",
    "from apex import nothing",
    "from apex.contrib.fmha import FMHAFun",
    "import syncbn",
)
PROBING = {
    "transformers": "def there(): return importlib.util.find_spec('apex')\n",
    "megatron": "def there():\n    import apex\n    return apex\n",
    "found": "def there():\n    from apex.normalization import FusedRMSNorm\n    return FusedRMSNorm\n",
    "asked": "def there(): return importlib.metadata.version('apex')\n",
    "named": "def there(): return importlib.import_module('apex')\n",
    "extension": "def there():\n    import amp_C\n    return amp_C\n",
}
# NVIDIA's Apex without amp, in what matters here.
NVIDIA = {
    "apex/__init__.py": "from . import optimizers, normalization\n__all__ = ['optimizers', 'normalization']\n",
    "apex/optimizers/__init__.py": "class FusedAdam: ...\n",
    "apex/normalization/__init__.py": "class FusedLayerNorm: ...\n",
    "apex/contrib/__init__.py": "kernels = 'NVIDIA'\n",
    "apex/multi_tensor_apply/__init__.py": "class MultiTensorApply: ...\n",
    "amp_C.py": "kernels = 'NVIDIA'\n",
    "amp_C.cpython-0.so": "",
}
Run = Callable[..., str]

pytestmark = pytest.mark.integration


@pytest.fixture
def run(tmp_path: Path, forked_python: Any) -> Run:
    """Run a script next to a folder of packages, and return what it prints."""

    def run(script: str, packages: dict[str, str], *words: str, answered: str = "") -> str:
        for name, text in packages.items():
            file = tmp_path / "site-packages" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                "import importlib, importlib.util, importlib.metadata\n" * name.endswith("y") + text
            )
        head = "" if words else HEAD.format(answered=answered)
        (tmp_path / "train.py").write_text(head + NOTHING_LEFT + script)
        path = os.pathsep.join([str(tmp_path / "site-packages"), os.environ["PYTHONPATH"]])
        done = forked_python.run([*words, "train.py"], tmp_path, {**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0, done.stderr
        printed: str = done.stdout + done.stderr
        return printed

    return run


@pytest.mark.slow
def test_own_code_gets_the_engine_and_probes_nothing(run: Run) -> None:
    script = "".join(f"{form}\nassert left() == [None], left()\n" for form in FORMS)
    script += "".join(
        f"try:\n    {form}\nexcept ImportError:\n    assert left() == [None]\nelse:\n    raise SystemExit(3)\n"
        for form in MISSING
    )
    script += (
        "import apex, ampcompare.apex as engine\n"
        "assert apex is engine and apex.amp is amp is engine.amp is other and amp_C is engine.amp_C\n"
        "assert _amp_state is amp._amp_state and not isinstance(_amp_state, type(apex))\n"
        "assert to_python_float([2.5]) == 2.5\n"
    )
    assert run(script, {}) == ""


@pytest.mark.parametrize("first", [True, False])
def test_libraries_find_nothing(run: Run, first: bool) -> None:
    """Whether the user's own code has imported Apex before or not; what must have it is answered by name."""
    own = "import amp_C, apex.amp; from apex import amp, normalization\n"
    calls = "".join(
        f"import {name}\ngot = None\ntry:\n    got = {name}.there()\nexcept ImportError:\n    pass\n"
        f"print('{name}', got)\n{own}"
        for name in PROBING
    )
    packages = {f"{name}.py": text for name, text in PROBING.items()} | {"needs.py": "from apex import amp\n"}
    printed = run(
        own * first + calls + "import needs; assert needs.amp is amp\n", packages, answered="['needs']"
    )
    assert printed.split() == [word for name in PROBING for word in (name, "None")]


def test_what_nvidia_removed_is_grafted(run: Run) -> None:
    """For everybody; its own optimizers, contrib and kernels stay, and so does what is missing in both."""
    script = (
        "import apex\nassert apex.amp.initialize\n"
        "from apex import *\nassert amp is apex.amp and optimizers.FusedAdam.__module__ == 'apex.optimizers'\n"
        "from apex.parallel import DistributedDataParallel\nfrom apex.fp16_utils import FP16_Optimizer\n"
        "from apex.amp._amp_state import _amp_state\nassert _amp_state is amp._amp_state\n"
        "import apex.contrib, apex.multi_tensor_apply, apex.normalization, amp_C\n"
        "assert apex.contrib.kernels == amp_C.kernels == 'NVIDIA'\n"
        "assert apex.multi_tensor_apply.MultiTensorApply.__module__ == 'apex.multi_tensor_apply'\n"
        "import trainer\nassert trainer.amp is amp\n"
        "for name in ('RNN', 'transformer'):\n    assert not hasattr(apex, name)\n"
    )
    assert run(script, {**NVIDIA, "trainer.py": "from apex import amp\n"}) == ""


@pytest.mark.parametrize(
    "packages",
    [
        {"apex/__init__.py": "amp = 'its own'\n", "apex/models.py": ""},
        {
            "apex/__init__.py": "",
            "apex/amp/__init__.py": "own = True\n",
            "apex/normalization/__init__.py": "",
        },
    ],
)
def test_others_are_left_as_they_are(run: Run, packages: dict[str, str]) -> None:
    """PyPI's package of the name, and an Apex that has amp."""
    assert run("import apex\nfrom apex import amp\nassert amp == 'its own' or amp.own\n", packages) == ""


@pytest.mark.parametrize(("options", "whose"), [([], "NVIDIA"), (["--device", "cpu"], "engine")])
def test_exec_grafts_likewise(run: Run, options: list[str], whose: str) -> None:
    """Unless the script trains on a CPU, for which NVIDIA's kernels are of no use."""
    script = "from apex import amp, optimizers, parallel\nimport amp_C\n"
    script += "print(amp.__name__, optimizers.FusedAdam.__module__)\n"
    printed = run(script, NVIDIA, "-m", "ampcompare", "exec", *options)
    home = "apex.optimizers" if whose == "NVIDIA" else "ampcompare.apex.optimizers.fused_adam"
    assert f"ampcompare.apex.amp {home}\n" in printed
    assert ("the rest of apex is NVIDIA's" in printed) == (whose == "NVIDIA")
