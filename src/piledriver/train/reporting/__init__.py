"""What a run reports: metrics, display, plots."""
