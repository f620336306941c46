"""Paths of DeepSpeed under which users import names."""
