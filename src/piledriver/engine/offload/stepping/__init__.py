"""Optimizer steps on master weights in host memory and files, block by block.

- `block_step`: read, compute and write blocks of master weights and states; `pipeline`: the buffers they pass through
- `backward_step`: step each block in the backward, when its gradients have arrived
- `replace_step`: the step of a user's optimizer, replaced by one of these
"""
