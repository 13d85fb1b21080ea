"""Per-image results of an evaluation as a few bytes of text: one bit for each validation image."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Any

from ampcompare.errors import RecordError
from ampcompare.records.evaluation import EpochResult, ImageResults

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["pack_images", "unpack_images"]


def pack_images(correct: NDArray[Any], labels: NDArray[Any]) -> ImageResults:
    """Return which images were classified correctly, in the form that records keep.

    Args:
        correct: (images,), bool, in the order of the data set.
        labels: (images,), whole numbers, in the same order.
    """
    import numpy as np

    packed = np.packbits(correct).tobytes()
    return ImageResults(
        bits=base64.b64encode(packed).decode(),
        sha256=hashlib.sha256(packed).hexdigest(),
        labels_sha256=hashlib.sha256(labels.astype("<i8").tobytes()).hexdigest(),
    )


def unpack_images(result: EpochResult) -> NDArray[Any] | None:
    """Return which images an evaluation found classified correctly, (images,) bool; None where it kept none.

    Raises:
        RecordError: the bits are not what `pack_images` wrote, or contradict the counts of the evaluation.
    """
    import numpy as np

    if result.images is None:
        return None
    try:
        packed = base64.b64decode(result.images.bits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"they are not base64 ({error})") from None
    expected = -(-result.samples // 8)
    if len(packed) != expected:
        raise RecordError(f"they have {len(packed)} bytes, and {result.samples} images take {expected}")
    if hashlib.sha256(packed).hexdigest() != result.images.sha256:
        raise RecordError("their hash is another than the recorded one")
    correct = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=result.samples).astype(bool)
    counted = next(iter(result.counts.values()), None)
    if int(correct.sum()) != counted:
        raise RecordError(f"they count {int(correct.sum())} correct images, and the evaluation {counted}")
    return correct
