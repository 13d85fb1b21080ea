"""The text of an arm, `backend[:option[,option...]]`, parsed, checked and written back in one canonical form.

Needs neither torch nor pydantic, so that a mistyped arm is refused before anything heavy is imported.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcompare.errors import ConfigError

__all__ = ["BACKENDS", "SHORT_DTYPES", "Arm", "BackendOptions", "third_party_backends"]

OPT_LEVELS = ("O0", "O1", "O2", "O3")
DTYPES = {
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
SHORT_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text

    return parse


def _opt_level(text: str) -> str:
    if text in OPT_LEVELS:
        return text
    if text[:1] in ("0", "o") and f"O{text[1:]}" in OPT_LEVELS:
        raise ValueError(f"an opt level begins with the capital letter O, not with {text[0]!r}: write O{text[1:]}")
    raise ValueError(f"expected one of {', '.join(OPT_LEVELS)} (capital letter O)")


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise ValueError("expected float16 (fp16) or bfloat16 (bf16)")
    return DTYPES[text]


def _output_dtype(text: str) -> str:
    return "float32" if text in ("float32", "fp32", "float") else _dtype(text)


def _flag(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError("expected true or false")


def _positive(text: str) -> float:
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError("expected a finite number above 0")
    return number


def _above_one(text: str) -> float:
    if (number := _positive(text)) <= 1:
        raise ValueError("expected a number above 1")
    return number


def _below_one(text: str) -> float:
    if (number := _positive(text)) >= 1:
        raise ValueError("expected a number between 0 and 1")
    return number


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError("expected a whole number of at least 1")
    return number


def _bits(text: str) -> int:
    if text not in ("2", "4", "8"):
        raise ValueError("expected 2, 4 or 8")
    return int(text)


def _group(text: str) -> int:
    number = int(text)
    if number < 8 or number % 4:
        raise ValueError("expected a multiple of 4 of at least 8")
    return number


def _inner_arm(text: str) -> str:
    """Read an arm inside an arm: its options are joined by `+`, since a comma would end it."""
    inner = Arm.parse(text.replace("+", ","))
    if inner.backend in BACKENDS and "over" in BACKENDS[inner.backend].parsers:
        raise ValueError("expected an arm that is not over another one")
    return str(inner).replace(",", "+")


def _loss_scale(text: str) -> float | str:
    if text == "dynamic":
        return text
    try:
        return _positive(text)
    except ValueError:
        raise ValueError("expected dynamic or a finite number above 0") from None


@dataclass(frozen=True)
class BackendOptions:
    """What may stand behind a backend's colon.

    Attributes:
        parsers: option name to the function that reads its text; it raises `ValueError` with what was expected.
        positional: the option that may be written without its name, such as the opt level in `apex:O2`.
        default: the value of the positional option where none is written.
        aliases: words that stand for an option with its value.
        summary: one line for `ampcompare list`.
        written: options that stand in the canonical text even with these, their defaults.
        implied: defaults that are left out of it.
    """

    parsers: Mapping[str, Callable[[str], Any]]
    positional: str | None = None
    default: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    written: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)


BACKENDS: dict[str, BackendOptions] = {
    "fp32": BackendOptions(
        {"tf32": _flag},
        summary="plain single precision: the reference; tf32 on a GPU that has it",
        implied={"tf32": False},
    ),
    "apex": BackendOptions(
        {
            "opt_level": _opt_level,
            "loss_scale": _loss_scale,
            "keep_batchnorm_fp32": _flag,
            "master_weights": _flag,
            "cast_model_outputs": _output_dtype,
            "min_loss_scale": _positive,
            "max_loss_scale": _positive,
            "engine": _choice("auto", "nvidia", "compat"),
        },
        positional="opt_level",
        default="O1",
        summary="apex.amp at an opt level: O0, O1, O2 or O3",
    ),
    "native": BackendOptions(
        {
            "dtype": _dtype,
            "init_scale": _positive,
            "growth_factor": _above_one,
            "backoff_factor": _below_one,
            "growth_interval": _count,
        },
        positional="dtype",
        default="float16",
        summary="torch.autocast, with torch.amp.GradScaler for fp16",
    ),
    "half": BackendOptions(
        {
            "dtype": _dtype,
            "bn_fp32": _flag,
            "master_weights": _flag,
            "loss_scale": _loss_scale,
            "init_scale": _positive,
            "growth_interval": _count,
        },
        aliases={"dynamic": "loss_scale=dynamic", "fp16": "dtype=fp16", "bf16": "dtype=bf16"},
        summary="manual .half(): 16-bit weights; master_weights and loss_scale=dynamic as fp16 optimizers add them",
        implied={"dtype": "float16", "bn_fp32": False, "master_weights": False},
    ),
    "accelerate": BackendOptions(
        {"mixed_precision": _choice("no", "fp16", "bf16")},
        positional="mixed_precision",
        default="no",
        summary="Hugging Face Accelerate: no, fp16 or bf16",
    ),
    "fabric": BackendOptions(
        {"precision": _choice("32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")},
        positional="precision",
        default="32-true",
        summary="Lightning Fabric: 32-true, 16-mixed, bf16-mixed, 16-true or bf16-true",
    ),
    "mmengine": BackendOptions(
        {"dtype": _output_dtype},
        positional="dtype",
        default="float32",
        summary="mmengine's OptimWrapper (fp32) and AmpOptimWrapper (fp16, bf16), as mmcls uses them",
    ),
    "horovod": BackendOptions(
        {"compression": _choice("none", "fp16"), "passes": _count},
        summary="Horovod's DistributedOptimizer: fp32, gradients exchanged in fp32 or fp16",
        implied={"compression": "none", "passes": 1},
    ),
    "actnn": BackendOptions(
        {"bits": _bits, "group": _group, "over": _inner_arm},
        summary="activations saved for the backward pass in 2, 4 or 8 bits, over another arm",
        written={"bits": 2},
        implied={"group": 256, "over": "fp32"},
    ),
}


def _guess(text: str) -> Any:
    """Read a value of a third-party backend, whose options this package does not know."""
    for read in (int, float, _flag):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _meant(backend: str) -> str:
    """Return what an unknown name was probably to be, as a question; "" where nothing is near."""
    if "," in backend:
        return "several arms are named one by one, each with its own --arm; "
    name, parted, rest = re.sub(r"[-_/ ]", ":", backend, count=1).partition(":")
    if parted and rest and name in BACKENDS:
        return f"did you mean '{name}:{rest}'? "
    for name, spec in BACKENDS.items():  # an option without its backend, such as O2
        if spec.positional is not None:
            try:
                spec.parsers[spec.positional](backend)
            except ValueError:
                continue
            return f"did you mean '{name}:{backend}'? "
    close = difflib.get_close_matches(backend.lower(), BACKENDS, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


@dataclass(frozen=True)
class Arm:
    """One backend with its options. `str(arm)` is canonical: equal arms have equal texts.

    Attributes:
        backend: a key of `BACKENDS`, or the name of an entry point in the group `ampcompare.precisions`.
        options: parsed values by name; only what differs from the backend's own defaults.
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read `backend[:option[,option...]]`, for example `apex:O2,loss_scale=128` or `half:bn_fp32`.

        Raises:
            ConfigError: unknown backend or option, or a value that the option does not take.
        """
        backend, _, rest = text.strip().partition(":")
        words = [word.strip() for word in rest.split(",") if word.strip()] if rest else []
        spec = BACKENDS.get(backend)
        positional = spec.positional if spec else None
        texts: dict[str, str] = {}
        for number, word in enumerate(words):
            word = spec.aliases.get(word, word) if spec else word
            name, equals, value = word.partition("=")
            if not equals:
                if number == 0 and positional is not None and name not in (spec.parsers if spec else ()):
                    name, value = positional, word
                else:
                    value = "true"
            if name in texts:
                raise ConfigError(f"arm {text!r} gives {name} twice; give it once")
            texts[name] = value
        return cls.make(backend, **texts)

    @classmethod
    def make(cls, backend: str, **options: Any) -> Arm:
        """Build an arm from a backend's name and keyword options; `None` means not given.

        Raises:
            ConfigError: as for `parse`.
        """
        given = {name: value for name, value in options.items() if value is not None}
        spec = BACKENDS.get(backend)
        if spec is None:
            if backend not in third_party_backends():
                known = ", ".join([*BACKENDS, *third_party_backends()])
                raise ConfigError(f"unknown backend {backend!r}: {_meant(backend)}known backends are {known}")
            return cls(backend, {k: _guess(v) if isinstance(v, str) else v for k, v in sorted(given.items())})
        parsed: dict[str, Any] = dict(spec.written)
        if spec.positional is not None and spec.default is not None:
            parsed[spec.positional] = spec.default
        for name, value in given.items():
            if name not in spec.parsers:
                close = difflib.get_close_matches(name, spec.parsers, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                known = ", ".join(spec.parsers) or "none"
                raise ConfigError(f"backend {backend!r} has no option {name!r}: {hint}its options are: {known}")
            try:
                parsed[name] = spec.parsers[name](str(value))
            except ValueError as error:
                raise ConfigError(f"arm {backend}: {name}={value!s} cannot be used: {error}") from None
        if parsed.get("engine") == "auto":
            del parsed["engine"]
        parsed = {k: v for k, v in parsed.items() if k not in spec.implied or v != spec.implied[k]}
        if backend == "half" and parsed.get("loss_scale") != "dynamic":
            for name in ("init_scale", "growth_interval"):
                if name in parsed:
                    raise ConfigError(f"arm {backend}: {name} is of a dynamic loss scale; add dynamic, or leave it out")
        order = {name: place for place, name in enumerate(spec.parsers)}
        return cls(backend, dict(sorted(parsed.items(), key=lambda item: order[item[0]])))

    def __str__(self) -> str:
        spec = BACKENDS.get(self.backend)
        words = []
        for name, value in self.options.items():
            shown = SHORT_DTYPES.get(value, value) if isinstance(value, str) else value
            if spec is not None and name == spec.positional:
                words.append(str(shown))
            elif value is True:
                words.append(name)
            elif isinstance(value, float):
                words.append(f"{name}={int(value) if value.is_integer() else value!r}")
            else:
                words.append(f"{name}={str(shown).lower() if isinstance(value, bool) else shown}")
        return f"{self.backend}:{','.join(words)}" if words else self.backend

    def __hash__(self) -> int:
        return hash(str(self))


def third_party_backends() -> dict[str, str]:
    """Return name and `module:class` of each backend that another package registers."""
    from importlib.metadata import entry_points

    return {entry.name: entry.value for entry in entry_points(group="ampcompare.precisions")}
