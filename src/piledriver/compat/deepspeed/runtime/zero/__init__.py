"""Paths of DeepSpeed under which users import the estimators of model states."""
