from hdet_scale.converge.pipeline import Converge, NoHealthyReplicaError, OuterStep

__all__ = ["Converge", "NoHealthyReplicaError", "OuterStep"]
