"""The types that the functions of this interface take and return."""

from ampcompare.backends.arm import Arm as Arm
from ampcompare.results.records.run import RunRecord as RunRecord
from ampcompare.results.records.step import StepRecord as StepRecord
from ampcompare.settings.config import RunConfig as RunConfig
from ampcompare.settings.recipe import Recipe as Recipe
