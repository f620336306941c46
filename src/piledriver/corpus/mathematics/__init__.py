"""Questions and answers of school mathematics, after DeepMind's mathematics_dataset, with exact rational arithmetic."""
