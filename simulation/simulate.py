"""Simulates a whole job over virtual members: drawn cohorts, losses, rounds, scores, and a checkpoint of each round.

`coordinator simulate` and `tacit.simulate` are this with options. Members train as in `simulation.virtual_members`.

Guarantees. The same bundle, members and plan give the same versions to the bit, for any engine and number of workers,
and after any interruption: `rounds.jsonl` and the versions are written round by round, and a simulation that finds
them goes on behind the last whole round. Files of another job, other rows or another plan are refused. Memory holds
one version and one sum for each group, whatever the number of members.

Coins come from the plan's seed. They protect nobody, so rows must be public or the operator's own. A member's process
cannot get such coins: they are a class of this room, which `edge_client` may not import, and no call of a member takes
a source or a seed (tests/unit/simulation/test_seeded_coins.py).

Not simulated: TLS, phases, time and noised metrics.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example
from learning.training.outcome import TrainingDiverged, TrainingLost
from simulation.kept_features import StoredFeatures
from simulation.rounds import MIN_COHORT, draw
from simulation.server import Server
from simulation.virtual_members import Crew, Held, SeededRandom, States, World, cohort_of, seed_of
from tacit.context import thresholds_of
from tacit.model import RvaeModel
from tacit.prompt import writes

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from simulation.scoring import VersionFigures
    from tacit.job import JobDocument, JobSpec

__all__ = ["Losses", "NotSimulated", "Plan", "Played", "RoundFailed", "Simulation", "check_simulated", "world_of"]

Vector = NDArray[np.float32]
# Adds a cohort's vectors in the ring in another way than one by one: the document, the round, the version's digest, the
# places of all members of the round, those that send, and their vectors.
Summing = Callable[["JobDocument", int, bytes, Sequence[int], Sequence[int], Sequence[NDArray[np.uint32]]], Any]

_ROUNDS, _PLAN = "rounds.jsonl", "plan.json"


class NotSimulated(ValueError):
    """The job, the rows or the folder cannot be used. The text says why and what to do."""


class RoundFailed(NotSimulated):
    """A member's training failed in a round. Rounds before it are on the disk."""


@dataclass(frozen=True)
class Losses:
    """Which members of a cohort are lost before they send.

    Attributes:
        kind: `none`; `random`: each member in each round, independently; `fixed`: the same members in every round.
        share: the probability, or the share of all members, in [0, 1).
    """

    kind: Literal["none", "random", "fixed"] = "none"
    share: float = 0.0

    @classmethod
    def read(cls, text: str) -> "Losses":
        """Read "none", "random:0.1" or "fixed:0.1".

        Raises:
            NotSimulated: it is something else.
        """
        kind, colon, share = text.partition(":")
        try:
            value = float(share) if colon else 0.0
        except ValueError:
            value = -1.0
        if kind == "none" and not colon:
            return cls()
        if not colon or not 0 <= value < 1:
            raise NotSimulated(f"{text[:40]!r} is no loss of members; write none, random:0.1 or fixed:0.1")
        match kind:
            case "random" | "fixed":
                return cls(kind, value)
        raise NotSimulated(f"{text[:40]!r} is no loss of members; write none, random:0.1 or fixed:0.1")

    def lost(self, members: int, cohort: Sequence[int], seed: int, number: int, attempt: int) -> frozenset[int]:
        """Return the members of the cohort that send nothing."""
        if self.kind == "none":
            return frozenset()
        if self.kind == "fixed":
            random = np.random.Generator(np.random.Philox(seed_of("fixed", seed)))
            away = random.choice(members, int(self.share * members), replace=False)
            return frozenset(away.tolist()) & frozenset(cohort)
        random = np.random.Generator(np.random.Philox(seed_of("lost", seed, number, attempt)))
        drawn = random.random(members) < self.share
        return frozenset(place for place in cohort if drawn[place])


@dataclass(frozen=True)
class Plan:
    """What is simulated, beside the job and the rows.

    Attributes:
        seed: of cohorts, losses, training and noise.
        cohort: members of a round; None: all, or the job's `rounds.target_members` if there are more.
        losses: members that send nothing.
        score_every: rounds between scores of the version on the test rows; the last version is always scored.
    """

    seed: int = 0
    cohort: int | None = None
    losses: Losses = field(default_factory=Losses)
    score_every: int = 1


