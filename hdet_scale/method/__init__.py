from hdet_scale.method.paper import PaperRule
from hdet_scale.method.spread import assignment, multipliers

__all__ = ["PaperRule", "assignment", "multipliers"]
