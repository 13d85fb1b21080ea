"""The types that the functions of this interface take and return."""

from ampcompare.backends.arm import Arm
from ampcompare.results.records.run import RunRecord
from ampcompare.results.records.step import StepRecord
from ampcompare.settings.config import RunConfig
from ampcompare.settings.recipe import Recipe

__all__ = ["Arm", "Recipe", "RunConfig", "RunRecord", "StepRecord"]
