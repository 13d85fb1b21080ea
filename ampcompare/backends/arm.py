"""The text of an arm, `backend[:option[,option...]]`, parsed, checked and written back in one canonical form.

Needs neither torch nor pydantic, so that a mistyped arm is refused before anything heavy is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ampcompare.backends.catalog import described_backends, find_spec, third_party_backends
from ampcompare.backends.options import DTYPE_NAMES, INNER_ARM, flag
from ampcompare.backends.spec import BackendSpec, EffectiveArm
from ampcompare.errors import ConfigError, close_matches

__all__ = ["Arm"]


def _guess(text: str) -> Any:
    """Read a value of a third-party backend, whose options this package does not know."""
    for read in (int, float, flag):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _written(value: Any) -> str:
    """Return a parsed value as the text of an arm has it: 128.0 as 128, float16 as fp16, True as true."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return DTYPE_NAMES.get(value, value) if isinstance(value, str) else str(value)


def _hint(backend: str) -> str:
    """Return what an unknown name was probably meant to be, as a question; "" if nothing is near."""
    known = described_backends()
    if "," in backend:
        return "several arms are named one by one, each with its own --arm; "
    name, parted, rest = re.sub(r"[-_/ ]", ":", backend, count=1).partition(":")
    if parted and rest and name in known:
        return f"did you mean '{name}:{rest}'? "
    for name, spec in known.items():  # an option without its backend, such as O2
        if spec.positional is not None and spec.parsers is not None:
            try:
                spec.parsers[spec.positional](backend)
            except ValueError:
                continue
            return f"did you mean '{name}:{backend}'? "
    close = close_matches(backend.lower(), known)
    return f"did you mean {close[0]!r}? " if close else ""


def _inner_arm(text: str) -> str:
    """Read an arm inside an arm: its options are joined by `+`, since a comma would end it."""
    inner = Arm.parse(text.replace("+", ","))
    if (inner.spec.parsers or {}).get("over") is INNER_ARM:
        raise ValueError("expected an arm that is not over another one")
    return str(inner).replace(",", "+")


@dataclass(frozen=True)
class Arm:
    """One backend with its options. `str(arm)` is canonical: equal arms have equal texts.

    Attributes:
        backend: its name in `ampcompare.backends.catalog`.
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
        spec = find_spec(backend)
        aliases, positional = (spec.aliases, spec.positional) if spec else ({}, None)
        texts: dict[str, str] = {}
        for number, word in enumerate(words):
            word = aliases.get(word, word)
            name, equals, value = word.partition("=")
            if not equals:
                if number == 0 and positional is not None and name not in ((spec.parsers if spec else None) or {}):
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
        spec = find_spec(backend)
        if spec is None:
            known = ", ".join([*described_backends(), *third_party_backends()])
            raise ConfigError(f"unknown backend {backend!r}: {_hint(backend)}known backends are {known}")
        if spec.parsers is None:
            return cls(backend, {k: _guess(v) if isinstance(v, str) else v for k, v in sorted(given.items())})
        parsed: dict[str, Any] = dict(spec.written)
        if spec.positional is not None and spec.default is not None:
            parsed[spec.positional] = spec.parsers[spec.positional](spec.default)
        for name, value in given.items():
            if name not in spec.parsers:
                close = close_matches(name, spec.parsers)
                hint = f"did you mean {close[0]!r}? " if close else ""
                names = ", ".join(spec.parsers) or "none"
                raise ConfigError(f"backend {backend!r} has no option {name!r}: {hint}its options are: {names}")
            read = _inner_arm if spec.parsers[name] is INNER_ARM else spec.parsers[name]
            try:
                parsed[name] = read(str(value))
            except ValueError as error:
                raise ConfigError(f"arm {backend}: {name}={value!s} cannot be used: {error}") from None
        parsed = {k: v for k, v in parsed.items() if k not in spec.implied or v != spec.implied[k]}
        if wrong := spec.check(parsed):
            raise ConfigError(f"arm {backend}: {wrong}")
        order = {name: place for place, name in enumerate(spec.parsers)}
        return cls(backend, dict(sorted(parsed.items(), key=lambda item: order[item[0]])))

    @property
    def spec(self) -> BackendSpec:
        """The description of its backend."""
        spec = find_spec(self.backend)
        assert spec is not None, self.backend  # checked when the arm was built
        return spec

    def effective(self, device: str) -> EffectiveArm | None:
        """Return what runs on "cpu" or "cuda"; None if the backend always runs what it is asked."""
        return self.spec.effective(self.options, device) if self.spec.effective is not None else None

    @property
    def inner(self) -> Arm | None:
        """The arm that this one runs on, such as the one under packed activations; None if there is none."""
        text = self.spec.inner(self.options)
        return Arm.parse(text) if text else None

    def __str__(self) -> str:
        positional = self.spec.positional
        words = []
        for name, value in self.options.items():
            if name == positional:
                words.append(_written(value))
            else:
                words.append(name if value is True else f"{name}={_written(value)}")
        return f"{self.backend}:{','.join(words)}" if words else self.backend

    def __hash__(self) -> int:
        return hash(str(self))
