"""Floor 3: trackers, timers, memory, flops, communication, system monitor, profile report. See docs/observe.md.

Import from the file that answers your question; this one imports nothing, so that a tracker costs no torch.
"""
