"""Samplers that start at any position: random order, batches of one rank, the position that ranks share."""
