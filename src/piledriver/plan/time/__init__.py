"""Predict the time of one step: operators on rates, collectives on links, overlap, bubbles, optimizer, offload."""
