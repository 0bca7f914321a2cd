"""What holds a job up, in words for the operator, with members' names. Pure; decides nothing."""

from collections.abc import Iterable

from coordinator.domain.jobs import JobStatus
from coordinator.rounds.state import JobState, TrainingWindow
from tacit.reason import Reason, sentence

__all__ = ["waiting"]

# How many members are named, and how many characters of a member's reason are shown.
_MAX_NAMES = 3
_LONGEST = 200
_SELF_PAUSED = frozenset({Reason.REASON_ROUNDS_FAILING, Reason.REASON_MEMBERS_DECLINED})


def waiting(state: JobState) -> str:
    """Says why the job waits or has paused itself, and who is left out. Empty while it runs with everybody."""
    needed = state.parameters.job.rounds.min_members
    training = state.status is JobStatus.RUNNING and isinstance(state.phase, TrainingWindow)
    paused = state.status is JobStatus.PAUSED and state.reason in _SELF_PAUSED
    short = len(state.available) < needed
    said = []
    if training and short:
        said.append(f"{len(state.available)} of the {needed} members needed are available")
    elif isinstance(state.phase, TrainingWindow) and training and state.phase.extended:
        late = [name for name in state.available if name not in state.phase.ready_order]
        said.append(f"the training window was extended for {_names(late)}")
    witnessed = state.parameters.witnessed()
    if training and (newer := witnessed.newer & frozenset(state.available)):
        said.append(f"the witnesses of the roster log have yet to sign the certificates of {_names(sorted(newer))}")
        said.append(f"the witness {witnessed.least.hex()} has signed the fewest entries, {witnessed.entries}")
    if state.status is JobStatus.RUNNING and (awaited := state.awaiting_approval):
        said.append(f"the stewards of {_names(list(awaited))} have yet to approve it")
    if paused or (training and short):
        declined = [
            (name, view.declined)
            for name, view in sorted(state.members.items())
            if view.declined and not view.awaits_approval
        ]
        said += _listed(
            f"{name} declined: {(detail or sentence(reason))[:_LONGEST]}" for name, (reason, detail) in declined
        )
    if paused or state.status is JobStatus.RUNNING:
        said += _listed(_silent(state, paused))
    return "; ".join(said)


def _silent(state: JobState, paused: bool) -> Iterable[str]:
    limit = state.parameters.job.rounds.max_missed_deadlines
    for name, view in sorted(state.members.items()):
        if view.missed_deadlines >= limit and (paused or view.away_until > state.round):
            missed = f"{name} missed {view.missed_deadlines} deadlines in a row"
            tried = paused or name in state.available
            yield missed if tried else f"{missed} and is left out until round {view.away_until}"


def _listed(parts: Iterable[str]) -> list[str]:
    every = list(parts)
    more = len(every) - _MAX_NAMES
    return every[:_MAX_NAMES] + ([f"and {more} more"] if more > 0 else [])


def _names(names: list[str]) -> str:
    return ", ".join(_listed(names)) or "nobody"
