"""The methods a job can choose: what a member does in a round with what is shared and what it keeps.

One file each over one training loop (`learning.training.local.train`); a method lays out phases and nothing else.
Which parts are private stands in `tacit.method`, the line by parameter name in `learning.models.division`.
"""

from learning.methods import fedavg, fedprox, fedrecon, fedvocab, lg_fedavg, local
from learning.methods.setting import Setting
from learning.training.phases import Phase
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg, Local, Method

__all__ = ["Setting", "phases_of"]


def phases_of(method: Method, setting: Setting) -> tuple[Phase, ...]:
    """What a member trains in a round, in this order."""
    match method:
        case Local():
            return local.phases(setting)
        case FedAvg():
            return fedavg.phases(setting)
        case FedProx():
            return fedprox.phases(method, setting)
        case LgFedAvg():
            return lg_fedavg.phases(setting)
        case FedRecon():
            return fedrecon.phases(method, setting)
        case FedVocab():
            return fedvocab.phases(method, setting)
