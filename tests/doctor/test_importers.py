"""Who imports Apex is named, with what each import gets and one cure, next to ten kinds of Apex."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.shim.switch import MODULE, STARTS
from ampcompare.doctor.apex import UNINSTALL, examine_apex
from ampcompare.doctor.importers import examine_importers
from ampcompare.source.apex_imports import find_apex_imports

ON = "ampcompare shim on"
# Libraries as those of these names do it: behind a question, with the error caught, unguarded, and in a function.
LIBRARIES = {
    "transformers/utils/import_utils.py": "_apex_available = _is_package_available('apex')\n",
    "transformers/trainer.py": "if is_apex_available():\n    from apex import amp\n",
    "megatron/core/clip.py": "try:\n    import amp_C\nexcept ImportError:\n    amp_C = None\n",
    "timm/utils/cuda.py": "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n",
    "mmcv/runner.py": "from apex.parallel import DistributedDataParallel\n",
    "fitter/fit.py": "def fit():\n    from apex import amp\n",
    "tuner/tune.py": "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('Install apex')\n",
}
NAMES = ("transformers", "megatron", "timm", "mmcv", "fitter", "tuner")
AMP = "initialize = scale_loss = master_params = state_dict = load_state_dict = None"
NEW = {"apex/__init__.py": "", "apex/normalization/__init__.py": "", "apex/contrib/__init__.py": ""}
OLD = {**NEW, "apex/amp/__init__.py": AMP, "apex/parallel/__init__.py": "", "apex/fp16_utils/__init__.py": ""}
KERNELS = {"amp_C.cpython-0.so": "", "amp_C.py": ""}
SHIM = {STARTS: "", MODULE: "ANSWERED = ('mmcv',)\n"}
FINE, WITHOUT, CALLED, FAILS = "finds", "does without", "fails when called", "fails"
FORSAKEN = {
    "transformers": (WITHOUT, ()), "megatron": (WITHOUT, ()), "timm": (WITHOUT, ()), "fitter": (CALLED, ()),
    "mmcv": (FAILS, (f"{ON} --for mmcv",)), "tuner": (FAILS, (f"{ON} --for tuner",)),
}  # fmt: skip
GRAFTED = {**dict.fromkeys(NAMES, (FINE, ())), "megatron": (WITHOUT, ())}
LACKING = {
    "transformers": (FAILS, (ON,)), "megatron": (WITHOUT, ()), "timm": (WITHOUT, ()), "fitter": (CALLED, (ON,)),
    "mmcv": (FAILS, (ON,)), "tuner": (FAILS, (ON,)),
}  # fmt: skip
OTHER = {
    **dict.fromkeys(("transformers", "mmcv", "tuner"), (FAILS, (UNINSTALL,))), "fitter": (CALLED, (UNINSTALL,)),
    **dict.fromkeys(("megatron", "timm"), (WITHOUT, (UNINSTALL,))),
}  # fmt: skip
WHOLE: dict[str, Any] = dict.fromkeys(NAMES, (FINE, ()))
EXEC = "ampcompare exec {}"
# The files of each kind, its state, what libraries get, and what a script gets that has `from apex import amp`.
KINDS: dict[str, tuple[dict[str, str], str, dict[str, Any], tuple[str, tuple[str, ...]]]] = {
    "none": ({}, "absent", FORSAKEN, (FAILS, (EXEC,))),
    "none, and the shim": (SHIM, "ours", {**FORSAKEN, "mmcv": (FINE, ())}, (FINE, ())),
    "NVIDIA's of today": ({**NEW, **KERNELS}, "no_amp", {**LACKING, "megatron": (FINE, ())}, (FAILS, (ON,))),
    "NVIDIA's of today, Python only": (NEW, "no_amp", LACKING, (FAILS, (ON,))),
    "NVIDIA's of today, and the shim": ({**NEW, **SHIM}, "grafted", GRAFTED, (FINE, ())),
    "25.05": ({**OLD, **KERNELS}, "full", WHOLE, (FINE, ())),
    "25.05, Python only": (OLD, "python_only", {**WHOLE, "megatron": (WITHOUT, ())}, (FINE, ())),
    "ROCm's": ({**OLD, **KERNELS, "apex/amp/frontend.py": "class O4: ...\n"}, "full", WHOLE, (FINE, ())),
    "PyPI's": ({"apex/__init__.py": "", "apex/models.py": ""}, "impostor", OTHER, (FAILS, (UNINSTALL,))),
    "a clone": ({"apex/setup.py": "", "apex/apex/__init__.py": ""}, "namespace", FORSAKEN, (FAILS, (EXEC,))),
    "a file": ({"apex.py": ""}, "shadowed", FORSAKEN, (FAILS, (EXEC,))),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_importer_and_cure(site: Any, tmp_path: Path, kind: str) -> None:
    files, state, of_libraries, of_script = KINDS[kind]
    packages = type(site)(tmp_path / "site-packages")
    for file, text in {**files, **LIBRARIES}.items():
        packages.write(file, text)
    script = site.write("train.py", "import torch\nfrom apex import amp\n")
    apex = examine_apex(packages.path, folder=packages.folder)
    assert apex.facts["state"] == state
    assert apex.facts["maker"] == ("ROCm" if kind == "ROCm's" else "NVIDIA")
    found = {check.name: check for check in examine_importers(apex, [script], packages.path)}
    ends = {name: (check.facts["outcome"], check.remedy) for name, check in found.items()}
    assert ends.pop(str(script)) == (of_script[0], tuple(line.format(script) for line in of_script[1]))
    assert ends == of_libraries
    assert "train.py:2" in found[str(script)].value
    assert "transformers/trainer.py:2" in found["transformers"].value
    for check in found.values():
        assert (check.verdict == "problem") == (check.facts["outcome"] == FAILS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import apex.amp as amp, os", [("apex.amp", "always")]),
        ("from apex import amp, optimizers", [("apex.amp", "always"), ("apex.optimizers", "always")]),
        ("try:\n    import apex\nexcept:\n    pass", [("apex", "tried")]),
        ("try:\n    import apex\nexcept (ImportError, OSError):\n    apex = None", [("apex", "tried")]),
        (
            "try:\n    import apex\nexcept (ImportError, OSError) as error:\n    raise SystemExit from error",
            [("apex", "always")],
        ),
        ("try:\n    import apex\nexcept ImportError as error:\n    raise error", [("apex", "always")]),
        ("try:\n    import apex\nexcept ValueError:\n    pass", [("apex", "always")]),
        ("try:\n    import flash\nexcept ImportError:\n    import amp_C", [("amp_C", "always")]),
        (
            "class A:\n    def f(self):\n        import fused_layer_norm_cuda",
            [("fused_layer_norm_cuda", "called")],
        ),
        ("if importlib.util.find_spec('apex') is not None: pass", [("apex", "question")]),
        ("amp = importlib.import_module('apex.amp')", [("apex.amp", "always")]),
        ("if TYPE_CHECKING:\n    import apex", []),
        ("from .apex import amp\nname = 'apex'\nimport apexes", []),
        ("print 'apex'", []),
    ],
)
def test_forms_of_imports(text: str, found: list[tuple[str, str]]) -> None:
    assert [(one.module, one.reach) for one in find_apex_imports(text.encode())] == found


def test_reading_ends_in_time(site: Any) -> None:
    """A report that is not whole says so."""
    site.write("site-packages/mmcv.py", "import apex\n")
    apex = examine_apex(site.path, folder=site.folder)
    (check,) = examine_importers(apex, [site.write("t.py")], [str(site.folder / "site-packages")], seconds=-1)
    assert (check.name, check.verdict) == ("importers", "note")
