"""From a recipe to all that a run will do: which matrix gets which scheme, and where its bytes go."""
