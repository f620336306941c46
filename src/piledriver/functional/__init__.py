from piledriver.functional.keys import *
from piledriver.functional.module import Module
from piledriver.functional.tree import Tree
