"""What a run minimises, and which weights it may change."""

from piledriver.train.objective.kept_zeros import KeptZeros, check_keeps_zeros
from piledriver.train.objective.next_token import Objective

__all__ = ["KeptZeros", "Objective", "check_keeps_zeros"]
