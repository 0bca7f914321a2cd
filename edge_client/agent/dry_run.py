"""`edge_client run --dry-run` prints what each open job would send from this machine, and what the policy says to it.

It opens no session, so the coordinator does not count on this member, and it trains nothing. It also says how much of
the member's texts each job's model would read: which share of the tokens is unknown, and which share of the texts is
cut. That is only printed. Of a table of vectors it looks at the width and, for an own vocabulary, at the words. It does
not fetch a prompted job's backbone.
"""

import asyncio
import fnmatch
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import secure_agg
from edge_client.agent.dialogue_reading import DialogueReading
from edge_client.agent.question_plan import QuestionPlan, question_plan
from edge_client.agent.runner import Member, RunOptions, load_member
from edge_client.approval.desk import Describe
from edge_client.corpus_release.making import order_of
from edge_client.downloads.backbones import Wanted
from edge_client.identity.reaching import CallFailed, call_any
from edge_client.ledger.outlook import Outlook, check_unit, may_measure, outlook, stored_state
from edge_client.ledger.store import LedgerError
from edge_client.policy.policy import PolicyRefusal
from edge_client.private_store import PrivateStore, StoreError, store_key
from edge_client.runtime import cannot_train
from edge_client.session.keeping import TableUnused, table_unused
from learning.accounting.expected_noise import ExpectedNoise, Values, expected_noise
from learning.accounting.planning import MetricsCost, cost_of_metrics, nothing_measured
from learning.artifacts import Blob, fetch_job, fetch_manifest, fetch_tokenizer
from learning.backbones.layout import BackboneInvalid
from learning.mechanisms.protection import protection_of
from learning.plugins.installed import PluginUnusable, checked
from learning.synthesis.setting import NO_GUARANTEE
from learning.text.corpus import coverage_of
from learning.text.coverage import Coverage
from learning.text.encoder import TokenizerInvalid
from learning.text.examples import ColumnMissing, DataInvalid, check_dialogues, check_labels, check_pairs, dialogue_of
from learning.text.persons import RowsPerPerson, unit_of_job
from tacit.blobs import BlobDamaged, BlobNotThere, fetch_blob
from tacit.context import context_of
from tacit.documents import DocumentInvalid
from tacit.generation import Generate
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.mechanism import DpSgd, NoMechanism
from tacit.method import OwnVocabulary, keeps_anything, keeps_state, private_parts
from tacit.model import PluginModel, PromptedModel, RvaeModel, TransformerModel, described
from tacit.prompt import SOURCES, LoRA, reads_pairs, writes
from tacit.reason import Reason, sentence
from tacit.rounding import rounded_up
from tacit.v1 import federation_pb2 as pb
from tacit.v1 import federation_pb2_grpc
from tacit.vector import layout_of
from toolkit.console import CommandFailed, print_json, printable

__all__ = [
    "ClosedJob",
    "FrozenPart",
    "Plan",
    "Reading",
    "StartingTable",
    "describing",
    "dry_run",
    "plan_of",
    "reading_of",
]

_SKIPPED = "until then such rows are skipped, and the member takes part"
_NO_ROW = "no row is left: a round would be charged, and would send only noise"

_ENTRIES = {"words": "words", "wordpiece": "word pieces"}


@dataclass(frozen=True)
class FrozenPart:
    """A prompted job's backbone.

    Attributes:
        digest: Its 32 bytes.
        kind: The model type in its config.
        size: In bytes.
        here: Whether this member's cache holds a file of that name.
        sources: Where it may come from otherwise, in the order of asking.
    """

    digest: bytes
    kind: str
    size: int
    here: bool
    sources: tuple[str, ...]

    @classmethod
    def of(cls, model: PromptedModel, member: Member) -> "FrozenPart":
        """Returns the backbone of a prompted model. Raises BackboneInvalid if no backbone has such a config."""
        wanted = Wanted.of(model) if member.runtime == "torch" else Wanted.onnx(model)
        sources = tuple(each for each in SOURCES if each in member.policy.backbones and each in wanted.sources)
        here = (member.home / "cache" / wanted.digest.hex()).exists()
        return cls(wanted.digest, str(wanted.config["model_type"]), wanted.size, here, sources)

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "digest": self.digest.hex(),
            "bytes": self.size,
            "here": self.here,
            "sources": list(self.sources),
        }