@dataclass(frozen=True)
class Played:
    """One round.

    Attributes:
        round: from 1.
        attempts: how many were needed; each had a new cohort.
        cohort, lost: members of the last attempt, and those of them that are in no sum: they sent nothing, or too many
            of their group did.
        seconds: of the clock.
        change: L2 norm of the version's step.
        accuracy, loss, balanced_accuracy, macro_f1: of the version on the test rows; None if it was not scored. For a
            model that writes, accuracy and loss count response tokens, and the other two are None.
        version: SHA-256 of the version, in hexadecimal.
    """

    round: int
    attempts: int
    cohort: int
    lost: int
    seconds: float
    change: float
    accuracy: float | None
    loss: float | None
    balanced_accuracy: float | None
    macro_f1: float | None
    version: str


def check_simulated(job: "JobDocument | JobSpec") -> None:
    """Refuse a job that cannot be simulated.

    Raises:
        NotSimulated: as said.
    """
    if job.question is not None:
        raise NotSimulated(f"job {job.name} asks a question and trains nothing; there is nothing to simulate")
    if isinstance(job.model, RvaeModel):
        raise NotSimulated("an rvae has no accuracy; measure a classifier on its texts (coordinator finetune)")


def world_of(
    bundle: "JobBundle",
    members: Sequence[Sequence[Example]],
    test: Sequence[Example],
    folder: Path,
    *,
    seed: int,
    device: str = "cpu",
) -> World:
    """Return what the workers are given.

    Args:
        bundle: the job's.
        members: the rows of each.
        test: rows that no member has.
        folder: of the simulation; members' private states lie in it.
        seed: the plan's; it takes the place of the job's, so that another seed is another run of one job.
        device: where members train, from `pick_device`.
    """
    seeded = replace(bundle, document=bundle.document.model_copy(update={"seed": seed}))
    held = [Held(rows, (), ()) for rows in members]
    return World(seeded, held, test, folder / "states", device=device)


