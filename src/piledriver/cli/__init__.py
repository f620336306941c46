"""Floor 8: the command line. One file per verb, parsing and printing only."""
