"""fedavg: everything is shared, plain local epochs (McMahan et al. 2017)."""

from edge_client.methods.setting import Setting
from edge_client.training.phases import Phase

__all__ = ["phases"]


def phases(setting: Setting) -> tuple[Phase, ...]:
    """All parameters, on all examples."""
    return (Phase(setting.epochs, setting.names),)
