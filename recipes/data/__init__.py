"""Text data of the recipes: reading, tokenizing into a cache, packing, and the `DataModule` of batches."""

from __future__ import annotations

from .module import RecipeData
from .report import DataReport
from .settings import DataSettings

__all__ = ["DataReport", "DataSettings", "RecipeData"]
