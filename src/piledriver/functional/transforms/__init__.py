"""Function transforms: grad, vmap, jit, lift, remat, control flow."""
