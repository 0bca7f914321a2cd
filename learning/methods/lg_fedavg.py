"""lg-fedavg: a private representation below, a shared top; both trained together (Liang et al. 2020)."""

from learning.methods.setting import Setting
from learning.training.phases import Phase

__all__ = ["phases"]


def phases(setting: Setting) -> tuple[Phase, ...]:
    """All parameters, on all examples: what differs from fedavg is where the line between shared and private runs."""
    return (Phase(setting.epochs, setting.names),)
