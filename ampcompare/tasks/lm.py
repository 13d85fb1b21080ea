"""Language modelling: the next byte of a text, cross entropy, bits per byte and perplexity.

Without a file it is generated: sentences of a small made-up language with grammar, the same on every machine.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampcompare.base.errors import BackendUnavailable, ConfigError, suggestion_text
from ampcompare.settings.recipe import ModelConfig, Recipe
from ampcompare.tasks.catalog import (
    BITS_PER_BYTE,
    LANGUAGE_MODELING,
    PERPLEXITY,
    check_data,
    check_model,
    explain_missing_package,
    translate_errors,
)
from ampcompare.tasks.data import choose_indices_evenly, derive_seed
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory, select_arguments
from ampcompare.tasks.hf_data import text_parts
from ampcompare.tasks.in_memory import TensorData
from ampcompare.tasks.models import build_user_model, check_network_arguments
from ampcompare.tasks.networks import AttentionBlock, require_positive_sizes
from ampcompare.tasks.task import Sums, Task
from ampcompare.tasks.torchvision_loader import load_torchvision

WITH_FLOAT64 = ("cpu", "cuda")  # types of devices that all compute in it

SEQUENCE_LENGTH = 64
IGNORED = -100
HASH_MULTIPLIER, HASH_MODULUS = 2_654_435_761, 2**31
INIT_STD = 0.02
ROTARY_BASE = 10_000.0
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
DETERMINERS = (("ta", "una", "so"), ("tai", "unai", "soi"))  # singular, plural
NOUN_ENDINGS = ("", "x")
VERB_ENDINGS = ("h", "w")
_BYTES = 256
SENTENCES = 4000  # 160 kB
HOLDOUT = 10  # the last tenth is for validation
NEWLINE = 10


def lm(recipe: Recipe) -> LanguageModeling:
    length = recipe.data.sequence_length or SEQUENCE_LENGTH
    data = load_text_data(
        recipe.data.name,
        seed=recipe.seed,
        sequence_length=length,
        train_size=recipe.data.train_size,
        val_size=recipe.data.val_size,
    )
    return LanguageModeling(
        data, recipe.model, sequence_length=length, label_smoothing=recipe.label_smoothing
    )


class LanguageModeling(Task):
    """One causal model that gives logits (batch, length, 256) for int64 bytes (batch, length).

    What fills up a sample comes after its text, where a causal model does not see it, and has no part in loss and
    metrics. Every byte has the same weight in an epoch: the loss is summed over the bytes of a batch and divided by
    their average number in so many samples, so that the mean over micro-batches, or ranks, is that of the whole batch.
    """

    metrics = LANGUAGE_MODELING
    unit = "tokens"

    def __init__(
        self,
        data: TensorData,
        model: ModelConfig | None = None,
        *,
        sequence_length: int = SEQUENCE_LENGTH,
        label_smoothing: float = 0.0,
    ) -> None:
        self.data = data
        self._model = model or ModelConfig(arch="gpt")
        self._sequence_length = sequence_length
        self._label_smoothing = label_smoothing
        self._train_length, self._val_length = map(_mean_num_bytes_to_predict, (data.train, data.val))
        self.units_per_sample = round(self._train_length)

    def make_models(self) -> Sequence[nn.Module]:
        return [
            build_language_model(
                self._model.arch,
                vocabulary=_BYTES,
                sequence_length=self._sequence_length,
                model_args=self._model.args,
            )
        ]

    def loss(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.predict(models, batch)
        targets = _bytes_to_predict(batch)
        smoothing = self._label_smoothing
        # Looked up on the module at each call: O1 replaces the function there.
        mean = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
        )
        if "mask" not in batch:
            return mean
        wide = torch.float64 if mean.device.type in WITH_FLOAT64 else torch.float32
        share = batch["mask"].sum(dtype=wide) / (len(targets) * self._train_length)
        return mean * share.to(mean.dtype)

    def predict(self, models: Sequence[nn.Module], batch: Mapping[str, Tensor]) -> Tensor:
        logits = models[0](batch["tokens"][:, :-1].long())
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise ConfigError(
                f"the model returned a {type(logits).__name__}{shape}; lm needs one tensor (batch, length, {_BYTES})"
            )
        return logits

    def measure(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        targets = _bytes_to_predict(batch)
        nats = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        # Over the average length, so that the mean over samples is the mean over bytes.
        loss = nats.sum(1, dtype=torch.float64) / self._val_length
        read = targets != IGNORED
        counts = torch.zeros(len(targets), _BYTES, device=targets.device)
        return {
            "loss": loss,
            BITS_PER_BYTE.name: loss / math.log(2),
            "bytes": counts.scatter_add_(1, targets.where(read, 0), read.float()),
        }

    def answers(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return outputs.argmax(-1).masked_fill(_bytes_to_predict(batch) == IGNORED, IGNORED)

    def values(self, sums: Sums, samples: int) -> dict[str, float]:
        bits = float(sums[BITS_PER_BYTE.name]) / samples
        with np.errstate(over="ignore"):  # of a model that diverged
            return {BITS_PER_BYTE.name: bits, PERPLEXITY.name: float(np.exp2(bits))}

    def chance(self, sums: Sums, samples: int) -> float:
        """Return the entropy of single bytes, in bits."""
        counts = sums["bytes"][sums["bytes"] > 0]
        shares = counts / counts.sum()
        return float(-(shares * np.log2(shares)).sum())

    def labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return a hash of each sample's bytes, so that another text, or another version of it, is seen."""
        tokens = batch["tokens"].long()
        factors = (
            torch.arange(1, tokens.shape[1] + 1, device=tokens.device) * HASH_MULTIPLIER
        ) % HASH_MODULUS
        return (tokens * factors).sum(1) % HASH_MODULUS

    def checkpointed_modules(self, models: Sequence[nn.Module]) -> Sequence[nn.Module]:
        return longest_list_of_alike_modules(models[0])


