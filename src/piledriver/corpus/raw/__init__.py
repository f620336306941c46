"""Raw input files: archives, compression and repositories, opened safely and read up to where they are damaged."""
