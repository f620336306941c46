"""Raw input files: archives, compression and git repositories, opened safely and read up to the first damage."""