def _bytes_to_predict(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes to predict, int64 (batch, length), where filling is `IGNORED`."""
    targets = batch["tokens"][:, 1:].long()
    return targets.masked_fill(~batch["mask"], IGNORED) if "mask" in batch else targets


def _mean_num_bytes_to_predict(samples: Mapping[str, Tensor]) -> float:
    """Return the average number of bytes of a sample that are predicted."""
    tokens = samples["tokens"]
    counted = int(samples["mask"].sum()) if "mask" in samples else len(tokens) * (tokens.shape[1] - 1)
    return counted / len(tokens)


class Gpt(nn.Module):
    """Maps tokens (batch, length), whole numbers, to logits (batch, length, vocabulary) of the token after each.

    Attention is written with `matmul` and `softmax`, so that each arm's casts reach it; a fused kernel would hide them.
    Weights begin as those of GPT-2 (Radford et al., 2019): normal of standard deviation 0.02, divided by
    sqrt(2 * depth) where a branch ends. Rotary positions: Su et al., arXiv 2104.09864.
    """

    def __init__(self, vocabulary: int, *, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        require_positive_sizes(width=width, depth=depth, heads=heads)
        if width % (2 * heads):
            raise ConfigError(
                f"gpt has width {width} and {heads} heads; the width must be a multiple of {2 * heads}"
            )
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_CausalBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialize_weights(depth)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]

    def _initialize_weights(self, depth: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=INIT_STD / (math.sqrt(2 * depth) if ends_branch else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class _CausalBlock(AttentionBlock):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = _rotate_query_and_key(query, key)
        length = query.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        return super().scores(query, key).masked_fill(later, -math.inf)


def _rotate_query_and_key(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair of features (i, i + features / 2) of (batch, heads, length, features) by its position.

    Angles are computed in float32: fp16 could not tell late positions apart.
    """
    length, features = query.shape[-2:]
    steps = torch.arange(0, features, 2, device=query.device, dtype=torch.float32) / features
    angles = torch.arange(length, device=query.device, dtype=torch.float32)[:, None] * ROTARY_BASE**-steps
    cosine, sine = angles.cos().to(query.dtype), angles.sin().to(query.dtype)

    def rotate_part(part: Tensor) -> Tensor:
        first, second = part.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)

    return rotate_part(query), rotate_part(key)


