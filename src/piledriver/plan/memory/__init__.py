"""Predict the memory of one step: states by ZeRO stage, then a timeline by phase and category on each kind of rank."""
