"""`save_state`, `load_state` and single files."""
