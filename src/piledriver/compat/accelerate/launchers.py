"""`accelerate.launchers`: run a function on several processes, from a notebook or a test."""

from piledriver.runtime.launch.function import debug_launcher, notebook_launcher
