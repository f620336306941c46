"""The optimizer's half of a layout: sharded states, local steps, rounding, clipping, loss scaling."""