class Simulation:
    """One simulation in a folder: `rounds.jsonl`, `versions/N.bin`, the server optimiser's state, private states."""

    def __init__(self, crew: Crew, plan: Plan, server: Server, folder: Path, *, summing: Summing | None = None) -> None:
        """Opens the folder, or makes it.

        Args:
            crew: the members.
            plan: what to play.
            server: the coordinator's arithmetic.
            folder: of the results.

        Raises:
            NotSimulated: the job cannot be simulated, the members are too few, or the folder holds another simulation.
        """
        job = crew.world.bundle.document
        check_simulated(job)
        self._crew, self._plan, self._server = crew, plan, server
        self._summing: Summing | None = None
        self.folder = folder
        members = len(crew.world.members)
        self.cohort = min(members, plan.cohort or job.rounds.target_members)
        if self.cohort < max(MIN_COHORT, job.rounds.min_members):
            raise NotSimulated(
                f"a cohort of {self.cohort} is below the job's rounds.min_members = {job.rounds.min_members}; give "
                "more members, or lower it in the job"
            )
        self._open()
        self.played = self._read()
        # A round that was begun and not finished left states behind.
        States(crew.world.states).forget_after(len(self.played))
        # Of the test rows, which are the same in every round.
        self._features = StoredFeatures(crew.world.features)

    def sum_by(self, summing: Summing) -> None:
        """Add vectors in this way from now on, and not in the ring one by one."""
        self._summing = summing

    @property
    def job(self) -> "JobDocument":
        """The job that is simulated."""
        return self._crew.world.bundle.document

    def run(self, *, rounds: int | None = None) -> Iterator[Played]:
        """Play the rounds that are missing, and yield each once it is on the disk.

        Args:
            rounds: up to this one; None: all of the job.

        Raises:
            NotSimulated: attempts of a round lost too many members, or the coordinator would not publish a sum.
            RoundFailed: a member's training diverged, or failed otherwise.
            WorkersDied: workers die again and again.
        """
        last = self.job.rounds.count if rounds is None else min(rounds, self.job.rounds.count)
        if len(self.played) >= last:
            return
        values, state = self.version(len(self.played)), self._state(len(self.played))
        for number in range(len(self.played) + 1, last + 1):
            began = time.monotonic()
            base = values.copy()
            try:
                values, state, sent = self._round(base, number, state)
            except (TrainingDiverged, TrainingLost) as error:
                raise RoundFailed(f"round {number}: {error}") from error
            scored = number % self._plan.score_every == 0 or number == self.job.rounds.count
            figures = self._figures(values) if scored and self._crew.world.common else None
            data = self._crew.world.bundle.manifest.encode(values)
            attempts, lost = sent
            played = Played(
                number,
                attempts,
                self.cohort,
                lost,
                round(time.monotonic() - began, 4),
                float(np.linalg.norm(values - base)),
                None if figures is None else figures.accuracy,
                None if figures is None else figures.loss,
                None if figures is None else figures.balanced_accuracy,
                None if figures is None else figures.macro_f1,
                hashlib.sha256(data).hexdigest(),
            )
            self._keep(played, data, state)
            yield played

    def version(self, number: int) -> Vector:
        """Return a version's values, (d,); 0 is the start.

        Raises:
            NotSimulated: the file is damaged, or there is no such version.
        """
        bundle = self._crew.world.bundle
        if number == 0:
            return bundle.manifest.decode(bundle.weights).copy()
        try:
            data = self._version(number).read_bytes()
        except OSError as error:
            raise NotSimulated(f"there is no version {number} in {self.folder} ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self.played[number - 1].version:
            raise NotSimulated(
                f"{self._version(number)} is damaged: it is not what {_ROUNDS} names; remove {self.folder} and "
                "simulate again"
            )
        return bundle.manifest.decode(data).copy()

    def _round(self, base: Vector, number: int, state: Any) -> tuple[Vector, Any, tuple[int, int]]:
        """Play one round, in as many attempts as the job allows."""
        job, members = self.job, len(self._crew.world.members)
        _, threshold, _ = thresholds_of(job, self.cohort)
        why = ""
        for attempt in range(1, job.rounds.max_attempts + 1):
            cohort = cohort_of(members, self.cohort, self._plan.seed, number * 1000 + attempt)
            lost = self._plan.losses.lost(members, cohort, self._plan.seed, number, attempt)
            drawn = draw(job, len(cohort), SeededRandom(f"groups/{self._plan.seed}/{number}/{attempt}"))
            sending = [[cohort[at] for at in group if cohort[at] not in lost] for group in drawn]
            # A group that lost too many is not opened, as in a real attempt.
            opened = [group for group in sending if len(group) >= threshold]
            if len(opened) >= job.aggregation.groups_needed:
                sums = self._sums(base, number, cohort, opened)
                try:
                    step = self._server.publish(
                        job, sums, base, SeededRandom(f"server/{self._plan.seed}/{number}"), state, self.cohort
                    )
                except ValueError as error:
                    raise NotSimulated(f"round {number}: the coordinator would not publish it: {error}") from error
                return step.values, self._server.state(job, state), (attempt, self.cohort - sum(map(len, opened)))
            why = f"{len(lost)} of {self.cohort} members were lost"
            if len(drawn) > 1:
                why += f", so that {len(opened)} of {len(drawn)} groups kept {threshold} members"
        needed = f"{threshold} members"
        if job.aggregation.groups is not None:
            needed = f"{job.aggregation.groups_needed} groups of {needed}"
        raise NotSimulated(
            f"round {number}: {why} in the last of {job.rounds.max_attempts} attempts, and a sum needs {needed}; lower "
            "the dropout, or raise rounds.max_attempts in the job"
        )

    def _sums(
        self, base: Vector, number: int, cohort: Sequence[int], opened: Sequence[Sequence[int]]
    ) -> list[tuple[int, NDArray[np.uint32]]]:
        """Train the members of the groups that are opened, and add their vectors by group."""
        job, data = self.job, self._crew.world.bundle.manifest.encode(base)
        if self._summing is None:
            return [(len(group), self._crew.train_sum(group, number, data, len(cohort))) for group in opened]
        sending = sorted(place for group in opened for place in group)
        vectors = list(self._crew.train(sending, number, data, len(cohort)))
        total = self._summing(job, number, hashlib.sha256(data).digest(), cohort, sending, vectors)
        return [(len(sending), total)]

    def _figures(self, values: Vector) -> "VersionFigures | None":
        from simulation.scoring import VersionFigures, figures_of_version, token_figures_of_version

        bundle, rows = self._crew.world.bundle, self._crew.world.common
        # A part of the model stays with each member, so that no one model exists.
        if not self.job.complete:
            return None
        if writes(self.job.model):
            tokens = token_figures_of_version(bundle, values, rows)
            return VersionFigures(tokens.accuracy.value, tokens.loss.value)
        found = figures_of_version(bundle, values, rows, self._features)
        return VersionFigures(found.accuracy, found.loss, found.balanced_accuracy, found.macro_f1)

    # ---- the folder ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        told = {"plan": asdict(self._plan), "job": self.job.digest().hex(), "rows": self._rows_digest()}
        path = self.folder / _PLAN
        try:
            (self.folder / "versions").mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _write(path, json.dumps(told, indent=1).encode())
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise NotSimulated(f"{self.folder} cannot be used ({error}); choose another folder with --out") from error
        if not isinstance(found, dict) or found != told:
            different = [key for key in told if not isinstance(found, dict) or found.get(key) != told[key]]
            raise NotSimulated(
                f"{self.folder} holds another simulation (another {', '.join(different)}); choose another folder with "
                "--out, or remove it"
            )

    def _rows_digest(self) -> str:
        seen = hashlib.sha256()
        for rows in (*(held.train for held in self._crew.world.members), self._crew.world.common):
            seen.update(b"\x1e")
            for row in rows:
                # Turns do not print themselves.
                turns = () if row.dialogue is None else tuple((turn.role, turn.text) for turn in row.dialogue.turns)
                seen.update(repr((row.texts, row.label, row.person, turns)).encode() + b"\x1f")
        return seen.hexdigest()

    def _read(self) -> list[Played]:
        path = self.folder / _ROUNDS
        try:
            lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
            # What follows the last line's end was cut off by a crash.
            played = [Played(**json.loads(line)) for line in lines[:-1]]
            if lines and lines[-1]:
                _write(path, "".join(line + "\n" for line in lines[:-1]).encode())
        except (OSError, ValueError, TypeError) as error:
            raise NotSimulated(f"{path} is damaged ({error}); remove {self.folder} and simulate again") from error
        if [each.round for each in played] != list(range(1, len(played) + 1)):
            raise NotSimulated(f"{path} is damaged: its rounds do not follow each other; remove {self.folder}")
        return played

    def _state(self, number: int) -> Any:
        fresh = self._server.state(self.job)
        if number == 0 or not self._server.stored(fresh):
            return fresh
        path = self._kept_state(number)
        try:
            with np.load(path, allow_pickle=False) as file:
                return self._server.restored(self.job, {name: file[name] for name in file})
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            # A fresh state would make other versions, and nothing would show it.
            raise NotSimulated(
                f"{path} is missing or damaged, and the server's optimiser goes on from it; remove {self.folder} and "
                "simulate again"
            ) from error

    def _keep(self, played: Played, data: bytes, state: Any) -> None:
        _write(self._version(played.round), data)
        if before := dict(self._server.stored(state)):
            import io

            packed = io.BytesIO()
            np.savez(packed, **before)  # type: ignore[arg-type]
            _write(self._kept_state(played.round), packed.getvalue())
        with (self.folder / _ROUNDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(played)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.played.append(played)
        # Only now: until the line is there, the round before is the one that goes on.
        self._kept_state(played.round - 1).unlink(missing_ok=True)

    def _kept_state(self, number: int) -> Path:
        return self.folder / "versions" / f"{number}.state.npz"

    def _version(self, number: int) -> Path:
        return self.folder / "versions" / f"{number}.bin"


def _write(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
