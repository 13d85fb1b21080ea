"""Per-image results: what is packed comes back, and what was damaged is refused by name."""

import math
from typing import Any

import numpy as np
import pytest

from ampcompare.base.errors import RecordError
from ampcompare.results.records.evaluation import EpochResult, pack_right, unpack_samples


def result(correct: Any, **changes: Any) -> EpochResult:
    """An evaluation of ten classes with these images correct."""
    images = pack_right(correct, np.arange(len(correct)) % 10).model_copy(update=changes)
    return EpochResult(
        epoch=0, samples=len(correct), top1_correct=int(correct.sum()), top5_correct=len(correct), loss=1.0,
        train_seconds=1.0, eval_seconds=1.0, per_sample=images,
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 7, 8, 9, 360])
def test_bits_come_back(count: int) -> None:
    """Any number of images survives packing and JSON, one bit each."""
    correct = np.random.default_rng(count).random(count) < 0.7
    stored = EpochResult.model_validate_json(result(correct).model_dump_json())
    unpacked = unpack_samples(stored)
    assert unpacked is not None
    assert unpacked.tolist() == correct.tolist()
    assert stored.per_sample is not None
    assert len(stored.per_sample.bits) == 4 * math.ceil(math.ceil(count / 8) / 3)


def test_the_hash_of_labels_knows_their_order() -> None:
    """Equal labels have equal hashes in any integer type; another order has another."""
    correct = np.ones(6, dtype=bool)
    labels = np.array([3, 1, 2, 2, 0, 1], dtype=np.int32)
    there = pack_right(correct, labels).labels_sha256
    assert there == pack_right(correct, labels.astype(np.int64)).labels_sha256
    assert there != pack_right(correct, labels[::-1]).labels_sha256


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": "AAA*"}, "they are not base64"),
        ({"bits": "é"}, "they are not base64"),
        ({"bits": "AAAA"}, "their hash is another than the recorded one"),
        ({"sha256": "0" * 64}, "their hash is another than the recorded one"),
    ],
)
def test_damaged_bits_are_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        unpack_samples(result(np.arange(10) < 6, **changes))


def test_an_old_evaluation_has_none() -> None:
    """A record without the field is read, and has no per-image results."""
    old = result(np.arange(10) < 6).model_dump()
    del old["per_sample"]
    assert unpack_samples(EpochResult.model_validate(old)) is None
