"""Simulates many members in few processes: hundreds or thousands, of which some train in each round.

A member runs the product's `train_update`, `protection_of` and `encode` into the ring. The vectors are added in the
ring, and the coordinator's arithmetic (`server`) makes the next version. A member's private state (its arrays, its own
tokenizer if it built one, the last rows of correlated noise) is a file in a temporary folder, in memory only while the
member trains or is tested. A member that was never drawn and has nothing of its own has no file.

Guarantees: the same bundle, members and seed give the same versions and private states, to the bit, for any engine and
number of workers, and if a worker dies and its members train again. All randomness comes from the seed, the round and
the member, and a sum in the ring has no order. A round starts from the private state before it, which is removed only
by the round after.

Like `rounds`, it leaves out TLS, phases, dropouts and masks. A caller may sum the vectors itself (`summed`), for
example by the aggregation protocol, with keys, masks and unmasking; the sum is the same.
"""

import hashlib
import io
import os
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from learning.text.examples import Example
from simulation.engines import Engine, local_engine
from simulation.server import Server
from tacit.method import FedRecon

if TYPE_CHECKING:
    from export.bundle import JobBundle
    from learning.mechanisms.correlated import CorrelatedSteps
    from learning.models import Division, TextClassifier
    from learning.text.corpus import EncodedExamples
    from simulation.table_attack import Step
    from tacit.job import Training

__all__ = [
    "COMMON",
    "PRIOR_ADDED",
    "PRIOR_REMOVED",
    "Crew",
    "Held",
    "Part",
    "Reading",
    "Score",
    "SeededRandom",
    "States",
    "World",
    "cohort_of",
    "crew_of",
    "geometric_mean",
    "play_round",
    "seed_of",
]

Arrays = dict[str, NDArray[np.float32]]
Vector = NDArray[np.float32]

# The private part of a member's model in a test: as the member last left it, or `adapted` to the shared parameters as
# `edge_client export` does: by an epoch on all private parameters, or under fedrecon by making its rows anew.
Reading = Literal["left", "adapted"]
# The rows of a test: the common test set, or the member's own rows. A member's prior says how much more of each label
# it has than the others. `prior removed` subtracts it from the logits of its own model, `prior added` adds it to those
# of the shared model.
Part = Literal["common", "test", "validation", "common, prior removed", "test, prior added", "validation, prior added"]
COMMON: Final = "common"
PRIOR_REMOVED: Final = "common, prior removed"
PRIOR_ADDED: Final = "test, prior added"

# A worker adds the vectors of some members before it sends the sum: of so few that one that dies loses little.
_MAX_SHARE = 64


@dataclass(frozen=True)
class Held:
    """One member's rows."""

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]


@dataclass(frozen=True)
class World:
    """The data that every worker has.

    Args:
        bundle: the job's.
        members: rows of each member.
        common: the test set that all members share.
        states: folder of the private states.
        table: word vectors that own embeddings start from.
        alone: nothing is shared, and members start from the bundle's weights (`local`).
        cached: number of members whose token ids stay in a worker's memory.
        device: where members train, from `pick_device`.
    """

    bundle: "JobBundle"
    members: Sequence[Held]
    common: Sequence[Example]
    states: Path
    table: Path | None = None
    alone: bool = False
    cached: int = 512
    device: str = "cpu"

    @property
    def features(self) -> Path:
        """Folder of what a frozen backbone computed of rows."""
        return self.states.with_name("features")


@dataclass(frozen=True)
class Score:
    """Number of correct answers, of `count`."""

    correct: int
    count: int

    @property
    def accuracy(self) -> float:
        """Share of correct answers, in [0, 1]."""
        return self.correct / self.count


@dataclass
class SeededRandom:
    """Bytes from a seed, for reproducible figures. Not a source for real members."""

    seed: str
    _calls: int = field(default=0, repr=False)

    def bytes(self, n: int, /) -> bytes:
        """Return `n` bytes, as `secure_agg.RandomSource` does."""
        self._calls += 1
        return hashlib.shake_256(f"{self.seed}/{self._calls}".encode()).digest(n)


