"""Counters of the machine that a rank runs on: host, GPU, energy. `observe.monitor` samples them."""