@dataclass(frozen=True)
class StartingTable:
    """How a member's table of vectors fits one job.

    Attributes:
        path: The file or folder.
        width: Numbers in each of its vectors.
        needed: The width of the job's embedding; None if the table is not used.
        unused: Why the table is not used; None if it is.
    """

    path: Path
    width: int
    needed: int | None = None
    unused: TableUnused | None = None

    @classmethod
    def of(cls, job: JobDocument, member: Member) -> "StartingTable | None":
        """Returns None if the member names no table.

        Raises:
            StoreError: The member's private state of that name belongs to another job document, or cannot be read.
            ValueError: No such model can exist.
        """
        if member.table is None:
            return None
        path, width = member.table.path, member.table.width
        store = PrivateStore(member.home, member.identity.federation, member.data_name)
        exists = keeps_state(job.method) and store.has(job.name, job.digest())
        if (unused := table_unused(job, exists=exists)) is not None:
            return cls(path, width, unused=unused)
        from learning.models import embedding_width

        return cls(path, width, embedding_width(job.model))

    @property
    def refusal(self) -> str | None:
        """The sentence with which the job's first round would fail, ahead of time; None if the table fits."""
        if self.needed in (None, self.width):
            return None
        return (
            f"{self.path}: its vectors have {self.width} numbers and the job's embedding has {self.needed}; give "
            f"--embedding a table of {self.needed}, or leave the option out"
        )

    def note(self, job: JobDocument) -> str | None:
        """Says why the table is not used; None if it is."""
        match self.unused:
            case None:
                return None
            case "embedding_not_private":
                return f"--embedding is not used: {job.method.name} leaves you no whole embedding of your own"
            case "private_state_exists":
                return (
                    "--embedding is not used: you already have an embedding of this job, and continue with it "
                    f"(`edge_client private remove {job.name}` would delete it)"
                )

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {"width": self.width, "needed": self.needed, "unused": self.unused}


@dataclass(frozen=True)
class Reading:
    """How much of the member's texts a job's model would read.

    Attributes:
        coverage: The shares; None if they cannot be computed.
        own: Whether the vocabulary is the member's own, as it is or as a first round would build it.
        problem: Why they cannot be computed; None if they can.
    """

    coverage: Coverage | None = None
    own: bool = False
    problem: str | None = None

    @classmethod
    def of(cls, job: JobDocument, tokenizer: bytes | None, member: Member, key_file: Path | None) -> "Reading":
        """Encodes the member's texts with the job's tokenizer or, if members build their own, with the member's.

        Args:
            job: The job.
            tokenizer: The job's tokenizer.json, if it has one.
            member: The member.
            key_file: The key file that seals the member's private states, if any.
        """
        try:
            own = None if job.vocabulary is None else _own_tokenizer(job, job.vocabulary, member, key_file)
            if (read_with := own or tokenizer) is None:
                return cls(problem="the job has no tokenizer; tell the operator")
            found = coverage_of(job, read_with, member.examples)
            return cls(found, own is not None) if found.texts else cls(problem="no row has a second text")
        except (StoreError, ValueError) as error:
            return cls(problem=str(error))

    def sentence(self, job: JobDocument) -> str:
        """Says both shares, or why they are not known."""
        if self.coverage is None:
            return f"how much of your texts it would read is not known: {self.problem}"
        which = "your own vocabulary" if self.own else "the job's vocabulary"
        return f"with {which}, {self.coverage.sentence(job.model.max_tokens)}"

    def as_json(self, job: JobDocument) -> dict[str, Any]:
        """Returns what `--json` prints."""
        if self.coverage is None:
            return {"problem": self.problem}
        return {"own_vocabulary": self.own, **self.coverage.as_json(job.model.max_tokens)}