def _build_causal_model(
    name: str, *, vocabulary: int, sequence_length: int, arguments: Mapping[str, Any]
) -> nn.Module:
    """Build a model of Transformers that gives logits, with weights from torch's global generator.

    Attention is Transformers' "eager" one, written in matrix products and softmax, so that each arm's casts reach it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when Transformers is imported
    with contextlib.suppress(BackendUnavailable):
        load_torchvision()  # transformers imports it, and could not where its operators do not fit torch
    with explain_missing_package(f"--arch hf:{name} needs", "transformers"):
        transformers: Any = importlib.import_module("transformers")
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if name not in known:
        raise ConfigError(
            f"Transformers has no causal language model {name!r}; {suggestion_text(name, known)}"
        )
    options = {
        "vocab_size": vocabulary,
        "max_position_embeddings": sequence_length,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
        "use_cache": False,
    }
    with translate_errors(f"hf:{name} cannot be built", "change its --model-arg, or choose another"):
        config = transformers.AutoConfig.for_model(name, **options)
        known = [*config.to_dict(), *config.attribute_map]
        for argument in arguments:
            if argument not in known:  # which Transformers would keep silently
                raise ConfigError(
                    f"hf:{name} has no argument {argument!r}; {suggestion_text(argument, known)}"
                )
        config = transformers.AutoConfig.for_model(name, **{**options, **arguments})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return _LogitsModel(model)


class _LogitsModel(nn.Module):
    """Maps tokens (batch, length), int64, to logits (batch, length, vocabulary) by a model of Transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits  # type: ignore[no-any-return]


def build_language_model(
    arch: str, *, vocabulary: int, sequence_length: int, model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the causal model called `arch`, in fp32 on the CPU, with weights from torch's global generator.

    A user's factory is called with those of `vocabulary` and `sequence_length` that it names as parameters;
    `model_args` override them.
    """
    arguments = dict(model_args or {})
    if arch == "gpt":
        check_network_arguments(arch, Gpt, arguments)
        return Gpt(vocabulary, **arguments)
    library, _, name = arch.partition(":")
    if library == "hf":
        return _build_causal_model(
            name, vocabulary=vocabulary, sequence_length=sequence_length, arguments=arguments
        )
    check_model(arch, "lm")
    return build_user_model(arch, {"vocabulary": vocabulary, "sequence_length": sequence_length}, arguments)


def longest_list_of_alike_modules(model: nn.Module) -> Sequence[nn.Module]:
    """Return the members of the longest list of modules of one class in a model; none if it has no list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if blocks and len({type(block) for block in blocks}) == 1]
    return max(alike, key=len, default=[])


NOUNS = 120
VERBS = 60
ADJECTIVES = 40
SINGULAR, PLURAL = 0, 1


def sentences(count: int) -> list[str]:
    """Return `count` sentences of 20 to 90 letters, in ASCII.

    Words follow Zipf's law. Determiner, noun and verb agree in number, also over a relative clause that stands
    between them, so that a model of more context predicts better.
    """
    language = _RandomLanguage()
    return [language.draw_sentence() for _ in range(count)]


class _RandomLanguage:
    """Draws from its own generator by `random.random`, whose numbers Python promises not to change."""

    def __init__(self) -> None:
        self._random = random.Random(derive_seed("grammar")).random
        self._nouns, self._verbs, self._adjectives = map(self._make_words, (NOUNS, VERBS, ADJECTIVES))

    def draw_sentence(self) -> str:
        number = self._draw_number()
        words = [*self._draw_noun_phrase(number)]
        if self._random() < 0.25:
            words += ["ke", self._draw_verb(number), *self._draw_noun_phrase(self._draw_number())]
        words += [self._draw_verb(number), *self._draw_noun_phrase(self._draw_number())]
        if self._random() < 0.3:
            words += ["po", *self._draw_noun_phrase(self._draw_number())]
        return " ".join(words).capitalize() + ("?" if self._random() < 0.15 else ".")

    def _draw_noun_phrase(self, number: int) -> Sequence[str]:
        adjectives = [self._draw_word(self._adjectives)] if self._random() < 0.3 else []
        return (
            self._draw_word(DETERMINERS[number]),
            *adjectives,
            self._draw_word(self._nouns) + NOUN_ENDINGS[number],
        )

    def _draw_verb(self, number: int) -> str:
        return self._draw_word(self._verbs) + VERB_ENDINGS[number]

    def _draw_number(self) -> int:
        return PLURAL if self._random() < 0.4 else SINGULAR

    def _make_words(self, count: int) -> Sequence[str]:
        words: dict[str, None] = {}
        while len(words) < count:
            syllables = 2 + (self._random() < 0.5)
            words[
                "".join(self._draw_letter(CONSONANTS) + self._draw_letter(VOWELS) for _ in range(syllables))
            ] = None
        return list(words)

    def _draw_letter(self, letters: str) -> str:
        return letters[int(self._random() * len(letters))]

    def _draw_word(self, words: Sequence[str]) -> str:
        # The whole part of a power of uniform exponent is k with probability log((k + 1) / k) / log(n + 1): Zipf's law.
        return words[int((len(words) + 1) ** self._random()) - 1]


