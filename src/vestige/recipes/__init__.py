"""What has worked, at which settings? Recipes by name, for known datasets and for a user's data; and plans."""

from vestige.recipes.catalogue import RECIPES, find
from vestige.recipes.recipe import Recipe

__all__ = ["RECIPES", "Recipe", "find"]