def _own_tokenizer(job: JobDocument, wanted: OwnVocabulary, member: Member, key_file: Path | None) -> bytes:
    """Returns the member's own tokenizer of the job, or one as its first round would build it, which is not kept.

    Raises:
        StoreError: There is a private state that cannot be opened.
        VocabularyInvalid, TableInvalid: No vocabulary can be built.
    """
    from learning.training.start import own_vocabulary

    store = PrivateStore(member.home, member.identity.federation, member.data_name)
    if store.has(job.name, job.digest()):
        store = PrivateStore(member.home, member.identity.federation, member.data_name, store_key(key_file))
        kept = store.peek(job.name, job.digest())
        if kept is not None and kept.tokenizer is not None:
            return kept.tokenizer
    table = None if member.table is None else member.table.path
    return own_vocabulary(wanted, [each.text for each in member.examples], table)


@dataclass(frozen=True)
class Plan:
    """What this member would send for one job."""

    job: JobDocument
    manifest: Manifest
    # Why the member would refuse the job. Without any, it would take part.
    refusals: tuple[str, ...]
    # The cost of one round, and of all rounds together, at the policy's delta. None: the job promises nothing. A job
    # with correlated noise is charged as a whole in its first round, so both are its price.
    epsilon_a_round: float | None = None
    epsilon_of_all_rounds: float | None = None
    # Only for a prompted job.
    backbone: FrozenPart | None = None
    # What the member should know, although it takes part.
    notes: tuple[str, ...] = ()
    # Only if the member names a table.
    table: StartingTable | None = None
    reading: Reading | DialogueReading | None = None
    # How far the budget reaches. None: the job costs nothing, or nobody knows what.
    outlook: Outlook | None = None
    # What the job's noise does to the mean update of its smallest cohort. None: the job adds no noise.
    noise: ExpectedNoise | None = None
    # What the job's metrics cost this member. None: nothing, or the job has none.
    metrics: MetricsCost | None = None
    # Rows that the job's audit adds to the member's.
    canaries: int = 0

    def segments(self) -> list[secure_agg.Segment]:
        """Returns the masked vector's segments. The size of the cohort changes only their scale."""
        return list(layout_of(self.job, self.job.rounds.min_members).segments)

    def bits(self, members: int) -> int:
        """Returns the bits of one value of the masked vector, in a cohort of `members`."""
        return layout_of(self.job, members).bits

    def bytes_a_round(self, members: int) -> int:
        """Returns the bytes of the packed masked vector in a cohort of `members`, without keys, shares, signatures."""
        layout = layout_of(self.job, members)
        return secure_agg.packed_size(layout.values, layout.bits)

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {
            "job": self.job.name,
            "status": "running",
            "mechanism": self.job.mechanism.model_dump(mode="json"),
            "epsilon_a_round": self.epsilon_a_round,
            "epsilon_of_all_rounds": self.epsilon_of_all_rounds,
            "expected_noise": None if self.noise is None else self.noise.as_json(),
            "outlook": None if self.outlook is None else self.outlook.as_json(),
            "metrics": None if self.metrics is None else self.metrics.as_json(),
            "parameters": {tensor.name: list(tensor.shape) for tensor in self.manifest.tensors},
            "stays_here": _kept(self.job) if keeps_anything(self.job.method) else None,
            "frozen": None if self.job.frozen is None else self.job.frozen.values,
            "backbone": None if self.backbone is None else self.backbone.as_json(),
            "plugin": _plugin(self.job),
            "embedding_table": None if self.table is None else self.table.as_json(),
            "reads_pairs": reads_pairs(self.job.model),
            "writes": writes(self.job.model),
            "segments": {segment.name: segment.length for segment in self.segments()},
            "bytes_a_round": self.bytes_a_round(self.job.rounds.min_members),
            "max_bytes_a_round": self.bytes_a_round(self.job.rounds.target_members),
            "reading": None if self.reading is None else self.reading.as_json(self.job),
            "orders_texts": None if (order := order_of(self.job)) is None else order.texts,
            "canaries": self.canaries,
            "takes_part": not self.refusals,
            "refusals": list(self.refusals),
            "notes": list(self.notes),
        }


def _plugin(job: JobDocument) -> dict[str, str] | None:
    if not isinstance(job.model, PluginModel):
        return None
    model = job.model
    named = {"distribution": model.distribution, "version": model.version, "files": model.files.hex()}
    return {**named, "name": model.name}


