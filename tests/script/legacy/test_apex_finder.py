"""`import apex` finds the engine, under every spelling, and says clearly what the engine lacks."""

IMPORTS = """
    import importlib.util
    assert importlib.util.find_spec("apex") is not None
    assert importlib.util.find_spec("apex.RNN") is None
    import apex
    from apex import amp, optimizers
    import apex.amp
    from apex.amp._amp_state import _amp_state, maybe_print
    from apex.amp import _amp_state as exported
    from apex.fp16_utils import *
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.parallel.LARC import LARC
    import amp_C, apex.amp.scaler
    import ampcompare.apex as engine, ampcompare.apex.amp_C, ampcompare.apex.amp.scaler
    assert apex is engine and apex.amp is amp is engine.amp and amp_C is engine.amp_C
    assert apex.amp.scaler is engine.amp.scaler and optimizers is engine.optimizers
    assert apex.amp._amp_state is _amp_state is exported is engine.amp.__dict__["_amp_state"]
    assert not isinstance(_amp_state, type(apex)), "the state object, not the module of its name"
    assert amp.__spec__.name == "ampcompare.apex.amp" and to_python_float([2.5]) == 2.5
    try:
        from apex.contrib.fmha import FMHAFun
    except ImportError:
        print("guarded")
"""


def test_every_spelling_gives_the_same_modules(write, legacy) -> None:
    """A clone beside the script loses; modules and state are those of the engine by every way of importing them."""
    write("apex/setup.py", "")
    write("apex/amp/nothing.py", "")
    write("train.py", IMPORTS)
    done = legacy("train.py")
    assert (done.returncode, done.stdout) == (0, "guarded\n"), done.stderr
    named = "the script asked for apex.RNN, apex.contrib.fmha, which the compat engine does not have"
    assert done.stderr.count(named) == 1


def test_two_lines_at_the_top(write, forked) -> None:
    """Without exec, `ampcompare.apex.install()` does the same, over another apex that was imported before."""
    write("apex/__init__.py", "amp = None")
    write(
        "train.py", "    import apex\n    import ampcompare.apex\n    ampcompare.apex.install()\n" + IMPORTS
    )
    done = forked("train.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "guarded\n", "")


LACKING = {
    "import apex.contrib.fmha.fmha": "apex.contrib.fmha",
    "from apex import RNN": "apex.RNN",
    "from apex.optimizers import FusedMagic": "apex.optimizers.FusedMagic",
    "from apex.amp.scaler import Magic": "apex.amp.scaler.Magic",
    "import xentropy_cuda": "xentropy_cuda",
}


def test_what_is_lacking_is_named(write, legacy) -> None:
    """Imports that the engine cannot answer are the script's own ImportErrors, and one line of ours names them."""
    attempts = [f"try:\n    {statement}\nexcept ImportError:\n    " for statement in LACKING]
    write("train.py", "pass\n".join(attempts) + "raise ImportError('Please install apex')\n")
    done = legacy("train.py")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    lines = done.stderr.splitlines()
    assert lines[-2] == "ImportError: Please install apex"
    names = ", ".join(LACKING.values())
    assert lines[-1].startswith(
        f"ampcompare: the script asked for {names}, which the compat engine does not have"
    )


MAGIC = ("Magic", "magic")
CAUGHT = """
    import apex, amp_C
    from apex import amp
    try:
        from apex.normalization.fused_layer_norm import FusedMagic
    except ImportError:
        FusedMagic = None
    for module in (apex, amp, apex.parallel, amp_C):
        hasattr(module, "Magic"), getattr(module, "magic", None), hasattr(module, "__magic__")
    assert hasattr(amp, "initialize") and hasattr(amp_C, "multi_tensor_scale")
    try:
        apex.optimizers.FusedWonder
    except AttributeError as error:
        assert str(error) == "module 'ampcompare.apex.optimizers' has no attribute 'FusedWonder'"
    from apex.parallel import *
    import inspect
    inspect.getmembers(apex), inspect.getsource(amp)
"""


def test_names_that_were_caught_are_named(write, legacy) -> None:
    """Each name that the script asked for and did not get is in the last line, though the script caught the error."""
    write("train.py", CAUGHT)
    done = legacy("train.py")
    assert done.returncode == 0, done.stderr
    asked = [
        f"{module}.{name}" for module in ("apex", "apex.amp", "apex.parallel", "amp_C") for name in MAGIC
    ]
    names = ", ".join(
        ["apex.normalization.fused_layer_norm.FusedMagic", *asked, "apex.optimizers.FusedWonder"]
    )
    assert done.stderr.startswith(
        f"ampcompare: the script asked for {names}, which the compat engine does not have"
    )
    assert done.stderr.count("\n") == 2


def test_installed_apex_is_left_alone_on_request(write, legacy) -> None:
    """`--engine nvidia` runs the script on the apex that Python finds, and hooks that one."""
    write("apex/__init__.py", "")
    write(
        "apex/amp/__init__.py",
        "from .frontend import initialize\nfrom .handle import scale_loss\nfrom . import scaler",
    )
    write(
        "apex/amp/frontend.py",
        "def _initialize(): ...\ndef initialize(model, opt_level='O1'): return opt_level",
    )
    write("apex/amp/handle.py", "def scale_loss(loss, optimizers, loss_id=0): ...")
    write("apex/amp/scaler.py", "class LossScaler:\n    def update_scale(self): ...")
    write("train.py", "from apex import amp; print(amp.__file__, amp.initialize(None))")
    done = legacy("--engine", "nvidia", "--opt-level", "O2", "train.py")
    assert done.returncode == 0, done.stderr
    path, level = done.stdout.split()
    assert path.endswith("apex/amp/__init__.py")
    assert "ampcompare" not in path
    assert level == "O2"
    assert done.stderr.splitlines() == [
        "ampcompare: --opt-level O2 instead of the script's O1",
        "ampcompare: to move train.py to torch.amp, and check that it trains the same: "
        "ampcompare migrate --verify train.py",
    ]
