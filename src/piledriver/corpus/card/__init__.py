"""The dataset card of a corpus: facts, README.md and card.html."""