@dataclass(frozen=True)
class ClosedJob:
    """A job that is not running now. Its status comes from the coordinator: paused, finished or aborted."""

    name: str
    status: str
    why: str
    # Whether it is a question, such as a survey, which makes no model.
    asks: bool = False

    @property
    def sentence(self) -> str:
        """Says how the job ended or paused, and what the member can do."""
        if self.asks and self.status != "paused":
            return (
                f"{self.name} is {self.status}: {self.why} Nothing would be sent; it asked a question and has no model."
            )
        what = {
            "finished": f"`edge_client export {self.name}` makes your model",
            "aborted": f"it will not continue; `edge_client export {self.name}` exports its last version",
            "paused": "it asks for nothing until the operator resumes it",
        }.get(self.status, "ask the operator")
        return f"{self.name} is {self.status}: {self.why} Nothing would be sent; {what}."

    def as_json(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        return {"job": self.name, "status": self.status, "takes_part": False, "refusals": [self.why]}


def reading_of(
    job: JobDocument, tokenizer: bytes | None, member: Member, key_file: Path | None
) -> Reading | DialogueReading:
    """Returns how the job's model would read the member's texts or, if it writes, dialogues. As `Reading.of`."""
    if writes(job.model):
        return DialogueReading.of(job, tokenizer, member.examples)
    return Reading.of(job, tokenizer, member, key_file)


def plan_of(
    job: JobDocument, manifest: Manifest, member: Member, reading: Reading | DialogueReading | None = None
) -> Plan:
    """Returns the member's own verdict on a job, for the smallest cohort that the job allows.

    `reading` is shown with it, and decides nothing.
    """
    refusals = []
    try:
        member.withdrawals.check(job.name, job)
        member.policy.check_job(job, federation=member.identity.federation)
        member.policy.check_manifest(manifest)
    except PolicyRefusal as refusal:
        refusals.append(refusal.detail)
    if (why := cannot_train(job, member.runtime)) is not None:
        refusals.append(why)
    try:
        member.policy.check_attempt(_smallest_context(job, member.identity.federation))
    except PolicyRefusal as refusal:
        refusals.append(f"{refusal.detail} (in the smallest cohort that the job allows)")
    against, notes = _of_data(job, member)
    refusals += against
    notes += _of_text(job, member)
    notes += _of_canaries(job, member)
    table = None
    try:
        if (table := StartingTable.of(job, member)) is not None:
            refusals += [] if table.refusal is None else [table.refusal]
            notes += [] if (note := table.note(job)) is None else [note]
    except (StoreError, ValueError) as error:
        refusals.append(str(error))
    if isinstance(job.model, PluginModel):
        try:
            checked(job.model)
        except PluginUnusable as error:
            refusals.append(str(error))
    backbone = None
    if isinstance(job.model, PromptedModel):
        try:
            backbone = FrozenPart.of(job.model, member)
        except BackboneInvalid as error:
            refusals.append(str(error))
    one, all_rounds, reach, metrics = None, None, None, None
    try:
        one, all_rounds, reach, metrics = _costs(job, member)
    except (ValueError, LedgerError) as error:
        refusals.append(str(error))
    if reach is not None and reach.refused_by is not None:
        refusals.append(f"{reach.refused_by} allows no further round now")
    examples = member.population(job)
    noise = expected_noise(job, Values.of(job, manifest), examples=examples)
    return Plan(
        job,
        manifest,
        tuple(refusals),
        one,
        all_rounds,
        backbone,
        tuple(notes),
        table,
        reading,
        reach,
        noise,
        metrics,
        member.canaries.count(job),
    )


def _of_data(job: JobDocument, member: Member) -> tuple[list[str], list[str]]:
    """Returns refusals and notes that the data gives rise to.

    Under a mechanism, rows that do not fit are skipped. They are no reason to refuse, because a refusal would tell the
    coordinator about them.
    """
    refusals: list[str] = []
    left_out: list[str] = []
    rows = refusals if isinstance(job.mechanism, NoMechanism) else left_out
    if isinstance(job.model, PromptedModel) and isinstance(job.model.task, Generate):
        roles = job.model.task.template.roles
        try:
            check_dialogues(member.examples, roles, dialogue_columns=member.dialogue_columns)
        except ColumnMissing as error:
            refusals.append(str(error))
        except DataInvalid as error:
            rows.append(str(error))
        notes = [f"{each}; {_SKIPPED}" for each in left_out]
        if left_out and all(dialogue_of(each, roles) is None for each in member.examples):
            notes.append(_NO_ROW)
        return refusals, notes
    try:
        check_labels(member.examples, job.labels)
    except DataInvalid as error:
        rows.append(str(error))
    if reads_pairs(job.model):
        try:
            check_pairs(member.examples, second_column=member.second_column)
        except ColumnMissing as error:
            refusals.append(str(error))
        except DataInvalid as error:
            rows.append(str(error))
    notes = [f"{each}; {_SKIPPED}" for each in left_out]
    if left_out and not any(
        each.label in job.labels and (each.text_b is not None or not reads_pairs(job.model)) for each in member.examples
    ):
        notes.append(_NO_ROW)
    held = {each.label for each in member.examples}.intersection(job.labels)
    if job.training.logit_adjustment and len(held) == 1:
        notes.append(
            f"all your rows have the label {held.pop()}: with adjusted logits they teach the shared model nothing, but "
            "you take part, and your own model gains"
        )
    return refusals, notes


def _of_text(job: JobDocument, member: Member) -> list[str]:
    """Returns notes on the synthetic text that the job orders from its members, and on what it promises."""
    order = order_of(job)
    notes = []
    if isinstance(job.model, RvaeModel) and job.model.variant == "published":
        notes.append(f"the published variant has {NO_GUARANTEE}, whatever its noise is called")
    if order is None:
        return notes
    asked = {"always": "released without asking", "ask": "released once you approve them", "never": "refused"}
    notes.append(
        f"once the job is finished, the model trained here makes {order.texts:,} synthetic texts, which are "
        f"{asked[member.policy.corpora]}"
    )
    if order.histogram_std is not None:
        notes.append(f"the histogram of your labels is charged too: {_cost_of_histogram(job, member)}")
    return notes


def _of_canaries(job: JobDocument, member: Member) -> list[str]:
    """Returns a note on the canaries that the job's audit adds to the data."""
    count = member.canaries.count(job)
    if not count:
        return []
    whole, units = member.population(job), "persons" if unit_of_job(job) == "person" else "examples"
    return [
        f"the job's audit adds {count:,} canaries to your data, random texts with random labels: they teach the model "
        f"noise, and cost and charge follow from {whole:,} {units}; max_canaries = 0 in policy.toml plants none"
    ]


def _cost_of_histogram(job: JobDocument, member: Member) -> str:
    """Says what the histogram costs, or that it cannot be charged and all labels get equal parts."""
    from learning.accounting.calibration import epsilon_at_gate
    from learning.accounting.renyi import EventUnaccountable
    from learning.synthesis.labels import histogram_event

    order, limit = order_of(job), member.policy.limit()
    if order is None or order.histogram_std is None:
        return "none"
    event = histogram_event(order.histogram_std, len(job.labels), limit.adjacency)
    try:
        alone = rounded_up(epsilon_at_gate(event, limit.delta, limit.adjacency))
        return f"epsilon {alone:g} alone, at delta {limit.delta:g}"
    except EventUnaccountable as error:
        return f"there is no formula for it here, so all labels get equal parts ({error})"


def _costs(job: JobDocument, member: Member) -> tuple[float | None, float | None, Outlook | None, MetricsCost | None]:
    """Returns epsilon of one round and of all, as the ledger's gate counts, how far the budget reaches, and what
    metrics cost of it; None without a mechanism.

    Raises:
        ValueError: There is no formula for the cost.
        LedgerError: The ledger cannot be read.
    """
    from learning.accounting.calibration import repeated
    from learning.accounting.costs import releases_of
    from learning.accounting.gate import epsilon_counted

    policy, federation = member.policy, member.identity.federation
    state = stored_state(member.home, member.data_name)
    check_unit(policy, state)
    held = () if state is None else state.reservations.values()
    event = protection_of(
        job,
        member.population(job),
        own=policy.own(),
        trust_central_noise=policy.trust_central_noise,
        metrics=policy.adjacency if may_measure(policy, job, held, federation) else None,
    ).event
    if event is None:
        return None, None, None, None
    limit, rounds = policy.limit(), releases_of(job.mechanism, job.rounds.count)
    reach = outlook(policy, job, event, state, federation=federation)
    one, every = (epsilon_counted([repeated(event, count)], limit) for count in (1, rounds))
    metrics = cost_of_metrics(event, rounds, limit, policy.metrics_epsilon) if policy.measures else None
    return one, every, reach, metrics


def _smallest_context(job: JobDocument, federation: bytes) -> secure_agg.RoundContext:
    members = job.rounds.min_members
    return context_of(job, federation=federation, round=1, attempt=1, model=job.weights, members=members)


def describing(options: RunOptions) -> Callable[[Member], Describe]:
    """Returns how a member describes a job to its stewards: as `dry_run` prints it, and which columns it reads."""

    def of_member(member: Member) -> Describe:
        def describe(job: JobDocument, manifest: Manifest, tokenizer: bytes | None) -> tuple[list[str], dict[str, Any]]:
            columns = [options.text, options.label, *([] if member.person is None else [member.person])]
            if job.question is not None:
                asked = question_plan(job, job.question, member, tokenizer)
                lines = [f"reads {options.data}: the columns {', '.join(columns)}"]
                asked.show(member, lines.append)
                return lines, {**asked.as_json(), "columns": columns, "rows": len(member.examples)}
            plan = plan_of(job, manifest, member, reading_of(job, tokenizer, member, options.private_key_file))
            if writes(job.model):
                named = [options.messages] if options.messages else [options.prompt, options.response]
                columns[:2] = [each for each in named if each] or ["prompt and response, or messages"]
            if reads_pairs(job.model):
                columns.insert(1, options.text_b or "text_b")
            lines = [f"reads {options.data}: the columns {', '.join(columns)}"]
            _show(plan, member, lines.append)
            return lines, {**plan.as_json(), "columns": columns, "rows": len(member.examples)}

        return describe

    return of_member


def dry_run(options: RunOptions) -> None:
    """Prints the plans of all open jobs.

    Raises:
        CommandFailed: The input cannot be used, the coordinator cannot be reached, or a job cannot be read. The plans
            of the others are printed before.
    """
    member = load_member(options, takes_part=True)
    try:
        plans, unread, closed = asyncio.run(call_any(member.identity, functools.partial(_plans, member, options)))
    except CallFailed as error:
        raise CommandFailed(error.sentence, error.code) from error
    _print_plans(plans, closed, member, options)
    if unread:
        raise CommandFailed("; ".join(unread))
    if not plans and not closed and not options.as_json:
        named = f" named {', '.join(options.jobs)}" if options.jobs else ""
        _print(f"The coordinator has no job{named}; ask the operator, or try again later.")


def _print_plans(
    plans: Sequence[Plan | QuestionPlan], closed: Sequence[ClosedJob], member: Member, options: RunOptions
) -> None:
    if options.as_json:
        for plan in plans:
            about: dict[str, Any] = {"rows": len(member.examples), "rows_skipped": member.skipped.rows}
            if isinstance(plan, Plan) and (persons := _persons(plan.job, member)) is not None:
                about["persons"] = persons.as_json()
            print_json({**plan.as_json(), **about})
        for job in closed:
            print_json(job.as_json())
        return
    if member.skipped:
        _print(member.skipped.sentence(len(member.examples)))
    for plan in plans:
        if isinstance(plan, QuestionPlan):
            plan.show(member, _print)
        else:
            _show(plan, member)
            if isinstance(plan.reading, DialogueReading):
                plan.reading.show_example(_print)
    for job in closed:
        _print(job.sentence)


async def _plans(
    member: Member, options: RunOptions, stub: federation_pb2_grpc.FederationServiceStub
) -> tuple[list[Plan | QuestionPlan], list[str], list[ClosedJob]]:
    """Returns plans of the open jobs, why others cannot be read, and closed jobs if they were named or none is open."""
    patterns = options.jobs

    async def blob(digest: bytes, limit: int) -> bytes:
        data = bytearray()
        await fetch_blob(stub.FetchBlob, digest, data, limit=limit)
        return bytes(data)

    response: pb.OpenJobsResponse = await stub.OpenJobs(pb.OpenJobsRequest(all=True), timeout=30)
    plans: list[Plan | QuestionPlan] = []
    closed, unread = list[ClosedJob](), list[str]()
    for job in response.jobs:
        if patterns and not any(fnmatch.fnmatchcase(job.name, pattern) for pattern in patterns):
            continue
        if job.status != "running":
            reason = job.reason if job.reason in Reason.values() else Reason.REASON_UNSPECIFIED
            closed.append(ClosedJob(job.name, job.status, sentence(reason), await _asks(blob, job)))
            continue
        try:
            plans.append(await _plan(blob, job, member, options))
        except (DocumentInvalid, TokenizerInvalid) as error:
            unread.append(f"job {job.name}: {error}; the coordinator may be newer than this software; upgrade it")
        except (BlobDamaged, BlobNotThere) as error:
            unread.append(f"job {job.name}: the coordinator does not serve its files ({error}); try again")
    return plans, unread, closed if patterns or not (plans or unread) else []


async def _plan(blob: Blob, job: pb.OpenJob, member: Member, options: RunOptions) -> Plan | QuestionPlan:
    document = await fetch_job(blob, job.name, job.job_document)
    manifest = await fetch_manifest(blob, document)
    tokenizer = await fetch_tokenizer(blob, document)
    if document.question is not None:
        return await asyncio.to_thread(question_plan, document, document.question, member, tokenizer)
    reading = await asyncio.to_thread(reading_of, document, tokenizer, member, options.private_key_file)
    return plan_of(document, manifest, member, reading)


async def _asks(blob: Blob, job: pb.OpenJob) -> bool:
    """Whether a closed job is a question. One whose document is lost, or of newer software, is taken for a model's."""
    try:
        return (await fetch_job(blob, job.name, job.job_document)).question is not None
    except (BlobNotThere, BlobDamaged, DocumentInvalid):
        return False


def _print(text: str = "") -> None:
    import typer

    typer.echo(printable(text))


def _persons(job: JobDocument, member: Member) -> RowsPerPerson | None:
    """Counts rows per person; None if the job protects no persons, or the rows name none."""
    if member.person is None or not isinstance(job.mechanism, DpSgd) or job.mechanism.person is None:
        return None
    return RowsPerPerson.of(member.examples, member.person, job.mechanism.person.max_examples)


def _kept(job: JobDocument) -> str:
    """Says which parts of the model stay with this member."""
    parts: list[str] = [*sorted(private_parts(job.method))] or ["some rows of the embedding"]
    kept = f"{' and '.join(parts)}, by {job.method.name}"
    if job.private is not None:
        kept += f"; {job.private.values:,} values"
    if job.vocabulary is not None:
        kept += f"; and a vocabulary of your own, at most {job.vocabulary.size:,} {_ENTRIES[job.vocabulary.kind]}"
    return kept


def _show_work(job: JobDocument, member: Member, say: Callable[[str], None]) -> None:
    # Under dp-sgd the mechanism sets the number of steps, and epochs mean nothing.
    work = f"{job.mechanism.steps} steps" if isinstance(job.mechanism, DpSgd) else f"{job.training.epochs} epochs"
    say(f"{job.name}: {len(member.examples)} examples here, {work} a round on {member.device}")
    if isinstance(job.mechanism, DpSgd) and job.mechanism.band > 1:
        from learning.accounting.banded_plan import room_for_failures

        say(f"  correlated noise, {job.mechanism.band} bands: the first round is charged for the whole job")
        size = 8 * (job.mechanism.band - 1) * job.values / 1e6
        say(f"  its last rows of noise take {size:,.1f} MB of memory, and as much on the disk until the job is over")
        room = room_for_failures(job.mechanism, job.rounds.count)
        say(f"  you can take part to the end if at most {room} rounds fail after you sent your vector")
    if isinstance(job.model, PluginModel):
        say(f"  runs code that is installed here: {described(job.model)}")
    if reads_pairs(job.model):
        say("  reads pairs: the text and the second text of each row")
    if (persons := _persons(job, member)) is not None:
        say(f"  protects persons: {persons.sentence}")


def _price(plan: Plan, member: Member) -> str:
    """Says what the job costs beside the policy's limit."""
    if plan.epsilon_a_round is None or plan.epsilon_of_all_rounds is None:
        return "no epsilon: this job adds no noise and promises no differential privacy"
    job, policy = plan.job, member.policy
    one, every = rounded_up(plan.epsilon_a_round), rounded_up(plan.epsilon_of_all_rounds)
    costs = f"epsilon {one:g} a round, {every:g} for all {job.rounds.count} rounds"
    if isinstance(job.mechanism, DpSgd) and job.mechanism.band > 1:
        costs = f"epsilon {every:g} for the job, charged before its first round"
    limit = f"the policy's limit for the data is {policy.epsilon:g}, at delta {policy.delta:g}"
    return f"{costs}, by {job.mechanism.name}; {limit}"


def _show(plan: Plan, member: Member, say: Callable[[str], None] = _print) -> None:
    job = plan.job
    _show_work(job, member, say)
    say("  would send, masked, so that only the sum over the cohort can be read:")
    for tensor in plan.manifest.tensors:
        shape = " x ".join(str(size) for size in tensor.shape)
        say(f"    {tensor.name:<40} {shape:>16}  {tensor.size:>12,} values")
    others = [segment for segment in plan.segments() if segment.name != "update"]
    if others:
        names, lengths = ", ".join(each.name for each in others), {each.length for each in others}
        say(f"    {names:<40} {f'{lengths.pop()} each':>16}  {sum(each.length for each in others):>12,} values")
    if keeps_anything(job.method):
        say(f"  stays here: {_kept(job)}")
    if (table := plan.table) is not None and table.width == table.needed:
        say(f"  its embedding starts from {table.path}, whose vectors have {table.width} numbers like the job's")
    if plan.reading is not None:
        say(f"  reads your {'dialogues' if writes(job.model) else 'texts'}: {plan.reading.sentence(job)}")
    if job.frozen is not None:
        values, size = job.frozen.values, 4 * job.frozen.values / 1e6
        what = "that centre the features" if isinstance(job.model, PromptedModel) else "of the embedding"
        if isinstance(job.model, TransformerModel) and job.model.freezes_encoder:
            what = "of the encoder" + (" and the embedding" if job.model.freeze_embedding else "")
            if isinstance(job.model.injection, LoRA) and job.model.injection.train == "up":
                what += " and one matrix of each adapter"
        what = "of the adapters, drawn at random" if writes(job.model) else what
        say(f"  stays frozen: {values:,} values {what}, {size:,.1f} MB, fetched once and never sent")
    if (frozen := plan.backbone) is not None:
        where = "in this member's cache" if frozen.here else f"available from {', then '.join(frozen.sources) or '-'}"
        say(f"  stays frozen: a {frozen.kind}, {frozen.digest.hex()[:16]}, {frozen.size / 1e6:,.1f} MB, {where}")
    sizes = sorted({job.rounds.min_members, job.rounds.target_members})
    told = [f"{plan.bytes_a_round(size):,} in a cohort of {size} ({plan.bits(size)} bits a value)" for size in sizes]
    say(f"  bytes a round: {', '.join(told)}")
    say(f"  {_price(plan, member)}")
    # Without a cost a refusal says why there is none.
    if job.metrics is not None and plan.epsilon_of_all_rounds is not None:
        nothing = nothing_measured(member.policy.metrics_epsilon)
        say(f"  {nothing if plan.metrics is None else plan.metrics.sentence}")
    if member.policy.measures:
        say(f"  keeps {member.policy.validation_share:.0%} of your rows back from every training, to measure versions")
    if plan.outlook is not None:
        say(f"  {plan.outlook.sentence}")
    for said in () if plan.noise is None else plan.noise.sentences:
        say(f"  {said[0].lower()}{said[1:].removesuffix('.')}")
    for note in plan.notes:
        say(f"  note: {note}")
    if plan.refusals:
        for refusal in plan.refusals:
            say(f"  refused: {refusal}")
    else:
        reach = plan.outlook
        partly = f" in {reach.possible} of {reach.rounds} rounds" if reach is not None and reach.spent_by else ""
        once = " once the stewards have approved it" if member.policy.asks else ""
        say(f"  the policy allows it: `edge_client run` would take part{partly}{once}")
