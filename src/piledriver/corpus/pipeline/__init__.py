"""Build a corpus from a recipe: filter, deduplicate, mix, split and publish, resumable after any interruption."""
