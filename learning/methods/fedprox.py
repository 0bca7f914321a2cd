"""fedprox: fedavg, kept near the version that the training started from (Li et al. 2020, algorithm 2)."""

from learning.methods.setting import Setting
from learning.training.phases import Phase
from tacit.method import FedProx

__all__ = ["phases"]


def phases(method: FedProx, setting: Setting) -> tuple[Phase, ...]:
    """All parameters, on all examples, with mu/2 |w - w0|^2 in the loss."""
    return (Phase(setting.epochs, setting.names, mu=method.mu),)
