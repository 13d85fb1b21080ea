"""Results of an evaluation sample by sample as text: one bit for each, or one float32."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from typing import TYPE_CHECKING, Any

from ampcompare.base.errors import RecordError
from ampcompare.records.evaluation import EpochResult, SampleResults

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["pack_right", "pack_values", "unpack_samples"]

ROUNDING = 1e-4  # relative, of a mean of float32


def pack_right(right: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return which samples were right, in the form that records keep.

    Args:
        right: (samples,), bool, in the order of the data set.
        labels: (samples,), whole numbers, in the same order.
    """
    import numpy as np

    packed = np.packbits(right).tobytes()
    return SampleResults(bits=base64.b64encode(packed).decode(), sha256=_hash(packed), labels_sha256=_of_labels(labels))


def pack_values(values: NDArray[Any], labels: NDArray[Any]) -> SampleResults:
    """Return the value of the first metric for each sample, in the form that records keep.

    Args:
        values: (samples,), numbers, in the order of the data set; kept as float32.
        labels: (samples,), whole numbers that tell the samples apart, in the same order.
    """
    packed = values.astype("<f4").tobytes()
    return SampleResults(
        values=base64.b64encode(packed).decode(), sha256=_hash(packed), labels_sha256=_of_labels(labels)
    )


def unpack_samples(result: EpochResult) -> NDArray[Any] | None:
    """Return what an evaluation found for each sample: (samples,) bool where that is right or wrong, else float64.

    Returns:
        None where it kept nothing.

    Raises:
        RecordError: the text is not what `pack_right` or `pack_values` wrote, or contradicts the evaluation.
    """
    kept = result.per_sample
    if kept is None:
        return None
    return _numbers(result, kept) if kept.bits is None else _right(result, kept, kept.bits)


def _right(result: EpochResult, kept: SampleResults, text: str) -> NDArray[Any]:
    import numpy as np

    packed = _decoded(text, -(-result.samples // 8), kept.sha256, result.samples)
    right = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=result.samples).astype(bool)
    counted = next(iter(result.counts.values()), None)
    if int(right.sum()) != counted:
        raise RecordError(f"they count {int(right.sum())} correct samples, and the evaluation {counted}")
    return right


def _numbers(result: EpochResult, kept: SampleResults) -> NDArray[Any]:
    import numpy as np

    packed = _decoded(kept.values or "", 4 * result.samples, kept.sha256, result.samples)
    values: NDArray[Any] = np.frombuffer(packed, dtype="<f4").astype(np.float64)
    mean = float(values.mean())
    if not math.isclose(mean, result.value, rel_tol=ROUNDING, abs_tol=ROUNDING * float(np.abs(values).mean())):
        raise RecordError(f"their mean is {mean:.6g}, and the evaluation has {result.value:.6g}")
    return values


def _decoded(text: str, size: int, digest: str, samples: int) -> bytes:
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"they are not base64 ({error})") from None
    if len(packed) != size:
        raise RecordError(f"they have {len(packed)} bytes, and {samples} samples take {size}")
    if _hash(packed) != digest:
        raise RecordError("their hash is another than the recorded one")
    return packed


def _hash(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def _of_labels(labels: NDArray[Any]) -> str:
    return _hash(labels.astype("<i8").tobytes())
