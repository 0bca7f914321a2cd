"""What holds a job up, in words for the operator, with members' names. Pure; nothing is decided here."""

from collections.abc import Iterable

from coordinator.domain.jobs import JobStatus
from coordinator.rounds.state import JobState, Training
from tacit.reason import Reason, sentence

__all__ = ["waiting"]

# Members named, and characters of what one of them said.
_MOST_NAMES = 3
_LONGEST = 200
_SELF_PAUSED = frozenset({Reason.REASON_ROUNDS_FAILING, Reason.REASON_MEMBERS_DECLINED})


def waiting(state: JobState) -> str:
    """Why the job stands, or has paused itself, and who is left out; empty while it goes on with everybody."""
    needed = state.parameters.job.rounds.min_members
    training = state.status is JobStatus.RUNNING and isinstance(state.phase, Training)
    paused = state.status is JobStatus.PAUSED and state.reason in _SELF_PAUSED
    short = len(state.available) < needed
    said = []
    if training and short:
        said.append(f"{len(state.available)} of the {needed} members needed are here")
    elif isinstance(state.phase, Training) and training and state.phase.extended:
        late = [name for name in state.available if name not in state.phase.ready_order]
        said.append(f"the training window was extended for {_names(late)}")
    if paused or (training and short):
        declined = [(name, view.declined) for name, view in sorted(state.members.items()) if view.declined]
        said += _listed(
            f"{name} declined: {(detail or sentence(reason))[:_LONGEST]}" for name, (reason, detail) in declined
        )
    if paused or state.status is JobStatus.RUNNING:
        said += _listed(_silent(state, paused))
    return "; ".join(said)


def _silent(state: JobState, paused: bool) -> Iterable[str]:
    limit = state.parameters.job.rounds.losses
    for name, view in sorted(state.members.items()):
        if view.losses >= limit and (paused or view.away_until > state.round):
            missed = f"{name} missed {view.losses} deadlines in a row"
            tried = paused or name in state.available
            yield missed if tried else f"{missed} and is left out until round {view.away_until}"


def _listed(parts: Iterable[str]) -> list[str]:
    every = list(parts)
    more = len(every) - _MOST_NAMES
    return every[:_MOST_NAMES] + ([f"and {more} more"] if more > 0 else [])


def _names(names: list[str]) -> str:
    return ", ".join(_listed(names)) or "nobody"
