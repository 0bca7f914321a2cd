"""Prepares a simulation from a job, rows and options: the bundle, the rows' parts, the members, the engine."""

import fcntl
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from learning.backbones.collection import Collection
from learning.text.examples import Example
from learning.text.persons import persons_of, unit_of_job
from simulation.engines import Engine, local_engine, ray_engine
from simulation.partitions import Partition, by_column, by_label, by_quantity, by_ratios
from simulation.server import Server
from simulation.simulate import NotSimulated, Plan, Simulation, Summing, world_of
from simulation.trial import Rows, divide
from simulation.trying import check_rows
from simulation.virtual_members import Crew, Worker
from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec, VocabularyFile
from tacit.prompt import Head, PromptedModel, writes

__all__ = ["Engines", "Prepared", "Shares", "dealt", "opened", "parts_of", "prepared"]


EngineName = Literal["local", "ray"]


@dataclass(frozen=True)
class Engines:
    """What runs members.

    Attributes:
        name: `local` or `ray`.
        workers: processes or actors; with `local`, one runs everything in this process.
        address: of a Ray cluster; None starts Ray on this machine.
        gpus: share of a GPU that each of Ray's actors has.
        device: where members train.
    """

    name: EngineName = "local"
    workers: int = 1
    address: str | None = None
    gpus: float = 0.0
    device: str = "cpu"


@dataclass(frozen=True)
class Shares:
    """How rows are dealt to members.

    Attributes:
        kind: `even`; `label`: proportions of labels from Dir(alpha); `quantity`: sizes from Dir(alpha); `ratios`: sizes
            in these ratios; `column`: a member for each value of the rows' column. Sizes count rows, or persons if rows
            have them, and a person's label is its most frequent one.
        members: how many, for the first three.
        alpha: of `label` and `quantity`.
        ratios: of `ratios`.
    """

    kind: Literal["even", "label", "quantity", "ratios", "column"] = "even"
    members: int = 10
    alpha: float = 1.0
    ratios: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str, members: int, alpha: float) -> "Shares":
        """Read "even", "label", "quantity", "column" or "ratios:1,1,3".

        Raises:
            NotSimulated: it is something else.
        """
        kind, colon, ratios = text.partition(":")
        match kind:
            case "even" | "label" | "quantity" | "column" if not colon:
                return cls(kind, members, alpha)
            case "ratios" if colon:
                try:
                    return cls("ratios", members, alpha, tuple(float(each) for each in ratios.split(",")))
                except ValueError:
                    pass
        raise NotSimulated(f"{text[:40]!r} is no partition; write even, label, quantity, column or ratios:1,1,3")


def dealt(rows: Rows, shares: Shares, seed: int) -> tuple[tuple[Example, ...], ...]:
    """Deal rows to members. All rows of a person go to one member, unless a column says which member has a row.

    Raises:
        NotSimulated: there are fewer rows or persons than members need.
    """
    examples = rows.examples
    # The places of rows that go together: of one person, and else each row alone.
    rows_of: dict[int, list[int]] = {}
    for place, person in enumerate(persons_of(examples).tolist()):
        rows_of.setdefault(person, []).append(place)
    whole = list(rows_of.values())
    try:
        made: Partition
        match shares.kind:
            case "even":
                made = by_ratios(len(whole), (1,) * shares.members, seed)
            case "ratios":
                made = by_ratios(len(whole), shares.ratios, seed)
            case "label":
                labels = [Counter(str(examples[place].label) for place in each).most_common(1)[0][0] for each in whole]
                made = by_label(labels, shares.members, shares.alpha, seed)
            case "quantity":
                made = by_quantity(len(whole), shares.members, shares.alpha, seed)
            case "column":
                made, whole = by_column(rows.column), [[place] for place in range(len(examples))]
    except ValueError as error:
        what = "training rows" if len(whole) == len(examples) else "persons of the training rows"
        raise NotSimulated(f"{len(whole)} {what} cannot be dealt to members: {error}") from error
    return tuple(tuple(examples[place] for each in part for place in whole[each]) for part in made.members)


def parts_of(rows: Rows, *, test: float, seed: int) -> tuple[Rows, tuple[Example, ...]]:
    """Hold rows apart for the test. A text is in one part only.

    Args:
        rows: all rows.
        test: share of the texts, in (0, 1).
        seed: of the draw.

    Raises:
        RowsUnfit: there is one label only, or a part would be empty or have one label.
    """
    divided = divide(rows, validation=0, test=test, seed=seed)
    return divided.train, divided.test


@dataclass(frozen=True)
class Prepared:
    """A job's bundle and its members' rows."""

    document: JobDocument
    bundle: Path
    members: tuple[tuple[Example, ...], ...]
    test: tuple[Example, ...]
    sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(len(rows) for rows in self.members))


