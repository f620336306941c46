"""Feed-forward layers: MLP and mixture of experts."""
