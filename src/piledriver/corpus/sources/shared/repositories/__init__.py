"""Source code: repositories on disk, in git's storage and in archives, to files, and files to documents by rules."""
