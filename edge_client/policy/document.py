"""The keys of policy.toml: their types, defaults and descriptions. `policy.Policy` checks jobs against them."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from edge_client.policy.conditions import Window
from learning.accounting.events import Adjacency
from tacit.documents import AtMost, Digest, Document, Short
from tacit.job_parts import MAX_CANARIES
from tacit.limits import MAX_MEMBERS
from tacit.mechanism import Unit
from tacit.plugin import DistributionName
from tacit.prompt import Source
from tacit.reading import shown

if TYPE_CHECKING:
    from learning.accounting.filter import Limit
    from learning.mechanisms.protection import OwnNumbers

__all__ = ["PolicyDocument", "Vocabulary"]


MechanismName = Literal["dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian", "none"]
DeviceKind = Literal["cpu", "cuda", "mps"]
# Who chooses the words that a model has rows for: each member, or the job for all of them.
Vocabulary = Literal["own", "own-from-base", "public"]
MemberName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def _window(text: str) -> str:
    Window.parse(text)
    return text


# Bounds on one key's patterns, digests or windows, and on its words from a short fixed set.
_MAX_NAMED = 1000
_MAX_KINDS = 16
_Patterns = Annotated[tuple[Annotated[str, StringConstraints(max_length=512)], ...], AtMost(_MAX_NAMED)]


def _ask(value: object) -> object:
    if isinstance(value, str) and value != "ask":
        raise ValueError(f'is {shown(value)}; write "ask", or a list of names such as ["*"]')
    if not isinstance(value, str | list | tuple):
        raise ValueError('must be "ask", or a list of names such as ["*"]')
    return value


# Names of jobs, or a person's approval of each job.
_Jobs = Annotated[
    Annotated[_Patterns, Tag("names")] | Annotated[Literal["ask"], Tag("ask")],
    Discriminator(lambda value: "ask" if isinstance(value, str) else "names"),
    BeforeValidator(_ask),
]


def _somebodys(vocabularies: object) -> object:
    if vocabularies in ([], ()):
        raise ValueError(
            'is empty, but every job has a vocabulary; write some of "own", "own-from-base" and "public", or leave '
            "this key out"
        )
    return vocabularies


class PolicyDocument(Document):
    """The contents of policy.toml. Every key has a default; unknown keys are errors.

    `edge_client policy init` writes the descriptions into the file as comments.
    """

    # Enough to pin the key of each of `MAX_MEMBERS` members.
    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    # ---- what a job may be ----

    jobs: _Jobs = Field(
        default=("*",),
        description='Names of jobs to take part in, with * and ?. Or "ask": a steward reads each job and approves it '
        "(`edge_client job`) before this member trains for it.",
    )
    stewards: Annotated[dict[MemberName, Digest], AtMost(_MAX_KINDS)] = Field(
        default={},
        description='With jobs = "ask": the people whose approval counts: name = Ed25519 key, as `edge_client steward '
        "key` prints it.",
        examples=[{"mary": "00" * 32}],
    )
    min_approvals: int = Field(
        default=1,
        ge=1,
        le=2,
        description='With jobs = "ask": how many stewards must have approved a job. 2: four eyes.',
    )
    max_approval_days: float = Field(
        default=90.0,
        gt=0,
        le=3650,
        description="How long an approval may be valid, in days. One that was signed for longer does not count.",
    )
    tags: _Patterns = Field(
        default=("*",), description="Tags that a job may have, with * and ?. Every tag of the job must match."
    )
    architectures: _Patterns = Field(default=("*",), description="Architectures of the model to train, with * and ?.")
    tasks: _Patterns = Field(
        default=("*",),
        description="What a prompted job's model may do: head, cloze or generate, with * and ?. A model that writes "
        "(generate) learns the words of responses, not labels. Other architectures have no task and pass.",
        examples=[["head", "cloze"]],
    )
    plugins: Annotated[dict[DistributionName, Digest], AtMost(_MAX_KINDS)] = Field(
        default={},
        description="Installed distributions whose models a job may train: name = digest of its files, as `edge_client "
        "models` prints it. A plugin is code that runs here with your rights, so read it first. Empty: none.",
        examples=[{"tacit-gated": "00" * 32}],
    )
    base_models: Annotated[tuple[Digest, ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="Weights that a job may start from: SHA-256 of version 0, in hexadecimal. If members keep "
        "parameters that start from the job's numbers, also list the SHA-256 of those (private.bin). If the job "
        "freezes an embedding, also that of frozen.bin. For a prompted job, also that of its backbone. Empty: any.",
        examples=["00" * 32],
    )
    backbones: Annotated[tuple[Source, ...], AtMost(_MAX_KINDS)] = Field(
        default=("disk", "coordinator"),
        min_length=1,
        description="Where a prompted job's frozen model may come from: this machine's disk, the coordinator, or the "
        "hub (which then learns that somebody here uses the model). Its digest must match the job's in any case.",
    )
    max_backbone_mib: int = Field(
        default=16384,
        ge=1,
        le=65536,
        description="Largest frozen model of a prompted job, in MiB of its file. A job with a larger one is declined "
        "before any of it is fetched. SmolLM2-135M has 514, and a model of 7 billion values in bfloat16 13,400.",
    )
    shared_parameters: _Patterns = Field(
        default=("*",),
        description="Names of parameters that may be shared, with * and ?. Every shared parameter of the job must "
        "match.",
    )
    vocabularies: Annotated[tuple[Vocabulary, ...], AtMost(_MAX_KINDS), BeforeValidator(_somebodys)] = Field(
        default=("own", "own-from-base", "public"),
        description='Whose vocabulary a job may have. "own": each member builds one from its texts and keeps it '
        'private, with its vectors, which start at random. "own-from-base": the same, but its vectors start from those '
        'of a public base model, which the operator knows. "public": the job or its base model brings the words and '
        "the vectors to start from, and those who made them know both. Name at least one.",
    )
    authorities: Annotated[tuple[Digest, ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="Federations whose authority is trusted to enrol members: SHA-256 of the first root certificate. "
        "Empty: the federation that this member enrolled with.",
        examples=["00" * 32],
    )

    # ---- privacy ----

    mechanisms: Annotated[tuple[MechanismName, ...], AtMost(_MAX_KINDS)] = Field(
        default=("dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian"),
        description='Privacy mechanisms that may be used. "none" adds no noise: only secure aggregation then hides '
        "this member's update, among those of the cohort.",
    )
    epsilon: float = Field(
        default=8.0, gt=0, le=1000, description="Lifetime privacy budget of the data set, over all jobs."
    )
    delta: float = Field(
        default=1e-6, gt=0, lt=0.01, description="The delta of epsilon, epsilon_a_month and epsilon_a_job."
    )
    adjacency: Adjacency = Field(
        default="add-remove",
        description="Which data sets count as neighbours for the budget: one unit added or removed (add-remove), or "
        "one replaced by another (replace-one). Fixed once the ledger is open.",
    )
    unit: Unit = Field(
        default="example",
        description="What is protected: one labelled text (example), all texts of one person (person; `edge_client "
        "run` then needs --person, the column that names whose row it is), or all of this member's data (member). A "
        "job with another unit is refused. Fixed once the ledger is open; `edge_client ledger persons` can turn "
        "example into person.",
    )
    epsilon_a_month: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Part of epsilon that a calendar month (UTC) may spend.",
        examples=[2.0],
    )
    epsilon_a_job: float | None = Field(
        default=None, gt=0, le=1000, description="Part of epsilon that one job may spend.", examples=[4.0]
    )
    metrics_epsilon: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="Part of epsilon that noised metrics and measurements may spend, over all jobs, counted as if they "
        "were alone. If a job orders metrics, this member then measures its versions on rows that it keeps back from "
        "every training, and it answers measurements. 0: it keeps nothing back, measures nothing, and sends noise "
        "alone.",
    )
    validation_share: float = Field(
        default=0.1,
        gt=0,
        le=0.5,
        description="With metrics_epsilon: the share of the rows that is kept back. A larger share later keeps back "
        "all that a smaller one did, and more.",
    )
    surveys_epsilon: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="Part of epsilon that all surveys together may spend. A survey asks for histograms of labels, "
        "lengths and the like, and trains nothing. 0: no survey is answered.",
    )
    min_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Minimum noise multiplier, as the ledger counts it: the standard deviation of the noise divided by "
        "how far one unit can move what is sent (for gaussian-update, half the job's number). Metrics and histograms "
        "of labels need it, too. Does not apply to laplace-update and none.",
        examples=[1.0],
    )
    max_epsilon_a_round: float | None = Field(
        default=None, gt=0, description="Maximum epsilon of one round of laplace-update.", examples=[0.5]
    )
    trust_central_noise: bool = Field(
        default=False,
        description="distributed-gaussian: count the noise of the other honest members too, not only this member's "
        "own.",
    )
    own_lot: int | None = Field(
        default=None,
        ge=1,
        description="This member's own lot in place of the job's. Jobs with laplace-update or distributed-gaussian are "
        "then refused.",
        examples=[64],
    )
    own_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="This member's own noise multiplier in place of the job's: from the job's to four times the job's. "
        "Jobs with laplace-update or distributed-gaussian are then refused.",
        examples=[1.5],
    )
    report_epsilon: bool = Field(
        default=True,
        description="Tell the coordinator what was spent. If the sampling rate is known, that reveals the number of "
        "examples.",
    )

    max_canaries: int = Field(
        default=0,
        ge=0,
        le=MAX_CANARIES,
        description="Maximum number of canaries to plant in this member's data for a job that asks for an audit: "
        "random texts, of which coins choose half. They cost accuracy, and let `edge_client audit` test what was "
        "published. 0: none.",
        examples=[100],
    )

    # ---- synthetic text ----

    corpora: Literal["never", "ask", "always"] = Field(
        default="ask",
        description="Whether to release synthetic text from what this member learnt, if a job orders a corpus from its "
        "members: never (such a job is refused), ask (`edge_client corpus approve` releases what you have read), or "
        "always.",
    )
    max_corpus_texts: int = Field(
        default=10_000, ge=1, description="Maximum number of synthetic texts that a job may order from this member."
    )

    # ---- the cohort ----

    min_cohort: int = Field(default=3, ge=2, description="Minimum number of members in an attempt.")
    min_honest: int = Field(
        default=2, ge=2, description="Minimum number of honest members' inputs in every sum that is opened (h)."
    )
    min_group: int = Field(
        default=3,
        ge=2,
        description="If a cohort is split into groups: minimum number of inputs in the sum of a group (t).",
    )
    assumed_corrupt: int | None = Field(
        default=None,
        ge=0,
        description="Minimum number of members that an attempt must assume the coordinator runs itself (n_C). Not "
        "given: the protocol's default for the cohort's size; above 200 members, min_corrupt_share of them. 0 trusts "
        "that the coordinator runs none.",
        examples=[1],
    )
    min_corrupt_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Minimum share of corrupt members (gamma) that an attempt above 200 members must withstand. Six "
        "decimals count.",
    )
    min_sigma: int = Field(
        default=80,
        ge=40,
        description="Minimum statistical security, in bits, of a sparse graph (above 200 members) or of groups: their "
        "h holds except with probability 2^-sigma. 80 leaves room for a coordinator that answers last and tries many "
        "graphs. Not related to noise.",
    )
    allow_two_party_sums: bool = Field(
        default=False, description="Allow sums of two members: each then learns the other's input."
    )
    allow_second_sum: bool = Field(
        default=False,
        description="Without noise: send two different updates for one version, confirm two different sums of it, or "
        "send a second vector for it in groups. The coordinator can subtract such sums and may read one member's "
        "update.",
    )
    peers: Annotated[dict[MemberName, Digest], AtMost(MAX_MEMBERS)] = Field(
        default={},
        description="Members pinned by key, compared by other means: name = SHA-256 of the public key, as `edge_client "
        "policy show` prints it on that member's machine. With any pin, at most n_C members of a roster may be "
        "unpinned.",
        examples=[{"north": "00" * 32}],
    )

    min_member_age_days: float = Field(
        default=0,
        ge=0,
        le=3650,
        description="How long a member's key must have been in the roster log, in days, as this member has seen it. At "
        "most n_C members of a roster may be younger. 0: any age.",
        examples=[7],
    )
    witnesses: Annotated[dict[MemberName, Digest], AtMost(_MAX_KINDS)] = Field(
        default={},
        description="Witnesses of the roster log, compared by other means: name = Ed25519 key, as `edge_client witness "
        "key` prints it.",
        examples=[{"library": "00" * 32}],
    )
    min_witnesses: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="How many of them must have signed, within a day, a head of the roster log that has every "
        "certificate of a roster. Not given: all.",
        examples=[1],
    )
    members_witness: bool = Field(
        default=False,
        description="Other members' signatures count as witnesses', if their keys are as old as min_member_age_days.",
    )

    # ---- the machine ----

    hours: Annotated[tuple[Annotated[Short, AfterValidator(_window)], ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="Windows of local time to train in. Empty: always.",
        examples=["22:00-06:00", "sat,sun 00:00-24:00"],
    )
    devices: Annotated[tuple[DeviceKind, ...], AtMost(_MAX_KINDS)] = Field(
        default=("cpu", "cuda", "mps"), description="Devices that may train."
    )
    min_free_memory_mib: int | None = Field(
        default=None, ge=1, description="Minimum free main memory, in MiB.", examples=[4096]
    )
    on_power_only: bool = Field(default=False, description="Do not train on a battery.")
    interfaces: _Patterns = Field(
        default=(),
        description="Network interfaces that every default route must go through, with * and ? (Linux). Empty: any.",
        examples=["eth*", "wlan0"],
    )

    @model_validator(mode="after")
    def _persons_come_and_go(self) -> Self:
        if self.unit == "person" and self.adjacency != "add-remove":
            raise ValueError(
                "adjacency: dp-sgd is accounted for under add-remove, and only it protects persons; set adjacency = "
                '"add-remove"'
            )
        return self

    @model_validator(mode="after")
    def _stewards_suffice(self) -> Self:
        keys = set(self.stewards.values())
        if len(keys) != len(self.stewards):
            raise ValueError("stewards: two of them have the same key; each person makes a key of their own")
        if self.asks and len(keys) < self.min_approvals:
            raise ValueError(
                f'stewards: jobs = "ask" needs {self.min_approvals} of them, and there are {len(keys)}; '
                "`edge_client steward key` makes a key, whose line goes here"
            )
        return self

    @property
    def measures(self) -> bool:
        """Whether this member keeps rows back to measure versions on."""
        return self.metrics_epsilon > 0

    @property
    def asks(self) -> bool:
        """Whether a steward must approve each job."""
        return self.jobs == "ask"

    def limit(self) -> "Limit":
        """The lifetime budget that the ledger opens with."""
        from learning.accounting.filter import Limit

        return Limit(epsilon=self.epsilon, delta=self.delta, adjacency=self.adjacency, unit=self.unit)

    def own(self) -> "OwnNumbers":
        """The member's own lot and noise multiplier, as `protection_of` takes them."""
        from learning.mechanisms.protection import OwnNumbers

        return OwnNumbers(lot=self.own_lot, noise_multiplier=self.own_noise_multiplier)
