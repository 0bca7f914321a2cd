"""fedvocab: the vocabulary and its embedding stay private (algorithm 1 of the FedVocab paper).

A member that missed some rounds has an embedding that fits old shared parameters. Adaptive updating (section 3.3)
adapts it to the new ones before both are trained together.
"""

from learning.methods.setting import Setting
from learning.models.division import EMBEDDING
from learning.training.phases import Phase
from tacit.method import FedVocab

__all__ = ["phases"]


def phases(method: FedVocab, setting: Setting) -> tuple[Phase, ...]:
    """One epoch on the embedding alone if the job says so, then all parameters together."""
    if not setting.trains_private:
        return (Phase(setting.epochs, setting.names - {EMBEDDING}),)
    together = Phase(setting.epochs, setting.names)
    return (Phase(1, frozenset({EMBEDDING})), together) if method.adaptive else (together,)
