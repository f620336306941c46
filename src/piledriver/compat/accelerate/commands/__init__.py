"""`accelerate.commands`: the launcher, for programs that start it themselves (TRL's command line does)."""
