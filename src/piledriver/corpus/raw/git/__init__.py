"""Git repositories as data: a reader of their objects that runs nothing and follows no configuration.

Why not the `git` command: it reads the repository's own configuration, which may name programs to run, and it may fetch
missing objects from an address that the repository names. Why not a library: four hundred lines need no dependency, and
a repository cannot enable features that do not exist here (hooks, filters, alternates, submodules, lazy fetching).
"""
