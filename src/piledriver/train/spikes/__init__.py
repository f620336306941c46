"""Loss spikes: detect them, and roll back to before them."""
