"""The stages of a build, one file each.

`extract`, `filter` and `mix` are part of every build. The others are listed in `stage_registry.STAGES`, and a recipe
places them by name.
"""