def load_text_data(
    name: str, *, seed: int, sequence_length: int, train_size: int | None = None, val_size: int | None = None
) -> TensorData:
    """Load text by its name. The last tenth is for validation, whatever the seed.

    `sentences` and `lines:PATH` have one line a sample, and longer lines are cut; other texts are cut into windows that
    overlap by one byte.

    Returns:
        Batches of a dict with `tokens`, uint8 (batch, length + 1), whose first byte is only read. For lines there is
        `mask`, bool (batch, length), too: which of the bytes to predict are not padding. A line begins after a newline
        and ends with one.
    """
    train, val, cut = _read_text_parts_and_cutter(name)
    parts: list[Any] = []
    for text, size, word in ((train, train_size, "training"), (val, val_size, "validation")):
        samples = cut(text, sequence_length)
        count = len(samples["tokens"])
        if not count:
            raise ConfigError(
                f"the {word} part of {name} has {len(text)} bytes, too few for one sample of {sequence_length}; use a "
                "smaller --sequence-length or more text"
            )
        chosen = choose_indices_evenly(count, size, what=f"the {word} part of {name}")
        parts.append({key: tensor[chosen] for key, tensor in samples.items()})
    return TensorData.of(name, *parts, seed=seed)


def _read_text_parts_and_cutter(name: str) -> tuple[bytes, bytes, Callable[[bytes, int], dict[str, Tensor]]]:
    """Return the text of both parts, and what cuts it into samples."""
    check_data(name, "lm")
    kind, _, path = name.partition(":")
    if name in _BUNDLED:
        source, cut = _BUNDLED[name]
        return *_cut_text_in_two(source(), cut), cut
    if kind in _FILES:
        with translate_errors(f"--data {name} cannot be read", "name a file", errors=(OSError,)):
            return *_cut_text_in_two(Path(path).read_bytes(), _FILES[kind]), _FILES[kind]
    return *(text_parts(name) if kind == "hf" else _text_parts_from_factory(name)), _cut_into_windows


def _cut_text_in_two(text: bytes, cut: Callable[[bytes, int], Any]) -> tuple[bytes, bytes]:
    """Cut a text in two, between two lines if its samples are lines."""
    at = len(text) - len(text) // HOLDOUT
    if cut is _cut_into_lines:
        at = text.rfind(b"\n", 0, at) + 1
    return text[:at], text[at:]


def _text_parts_from_factory(path: str) -> tuple[bytes, bytes]:
    factory = resolve_factory(path)
    with factory_errors_reported(path, "calling it"):
        texts = factory(**select_arguments(factory, {}))
    is_pair = isinstance(texts, Sequence) and len(texts) == 2
    if not is_pair or not all(isinstance(text, bytes | str) for text in texts):
        raise ConfigError(
            f"factory {path} must return two texts, for training and validation, as bytes or str"
        )
    train, val = (text.encode() if isinstance(text, str) else text for text in texts)
    return train, val


@functools.cache
def _text_of_grammar() -> bytes:
    return "\n".join(sentences(SENTENCES)).encode()


def _cut_into_windows(text: bytes, length: int) -> dict[str, Tensor]:
    """Return windows of `length + 1` bytes, each beginning with the last byte of the one before."""
    if len(text) <= length:
        return {"tokens": torch.empty(0, length + 1, dtype=torch.uint8)}
    # A copy: a tensor of the windows' view would not be the data set's own.
    return {
        "tokens": torch.frombuffer(bytearray(text), dtype=torch.uint8)
        .unfold(0, length + 1, length)
        .contiguous()
    }


def _cut_into_lines(text: bytes, length: int) -> dict[str, Tensor]:
    """Return each line that is not blank between two newlines, cut to `length` bytes to predict, and masks."""
    lines = [(b"\n" + line + b"\n")[: length + 1] for line in text.splitlines() if line.strip()]
    longest = max(map(len, lines), default=1)
    tokens = np.zeros((len(lines), longest), dtype=np.uint8)
    for row, line in zip(tokens, lines, strict=True):
        row[: len(line)] = np.frombuffer(line, dtype=np.uint8)
    lengths = torch.tensor([len(line) for line in lines])
    mask = torch.arange(1, longest) < lengths[:, None]
    return {"tokens": torch.from_numpy(tokens), "mask": mask}


_BUNDLED: dict[str, tuple[Callable[[], bytes], Callable[[bytes, int], dict[str, Tensor]]]] = {
    "grammar": (_text_of_grammar, _cut_into_windows),
    "sentences": (_text_of_grammar, _cut_into_lines),
}
_FILES = {"text": _cut_into_windows, "lines": _cut_into_lines}
