"""The tests of `decide` for many comparisons at once, as arrays: a test holds them against it word by word."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from ampcompare.results.analysis.effects.step_time import TIME_FLOOR
from ampcompare.results.analysis.inference.effect import ERROR_RATE
from ampcompare.results.analysis.inference.terms import Terms

Floats = NDArray[np.float64]
Truths = NDArray[np.bool_]
MARGIN = Terms().log_time_margin().size


@dataclass(frozen=True)
class Claims:
    """What the tests show of each arm, comparisons x arms; `mean` is that of its pairs."""

    mean: Floats
    different: Truths
    equivalent: Truths
    non_inferior: Truths


def claims(differences: Floats, margin: float, floor: float) -> Claims:
    """Test each claim for all arms of a comparison by Holm's method.

    Args:
        differences: arm minus reference, more is better; comparisons x arms x pairs.
        floor: of the standard deviation.
    """
    pairs = differences.shape[2]
    mean = differences.mean(axis=2)
    error = np.maximum(floor, differences.std(axis=2, ddof=1)) / np.sqrt(pairs)
    different = 2 * stdtr(pairs - 1, -np.abs(mean) / error)
    low, high = (stdtr(pairs - 1, (sign * mean - margin) / error) for sign in (-1, 1))
    return Claims(mean, _holm(different), _holm(np.maximum(low, high)), _holm(low))


def _holm(p: Floats) -> Truths:
    """Return which p values of a comparison are significant by Holm's method; one row for each comparison."""
    order = np.argsort(p, axis=1)
    steps = ERROR_RATE / (p.shape[1] - np.arange(p.shape[1]))
    held = np.logical_and.accumulate(np.take_along_axis(p, order, 1) < steps, axis=1)
    result = np.zeros(p.shape, bool)
    np.put_along_axis(result, order, held, 1)
    return result


def is_winner(logs: Floats) -> Truths:
    """Return whether each arm but the first is `better` or `worse` in time.

    Args:
        logs: log step times, comparisons x seeds x arms; the first arm is the reference.

    Returns:
        Comparisons x (arms - 1).
    """
    shown = claims((logs[:, :, :1] - logs[:, :, 1:]).transpose(0, 2, 1), MARGIN, TIME_FLOOR)
    return np.asarray(shown.different & (np.abs(shown.mean) > MARGIN) & ~shown.equivalent)
