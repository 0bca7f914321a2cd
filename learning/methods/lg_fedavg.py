"""lg-fedavg: a private representation under a shared top, trained together (Liang et al. 2020)."""

from learning.methods.setting import Setting
from learning.training.phases import Phase

__all__ = ["phases"]


def phases(setting: Setting) -> tuple[Phase, ...]:
    """All parameters, on all examples. It differs from fedavg only in which parameters are private."""
    return (Phase(setting.epochs, setting.names),)
