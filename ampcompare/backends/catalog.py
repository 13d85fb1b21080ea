"""All backends by name: those of this package, and those that other packages register.

A package registers a backend under one of two entry-point groups: `ampcompare.precisions` names a `Precision`, which is
enough to train with it; `ampcompare.backends` names a `BackendSpec`, which also tells every command its options,
requirements and bytes per parameter.
"""

import importlib

from ampcompare.backends import (
    accelerate,
    actnn,
    apex,
    fabric,
    fp8,
    fp32,
    fsdp,
    gemm,
    half,
    horovod,
    mmengine,
    native,
    script,
)
from ampcompare.backends.explanation import ArmExplanation
from ampcompare.backends.spec import BackendSpec
from ampcompare.base.environment.packages import entry_points
from ampcompare.base.errors import BackendUnavailable, ConfigError

PRECISION_GROUP = "ampcompare.precisions"
SPEC_GROUP = "ampcompare.backends"

BUILT_IN: dict[str, BackendSpec] = {
    "fp32": fp32.SPEC,
    "apex": apex.SPEC,
    "native": native.SPEC,
    "half": half.SPEC,
    "accelerate": accelerate.SPEC,
    "fabric": fabric.SPEC,
    "mmengine": mmengine.SPEC,
    "horovod": horovod.SPEC,
    "actnn": actnn.SPEC,
    "fp8": fp8.SPEC,
    "gemm": gemm.SPEC,
    "fsdp": fsdp.SPEC,
    "script": script.SPEC,
}


def third_party_backends() -> dict[str, str]:
    """Return the name and `module:attribute` of each backend that another package registers."""
    return {
        entry.name: entry.value
        for group in (PRECISION_GROUP, SPEC_GROUP)
        for entry in entry_points(group=group)
    }


def require_unique_backend(name: str) -> None:
    """Check that a backend's name is registered once.

    Raises:
        ConfigError: two packages register it.
    """
    values = [BUILT_IN[name].implementation] if name in BUILT_IN else []
    for group in (PRECISION_GROUP, SPEC_GROUP):
        values += [entry.value for entry in entry_points(group=group) if entry.name == name]
    if len(values) > 1:
        raise ConfigError(
            f"the backend {name!r} is registered twice: by {values[0]} and by {values[1]}; uninstall one of the two "
            "packages"
        )


def described_backends() -> dict[str, BackendSpec]:
    """Return every backend that has a description, those of this package first."""
    others = {
        entry.name: entry.value for entry in entry_points(group=SPEC_GROUP) if entry.name not in BUILT_IN
    }
    return {**BUILT_IN, **{name: _load_backend_spec(name, value) for name, value in others.items()}}


def find_spec(name: str) -> BackendSpec | None:
    """Return the description of a backend; None if no backend has that name.

    A backend registered without a description gets one that names its class and nothing else.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    registered = third_party_backends()
    if name not in registered:
        return None
    if any(entry.name == name for entry in entry_points(group=SPEC_GROUP)):
        return _load_backend_spec(name, registered[name])
    explanation = ArmExplanation(
        summary=f"the backend {name!r} of another package, of which nothing is known here",
        does=(),
        twin=None,
        twin_is="not known; --arch shows what it does to a model",
        differs=(),
        script=(),
    )
    return BackendSpec(
        summary=f"from another package: {registered[name]}",
        implementation=registered[name],
        explain=lambda options: explanation,
        parsers=None,
    )


def _load_backend_spec(name: str, value: str) -> BackendSpec:
    module, _, attribute = value.partition(":")
    try:
        spec = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # code of another package may raise any exception
        raise BackendUnavailable(
            f"the backend {name!r} is registered as {value} but cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(spec, BackendSpec):
        raise BackendUnavailable(
            f"the backend {name!r} is registered as {value}, which is not a BackendSpec: {spec!r:.80}"
        )
    return spec