def seed_of(*parts: object) -> int:
    """Return a seed of 63 bits from public values."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8]) >> 1


def cohort_of(members: int, size: int, seed: int, number: int) -> tuple[int, ...]:
    """Draw the members that train in a round: `size` different ones, ascending, every set equally likely."""
    random = np.random.Generator(np.random.Philox(seed_of("cohort", seed, number)))
    return tuple(sorted(random.choice(members, size, replace=False).tolist()))


def geometric_mean(scores: Sequence[Score]) -> tuple[float, int]:
    """Return the geometric mean of the accuracies, and how many of them are zero.

    A member without a correct answer would make the mean zero, so it counts as having half an answer right.
    """
    values = np.array([max(score.correct, 0.5) / score.count for score in scores])
    return float(np.exp(np.log(values).mean())), sum(not score.correct for score in scores)


class States:
    """The members' private states: one file for a member's newest round, and one for the round before it.

    A file is replaced atomically.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, place: int, before: int | None = None) -> tuple[bytes | None, Arrays] | None:
        """Return a member's own tokenizer and its arrays, or None if it has no state yet.

        Args:
            place: the member.
            before: the state from before this round; None: the newest.
        """
        rounds = [number for number in self._rounds(place) if before is None or number < before]
        if not rounds:
            return None
        with np.load(self._path(place, rounds[-1]), allow_pickle=False) as file:
            tokenizer = file["tokenizer"].tobytes() if "tokenizer" in file else None
            return tokenizer, {name.removeprefix("array/"): file[name] for name in file if name.startswith("array/")}

    def steps(self, place: int, before: int) -> tuple[int, NDArray[np.float64]] | None:
        """Return where a member's correlated noise stood before a round: its next step, and the last rows of noise."""
        rounds = [number for number in self._rounds(place) if number < before]
        if not rounds:
            return None
        with np.load(self._path(place, rounds[-1]), allow_pickle=False) as file:
            return (int(file["noise/step"]), file["noise/rows"]) if "noise/step" in file else None

    def save(
        self,
        place: int,
        tokenizer: bytes | None,
        arrays: Arrays,
        number: int = 0,
        steps: "CorrelatedSteps | None" = None,
    ) -> None:
        """Write the state of a member after a round; 0: before its first. States before the last one go."""
        held: dict[str, NDArray[np.generic]] = {f"array/{name}": array for name, array in arrays.items()}
        if tokenizer is not None:
            held["tokenizer"] = np.frombuffer(tokenizer, np.uint8)
        if steps is not None:
            held |= {"noise/step": np.array(steps.step), "noise/rows": steps.rows}
        data = io.BytesIO()
        # np.savez takes arrays as keywords, but its types do not allow it.
        np.savez(data, **held)  # type: ignore[arg-type]
        path = self._path(place, number)
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        fresh.write_bytes(data.getbuffer())
        fresh.replace(path)
        for old in [each for each in self._rounds(place) if each < number][:-1]:
            self._path(place, old).unlink(missing_ok=True)

    def forget_after(self, number: int) -> None:
        """Remove every state from after this round: those of a round that a stopped simulation had begun."""
        for path in self.folder.glob("*/*.npz"):
            if int(path.stem) > number:
                path.unlink()

    def copy_to(self, folder: Path) -> "States":
        """Copy the present states into another folder, emptied first.

        The files are linked. That is safe because a later state is a new file.
        """
        shutil.rmtree(folder, ignore_errors=True)
        kept = States(folder)
        for path in sorted(self.folder.glob("*/*.npz")):
            (folder / path.parent.name).mkdir(exist_ok=True)
            os.link(path, folder / path.parent.name / path.name)
        return kept

    def _rounds(self, place: int) -> list[int]:
        return sorted(int(path.stem) for path in self._path(place, 0).parent.glob("*.npz"))

    def _path(self, place: int, number: int) -> Path:
        return self.folder / f"{place:06d}" / f"{number:06d}.npz"


