"""Source code: the files of repositories on disk, in git's storage and in archives, and the rules that select them."""
