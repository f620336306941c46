"""Choose the layout of a run and predict it."""