class Worker:
    """Trains and tests members in one process, one after the other."""

    def __init__(self, world: World) -> None:
        import torch

        from learning.plugins.loading import admit
        from learning.training.kept import Kept
        from simulation.kept_features import StoredFeatures

        torch.set_num_threads(1)
        # A worker is a process of its own.
        admit(world.bundle.document.model)
        self._world = world
        self._label_shares: dict[int | None, NDArray[np.float64]] = {}
        # By member, part and, if it is the member's own, the tokenizer.
        self._corpora: OrderedDict[tuple[int, str, bytes], EncodedExamples] = OrderedDict()
        # For all members: they train again and again.
        self._features = StoredFeatures(world.features)
        self._like: EncodedExamples | None = None
        self._kept = Kept()

    def train_sum(self, places: Sequence[int], number: int, cohort: int, version: bytes) -> NDArray[np.uint32]:
        """Train members one after the other, and return the sum of their vectors in the ring."""
        first, *others = places
        total = self.train(first, number, cohort, version)
        for place in others:
            total += self.train(place, number, cohort, version)
        return total

    def train(self, place: int, number: int, cohort: int, version: bytes) -> NDArray[np.uint32]:
        """Train a member in a round of `cohort` members, save its private state, and return its vector in the ring."""
        from learning.mechanisms.protection import protection_of
        from learning.text.persons import population_of, unit_of_job
        from learning.training.update import train_update
        from simulation.rounds import backbone_of, correlated_steps

        job, states = self._world.bundle.document, States(self._world.states)
        tokenizer, private = self._state(states, place, number)
        population = population_of(self._world.members[place].train, unit_of_job(job))
        protection = protection_of(job, population)
        steps = correlated_steps(job, population, SeededRandom(f"{job.seed}/{job.name}/classes/{place}"))
        if steps is not None and (stood := states.steps(place, number)) is not None:
            steps.step, steps.rows = stood
        random = SeededRandom(f"{job.seed}/{job.name}/{number}/{place}")
        update = train_update(
            job=job,
            round=number,
            manifest=self._world.bundle.manifest,
            corpus=self._corpus(place, "train", tokenizer),
            base=version,
            protection=protection,
            private=private,
            frozen=self._world.bundle.frozen,
            backbone=backbone_of(self._world.bundle),
            correlated=steps,
            random=random,
            seed=seed_of(job.seed, job.name, number, place),
            device=self._world.device,
            progress=lambda _step, _steps, _loss: None,
            cancelled=lambda: False,
            kept=self._kept,
        )
        vector = protection.encode(job, update, cohort, random)
        if update.private is not None or steps is not None:
            after = private if update.private is None else dict(update.private)
            states.save(place, tokenizer if job.own_vocabulary else None, after, number, steps)
        return vector

    def train_alone(self, place: int, recipes: "Sequence[Training]") -> None:
        """Train a member alone (`local`) by these recipes in turn, with the same loop. All of its model is its own.

        Logits are never adjusted: nobody else has other label proportions, and its model is used as it is.
        """
        from learning.methods import Setting, phases_of
        from learning.models.division import EVERYTHING_SHARED
        from learning.training.local import train
        from tacit.method import Local

        job, states = self._world.bundle.document, States(self._world.states)
        tokenizer, private = self._state(states, place)
        module, division = self._module(place, tokenizer, private, self._world.bundle.weights)
        read = self._corpus(place, "train", tokenizer).read()
        names = frozenset(name for name, each in module.named_parameters() if each.requires_grad)
        rows = module.embedding.num_embeddings
        for turn, recipe in enumerate(recipes):
            plain = recipe.model_copy(update={"logit_adjustment": False})
            seed = seed_of(job.seed, job.name, turn, place)
            setting = Setting(names, division, len(read.ids), plain.epochs, rows, trains_private=True, seed=seed)
            phases = phases_of(Local(), setting)
            train(module, read.ids, read.labels, plain, seed=seed, phases=phases, device=self._world.device)
        states.save(place, tokenizer if job.own_vocabulary else None, EVERYTHING_SHARED.shared(module))

    def score(
        self, place: int, version: bytes, readings: Sequence[Reading], parts: Sequence[Part], states: Path
    ) -> dict[tuple[Reading, Part], Score]:
        """Score a member with these shared parameters and its own private ones, for each reading and part."""
        from learning.training.local import logits_of

        tokenizer, private = self._state(States(states), place)
        module, division = self._module(place, tokenizer, private, version)
        found: dict[tuple[Reading, Part], Score] = {}
        # "left" comes first, because adapting changes the module.
        for reading in sorted(readings, key=lambda reading: reading == "adapted"):
            if reading == "adapted":
                self._adapt(module, division, place, tokenizer, version)
            # Parts of the same rows share their logits and differ only in the shift.
            answered: dict[str, tuple[Vector, NDArray[np.int64]]] = {}
            for part in parts:
                rows, _, how = part.partition(", ")
                if rows not in answered:
                    read = self._corpus(place, rows, tokenizer).read()
                    answered[rows] = logits_of(module, read.ids, device=self._world.device), read.labels
                logits, labels = answered[rows]
                answers = (logits + self._shift(place, how)).argmax(axis=1)
                found[reading, part] = Score(int((answers == labels).sum()), len(labels))
        return found

    def step(self, place: int, version: bytes, texts: int) -> "Step":
        """Return what a member would train on in a step of this version: its present rows and its first texts."""
        from learning.models.division import EMBEDDING
        from learning.text.composed import composed_rows
        from learning.text.tables import entries_of
        from simulation.table_attack import Step

        bundle = self._world.bundle
        tokenizer, private = self._state(States(self._world.states), place)
        module, division = self._module(place, tokenizer, private, version)
        read = self._corpus(place, "train", tokenizer).read()
        public = None
        if bundle.private is not None and EMBEDDING in private:
            manifest, data = bundle.private
            public = manifest.unflatten(manifest.decode(data))[EMBEDDING]
            if bundle.base_tokenizer is not None:
                public = composed_rows(entries_of(tokenizer), entries_of(bundle.base_tokenizer), public)
        return Step(module, division, read.ids[:texts], read.labels[:texts], public)

    def _shift(self, place: int, how: str) -> Vector:
        """Return what to add to the logits for a member's label proportions, (L,).

        It is the logarithm of the member's share of each label over the share that the model was trained for: that of
        all members, or with `logit_adjustment` equal shares.

        Args:
            how: `prior added` adds it, `prior removed` subtracts it, "" changes nothing.

        Source: Bayes' rule for other label proportions, Saerens et al. 2002.
        """
        job = self._world.bundle.document
        if not how:
            return np.zeros(len(job.labels), np.float32)
        trained_for = 1 / len(job.labels) if job.training.logit_adjustment else self._shares(None)
        shift: Vector = np.log(self._shares(place) / trained_for).astype(np.float32)
        return shift if how == "prior added" else -shift

    def _shares(self, place: int | None) -> NDArray[np.float64]:
        """Return the label shares of a member's training rows, (L,); of all members' if `place` is None.

        One row is added to each label, so that no share is zero.
        """
        if place not in self._label_shares:
            members = self._world.members if place is None else (self._world.members[place],)
            found = Counter(example.label for held in members for example in held.train)
            counts = np.array([found[label] + 1 for label in self._world.bundle.document.labels], np.float64)
            self._label_shares[place] = counts / counts.sum()
        return self._label_shares[place]

    def _adapt(
        self, module: "TextClassifier", division: "Division", place: int, tokenizer: bytes, version: bytes
    ) -> None:
        """Adapt the module as `edge_client export` makes a member's own model from these shared parameters."""
        from learning.training.personal import adapted, usual_epochs

        job = self._world.bundle.document
        seed = seed_of(job.seed, job.name, "adapt", place, hashlib.sha256(version).hexdigest())
        corpus = self._corpus(place, "train", tokenizer)
        adapted(job, module, division, corpus, epochs=usual_epochs(job.method), seed=seed, device=self._world.device)

    def _state(self, states: States, place: int, before: int | None = None) -> tuple[bytes, Arrays]:
        """Return a member's tokenizer (its own, or the job's) and private arrays, or its start if it has no state yet.

        `before` is as in `States.load`.

        An own tokenizer is saved at once, because word pieces built again would differ.
        """
        bundle, job = self._world.bundle, self._world.bundle.document
        found = states.load(place, before)
        if found is not None:
            own, arrays = found
            return own or bundle.tokenizer or b"", arrays
        if job.own_vocabulary:
            tokenizer, arrays = self._own_start(place)
            states.save(place, tokenizer, arrays)
            return tokenizer, arrays
        if bundle.private is None:
            return bundle.public_tokenizer, {}
        manifest, data = bundle.private
        return bundle.public_tokenizer, {
            name: each.copy() for name, each in manifest.unflatten(manifest.decode(data)).items()
        }

    def _own_start(self, place: int) -> tuple[bytes, Arrays]:
        """Make a member's own vocabulary from its training texts, and the start of its private parameters."""
        from learning.training.start import first_private, own_vocabulary
        from tacit.method import OwnVocabulary

        job = self._world.bundle.document
        wanted = job.vocabulary
        assert isinstance(wanted, OwnVocabulary)  # noqa: S101  asked for by the caller
        texts = [example.text for example in self._world.members[place].train]
        tokenizer = own_vocabulary(wanted, texts, self._world.table)
        # A real member draws this from its own source. Here too it differs from member to member.
        seed = seed_of(job.seed, job.name, "own", place)
        bundle = self._world.bundle
        arrays = first_private(
            job, tokenizer, bundle.private, self._world.table, base_tokenizer=bundle.base_tokenizer, seed=seed
        )
        return tokenizer, arrays

    def _module(
        self, place: int, tokenizer: bytes, private: Arrays, version: bytes
    ) -> "tuple[TextClassifier, Division]":
        """Return the member's model with these shared parameters, and its division into shared and private."""
        from learning.models import EVERYTHING_SHARED, build_blank, division_of

        bundle, job = self._world.bundle, self._world.bundle.document
        corpus = self._corpus(place, "train", tokenizer)
        module = build_blank(job.model, corpus.vocabulary_size, len(job.labels), corpus.pad_id)
        if self._world.alone and private.keys() == dict(module.named_parameters()).keys():
            # All parameters are the member's own already.
            EVERYTHING_SHARED.load_shared(module, private)
            return module, EVERYTHING_SHARED
        words = corpus.words() if isinstance(job.method, FedRecon) else ()
        division = division_of(job.method, module, words)
        division.load_shared(module, bundle.manifest.unflatten(bundle.manifest.decode(version)))
        division.load_private(module, private)
        division.load_frozen(module, bundle.frozen)
        return module, division

    def _corpus(self, place: int, part: str, tokenizer: bytes) -> "EncodedExamples":
        """Return a part of a member's rows as token ids, from the cache if it is there.

        Members with the same tokenizer share the common test set.
        """
        from learning.text.corpus import EncodedExamples

        own = self._world.bundle.document.own_vocabulary
        key = (-1 if part == COMMON and not own else place, part, hashlib.sha256(tokenizer).digest() if own else b"")
        if key not in self._corpora:
            held = self._world.members[place]
            rows = {"train": held.train, "validation": held.validation, "test": held.test, COMMON: self._world.common}
            # Members of a public tokenizer share its encoder: one for each would fill the memory.
            job = self._world.bundle.document
            made = EncodedExamples(rows[part], job, tokenizer, self._features, like=self._like)
            if not own:
                self._like = made
            if part == COMMON and own:
                # Not cached: it is read once or twice, and a copy for each member would fill the memory.
                return made
            self._corpora[key] = made
            while len(self._corpora) > 3 * self._world.cached:
                self._corpora.popitem(last=False)
        self._corpora.move_to_end(key)
        return self._corpora[key]


