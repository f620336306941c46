"""The report of a profile over all ranks: stragglers, critical path, text, JSON, one HTML page."""
