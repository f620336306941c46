"""A recipe to a corpus: filtered, deduplicated, mixed, split, carded, and able to go on after any interruption."""
