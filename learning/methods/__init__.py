"""The methods that a job can choose: what a member trains in a round, of its shared and its private parameters.

Each method is one file over one training loop (`learning.training.local.train`), and only defines phases.
`tacit.method` says which parts are private, and `learning.models.division` draws the line by parameter name.
"""

from learning.methods import fedavg, fedprox, fedrecon, fedvocab, lg_fedavg, local
from learning.methods.setting import Setting
from learning.training.phases import Phase
from tacit.method import FedAvg, FedProx, FedRecon, FedVocab, LgFedAvg, Local, Method

__all__ = ["Setting", "phases_of"]


def phases_of(method: Method, setting: Setting) -> tuple[Phase, ...]:
    """The phases that a member trains in a round, in order."""
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
