"""Offload of optimizer states and parameters to host memory."""
