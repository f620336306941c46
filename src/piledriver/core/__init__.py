"""Floor 0: what all rooms use. Never imports torch.

This file imports nothing, so that the command line starts fast; import from the module.

- `errors`: the errors of this package, each with its fix
- `config/`: frozen dataclasses from YAML and `key=value`; their keys and help
- `storage`: local paths and URLs, atomic writes, checksums; `json_file`, `safetensors`: file formats written here
- `random`: counter-based random streams; `permutation`: a shuffle of any length in constant memory
- `registry`: named objects, extended by other packages; `lazy`: package names imported on first use
- `progress`: a live bar on a terminal, plain lines in a log; `worker_pool`: processes that run tasks
- `safe_pickle`: the restricted unpickler; `byte_size`: sizes such as 5GB
"""
