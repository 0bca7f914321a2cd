"""Chooses which matrices of LoRA a job trains where its file leaves that to the bundle.

A change is the product of two matrices, B A, and members' updates are averaged and noised matrix by matrix. Noise on
both multiplies, and the mean of both is not the mean of the products. With A frozen at public random values the mean is
exact and the noise enters once (FFA-LoRA, Sun et al. 2024; docs/decisions/0061).

It is for transformers and for models that write. A prompted model that labels texts trains both.
"""

from collections.abc import Callable

from tacit.mechanism import Mechanism, NoMechanism
from tacit.prompt import LoRA

__all__ = ["adapters_for"]


def adapters_for(injection: LoRA, mechanism: Mechanism, report: Callable[[str], None]) -> LoRA:
    """The same changes with `train` chosen.

    Args:
        injection: as the operator wrote it. A `train` that it names stays.
        mechanism: the job's. With noise only B is trained ("up"), without it both matrices.
        report: called with a sentence if the choice is "up".
    """
    if injection.train is not None:
        return injection
    noised = not isinstance(mechanism, NoMechanism)
    if noised:
        report("adapters: only their second matrices are trained (train = up), because the job adds noise")
    return injection.model_copy(update={"train": "up" if noised else "both"})