def prepared(
    job: JobSpec,
    base: Path,
    rows: Rows,
    test: Sequence[Example],
    shares: Shares,
    folder: Path,
    *,
    seed: int,
    report: Callable[[str], None] = lambda _: None,
    collection: Collection | None = None,
) -> Prepared:
    """Make the job's bundle in the simulation's folder, unless it is there, and deal the rows.

    Args:
        job: the operator's job.
        base: of its relative paths.
        rows: training rows.
        test: rows that no member has.
        shares: how the training rows are dealt.
        folder: of the simulation.
        seed: of the partition.
        report: called with sentences about what was found on the way.
        collection: the operator's backbones, which `model.base` may name.

    Raises:
        NotSimulated: rows, job and folder do not fit each other, or another simulation runs in the folder.
        DataInvalid: a label is not the job's.
        ValueError, OSError: the bundle cannot be made.
    """
    if isinstance(job.start, str):
        raise NotSimulated(f"start: version {job.start} is at a coordinator; leave the key out to simulate the job")
    if unit_of_job(job) == "person" and any(each.person is None for each in rows.examples):
        raise NotSimulated(
            'mechanism.unit = "person": the rows do not say whose they are, so this would play another mechanism; name '
            "the column that says it with --person COLUMN (person= in Python)"
        )
    check_rows([*rows.examples, *test], job)
    if writes(job.model) and shares.kind == "label":
        raise NotSimulated("rows of a job that writes have no labels; deal them by another partition, such as quantity")
    members = dealt(rows, shares, seed)
    with _alone(folder):
        return _prepared(job, base, folder, members, tuple(test), report, collection)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out of a simulation's folder: two at once would mix their rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    # The lock is gone with the process that holds it, also if it is killed.
    with (folder / "lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotSimulated(
                f"another simulation runs in {folder}; wait until it ends, or choose another folder with --out"
            ) from None
        yield


def _prepared(
    job: JobSpec,
    base: Path,
    folder: Path,
    members: tuple[tuple[Example, ...], ...],
    test: tuple[Example, ...],
    report: Callable[[str], None],
    collection: Collection | None,
) -> Prepared:
    from export.bundle import make_job_bundle, read_job_bundle

    target, kept = folder / "bundle", folder / "job.json"
    written = json.dumps({"job": job.model_dump(mode="json"), "files": _files_of(job, base)})
    if not target.exists():
        # All or nothing: a bundle that was cut off is not taken for one.
        fresh = folder / ".bundle.new"
        shutil.rmtree(fresh, ignore_errors=True)
        make_job_bundle(job, base, fresh, report=report, collection=collection)
        kept.write_text(written, encoding="utf-8")
        fresh.rename(target)
    elif not kept.exists() or kept.read_text(encoding="utf-8") != written:
        raise NotSimulated(
            f"{folder} holds a simulation of another job, or of this one before it was changed, or a file that it "
            "names; choose another folder with --out, or remove it"
        )
    try:
        document = read_job_bundle(target).document
    except DocumentInvalid as error:
        raise NotSimulated(f"{target} cannot be used ({error}); remove {folder} and simulate again") from error
    return Prepared(document, target, members, test)


def _files_of(job: JobSpec, base: Path) -> dict[str, str | None]:
    """Return SHA-256 of the files that the job names, in hexadecimal; None for one that cannot be read.

    A base model is a folder of gigabytes, and is left out.
    """
    named: list[str | None] = []
    if isinstance(job.vocabulary, VocabularyFile):
        named += [job.vocabulary.file, job.vocabulary.pretrained]
    if isinstance(job.model, PromptedModel) and isinstance(job.model.task, Head):
        named.append(job.model.task.centre.file)
    return {name: _digest(base / name) for name in named if name is not None}


def _digest(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError:
        return None


@contextmanager
def opened(
    made: Prepared,
    plan: Plan,
    engines: Engines,
    server: Server,
    folder: Path,
    *,
    summing: Callable[[int], Summing] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Simulation]:
    """Open a simulation with its engine.

    Args:
        made: from `prepared`.
        plan: what to play.
        engines: what runs members.
        server: the coordinator's arithmetic.
        folder: of the simulation.
        summing: makes what adds the vectors of a cohort of this size; None: they are added one by one.
        report: called with sentences on what the simulation waits for.

    Raises:
        NotSimulated, RayMissing, NoRoom: as in `Simulation` and `ray_engine`.
    """
    from export.bundle import read_job_bundle

    if engines.workers < 1:
        raise NotSimulated(f"{engines.workers} workers: at least one is needed")
    bundle = read_job_bundle(made.bundle)
    world = world_of(bundle, made.members, made.test, folder, seed=plan.seed, device=engines.device)
    if summing is not None and bundle.document.aggregation.groups is not None:
        raise NotSimulated(
            "--secure (secure= in Python) sums one cohort, and this job is in groups; leave the option out"
        )
    if engines.name not in get_args(EngineName):
        raise NotSimulated(f"{engines.name!r} is no engine; write {' or '.join(get_args(EngineName))}")
    with ExitStack() as held:
        held.enter_context(_alone(folder))
        engine: Engine | None = None
        if engines.name == "ray":
            engine = held.enter_context(
                ray_engine(Worker, world, engines.workers, address=engines.address, gpus=engines.gpus, report=report)
            )
        elif engines.workers > 1:
            engine = held.enter_context(local_engine(Worker, world, engines.workers))
        simulation = Simulation(Crew(world, engine), plan, server, folder)
        if summing is not None:
            simulation.sum_by(summing(simulation.cohort))
        yield simulation
