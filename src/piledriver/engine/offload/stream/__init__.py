"""Blocks that come to the device ahead of their use, for inference and for training: order, transfers, memory."""
