"""Layers; import them from `piledriver.functional`."""