class Crew:
    """The members of a world, trained and scored by an engine's workers."""

    def __init__(self, world: World, engine: Engine | None = None) -> None:
        """Joins them. Without an engine, everything runs in this process."""
        self.world = world
        self._engine: Engine | None = engine
        self._here = Worker(world) if engine is None else None

    def train(
        self, places: Sequence[int], number: int, version: bytes, cohort: int | None = None
    ) -> Iterator[NDArray[np.uint32]]:
        """Train members and yield their vectors in the ring, in the order of `places`.

        Args:
            places: the members.
            number: of the round.
            version: that they train from.
            cohort: members of the round, if some of them send nothing; None: these.
        """
        size = len(places) if cohort is None else cohort
        yield from self._each("train", [(place, number, size, version) for place in places])

    def train_sum(self, places: Sequence[int], number: int, version: bytes, cohort: int) -> NDArray[np.uint32]:
        """Train members and return the sum of their vectors. Each worker adds those of several members first.

        Args:
            places: the members, at least one.
            number, version, cohort: as in `train`.
        """
        calls = 1 if self._engine is None else self._engine.workers * self._engine.shares
        share = min(_MAX_SHARE, -(-len(places) // calls))
        shares = [places[first : first + share] for first in range(0, len(places), share)]
        sums = self._each("train_sum", [(each, number, cohort, version) for each in shares])
        total: NDArray[np.uint32] = next(sums)
        # A sum that another process sent may be read-only.
        total = total if total.flags.writeable else total.copy()
        for each in sums:
            total += each
        return total

    def train_alone(self, recipes: "Sequence[Sequence[Training]]", *, places: Sequence[int] | None = None) -> None:
        """Train every member (or `places`) alone, each by its own recipes in turn."""
        for _ in self._each("train_alone", list(zip(self._places(places), recipes, strict=True))):
            pass

    def score(
        self,
        version: bytes,
        readings: Sequence[Reading],
        parts: Sequence[Part],
        *,
        places: Sequence[int] | None = None,
        states: Path | None = None,
    ) -> list[dict[tuple[Reading, Part], Score]]:
        """Score every member (or `places`) with these shared parameters and the private ones in `states`."""
        folder = self.world.states if states is None else states
        return list(self._each("score", [(each, version, readings, parts, folder) for each in self._places(places)]))

    def _places(self, places: Sequence[int] | None) -> Sequence[int]:
        """These members, or all of them."""
        return range(len(self.world.members)) if places is None else places

    def _each(self, what: str, calls: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        if self._engine is not None:
            yield from self._engine.each(what, calls)
            return
        for arguments in calls:
            yield getattr(self._here, what)(*arguments)


@contextmanager
def crew_of(world: World, workers: int) -> Iterator[Crew]:
    """Start worker processes with one torch thread each. A single worker is this process itself.

    Raises:
        ValueError: no workers.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers: at least one is needed")
    if workers == 1:
        yield Crew(world)
        return
    with local_engine(Worker, world, workers) as engine:
        yield Crew(world, engine)


def play_round(
    crew: Crew,
    base: Vector,
    number: int,
    places: Sequence[int],
    *,
    server: Server,
    summed: Callable[[Sequence[NDArray[np.uint32]]], NDArray[np.uint32]] | None = None,
    state: Any = None,
) -> Vector:
    """Play one round and return the next version's values, (d,).

    Args:
        base: the version trained from, (d,).
        number: of the round.
        places: the members that train.
        server: makes the next version.
        summed: adds the vectors in the ring; None adds them one by one as they come.
        state: of the server's optimiser, from `server.state`; plain averaging needs none.

    Raises:
        ValueError: the job is in groups, so its cohorts have several sums.
        StateNeeded: the job's optimiser needs a state, and none is given.
    """
    bundle = crew.world.bundle
    job = bundle.document
    if job.aggregation.groups is not None:
        raise ValueError(f"job {job.name} asks for groups, but this makes one sum; use simulation.rounds")
    version = bundle.manifest.encode(base)
    if summed is None:
        total = crew.train_sum(places, number, version, len(places))
    else:
        total = summed(list(crew.train(places, number, version)))
    return server.publish(job, [(len(places), total)], base, None, state).values
