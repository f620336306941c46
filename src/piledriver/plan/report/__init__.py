"""A plan as a terminal table and as a picture."""
