"""Floor 0: what every room stands on. Never imports torch.

Import from the file that answers your question; this file imports nothing, so that the command line starts at once.

- `errors`: every error that we raise on purpose, each with its fix
- `config`: frozen dataclasses from YAML and `key=value`
- `storage`: local paths and URLs, atomic writes, checksums
- `random`: counter-based random streams; `permutation`: a shuffle of any length in constant memory
- `registry`: names to things, open to other packages
- `progress`: a live bar on a terminal, plain lines in a log
"""
