"""Which arms can train a user's script."""

from ampcompare.backends.arm import Arm
from ampcompare.backends.catalog import described_backends
from ampcompare.backends.spec import InScript
from ampcompare.base.errors import UnsupportedCombination


def require_in_script(arm: Arm) -> InScript:
    """Return how an arm trains a script.

    Raises:
        UnsupportedCombination: it hands training to another library, splits the model, or compresses what that keeps.
    """
    if arm.spec.in_script is None:
        able = [name for name, spec in described_backends().items() if spec.in_script is not None]
        raise UnsupportedCombination(
            f"arm {arm} cannot replace amp in a script: it replaces the training loop or parts of the "
            f"model; arms for scripts are those of {', '.join(able)}"
        )
    return arm.spec.in_script


def engine_in_script(arm: Arm) -> str:
    """Return what a script under an arm imports as `apex`: "nvidia", the real one, or "compat"."""
    return "nvidia" if arm.options.get("engine") == "nvidia" else "compat"
