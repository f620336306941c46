"""Duplicates: exact, near, paragraph and substring; each keeps the first and says why the others went."""
