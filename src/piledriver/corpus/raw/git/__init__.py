"""Git repositories as data: their objects read by hand, so that nothing in them is ever run or obeyed.

Why not the `git` command: it reads the repository's own configuration, which may name programs to run, and it may fetch
what is missing from an address that the repository names. Why not a library: two hundred lines need no dependency, and
what they do not do (hooks, filters, alternates, submodules, lazy fetching) cannot be turned on from inside.
"""
