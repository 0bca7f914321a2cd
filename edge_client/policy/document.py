"""The keys of policy.toml: their types, defaults and descriptions. `policy.Policy` asks the questions."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from edge_client.policy.conditions import Window
from learning.accounting.events import Adjacency
from tacit.documents import AtMost, Digest, Document, Short
from tacit.limits import MAX_MEMBERS
from tacit.mechanism import Unit
from tacit.prompt import Source

if TYPE_CHECKING:
    from learning.accounting.spend import Limit
    from learning.mechanisms.protection import OwnNumbers

__all__ = ["PolicyDocument"]


MechanismName = Literal["dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian", "none"]
DeviceKind = Literal["cpu", "cuda", "mps"]
# Whose the words are that a model has rows for: each member's own, or everybody's.
Vocabulary = Literal["own", "public"]
MemberName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]


def _window(text: str) -> str:
    Window.parse(text)
    return text


# Patterns, digests or windows of one key; words of one key, of which a few exist.
_MAX_NAMED = 1000
_MAX_KINDS = 16
_Patterns = Annotated[tuple[Annotated[str, StringConstraints(max_length=512)], ...], AtMost(_MAX_NAMED)]


def _somebodys(vocabularies: object) -> object:
    if vocabularies in ([], ()):
        raise ValueError(
            'names none, and every job has a vocabulary; write "own", "public" or both, or leave this key out'
        )
    return vocabularies


class PolicyDocument(Document):
    """policy.toml. Every key has a default; unknown keys are errors. The descriptions stand in the file that
    `edge_client policy init` writes.
    """

    # With a key for each of `MAX_MEMBERS`.
    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    # ---- what a job may be ----

    jobs: _Patterns = Field(default=("*",), description="Names of jobs to take part in, with * and ?.")
    architectures: _Patterns = Field(
        default=("*",), description="Kinds of job: architectures of the model to train, with * and ?."
    )
    base_models: Annotated[tuple[Digest, ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="Weights that a job may start from: the SHA-256 of version 0 in hexadecimal and, where members "
        "keep parameters that start from the job's numbers, that of these (private.bin) too; of a prompted job that of "
        "its backbone too. None named: any.",
        examples=["00" * 32],
    )
    backbones: Annotated[tuple[Source, ...], AtMost(_MAX_KINDS)] = Field(
        default=("disk", "coordinator"),
        min_length=1,
        description="Where a prompted job's frozen model may come from: folders of this machine, the coordinator, the "
        "hub (which then learns that somebody here uses it). Its digest is the job's in any case.",
    )
    shared_parameters: _Patterns = Field(
        default=("*",), description="Names of parameters that may be shared, with * and ?; one that fits none refuses."
    )
    vocabularies: Annotated[tuple[Vocabulary, ...], AtMost(_MAX_KINDS), BeforeValidator(_somebodys)] = Field(
        default=("own", "public"),
        description='Whose vocabulary a job may have: "own", each member builds one of its texts and keeps it, with '
        'the vectors; "public", the job or its base model brings the words, and vectors to start from that whoever '
        "made them knows.",
    )
    authorities: Annotated[tuple[Digest, ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="Federations whose authority is trusted to enrol members: the SHA-256 of its root certificate. "
        "None named: the one this member enrolled with.",
        examples=["00" * 32],
    )

    # ---- privacy ----

    mechanisms: Annotated[tuple[MechanismName, ...], AtMost(_MAX_KINDS)] = Field(
        default=("dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian"),
        description='Privacy mechanisms that may be used. "none" adds no noise: secure aggregation alone hides the '
        "update among the cohort's.",
    )
    epsilon: float = Field(
        default=8.0, gt=0, le=1000, description="The privacy budget of the data set, for good and over all jobs."
    )
    delta: float = Field(default=1e-6, gt=0, lt=0.01, description="The delta that epsilon is meant with.")
    adjacency: Adjacency = Field(
        default="add-remove",
        description="The neighbours that the budget is about: one unit more or less (add-remove), or one in place of "
        "another (replace-one). Fixed once the ledger is open.",
    )
    unit: Unit = Field(
        default="example",
        description="What is protected: one labelled text (example), or all that this member has (member). A job that "
        "counts in the other one is refused.",
    )
    epsilon_a_month: float | None = Field(
        default=None, gt=0, le=1000, description="What a calendar month (UTC) may spend of epsilon.", examples=[2.0]
    )
    epsilon_a_job: float | None = Field(
        default=None, gt=0, le=1000, description="What one job may spend of epsilon.", examples=[4.0]
    )
    min_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="The least noise, as the ledger counts it: its deviation divided by how far one unit can move what "
        "is sent (of gaussian-update half the job's number). Not asked of laplace-update.",
        examples=[1.0],
    )
    max_epsilon_a_round: float | None = Field(
        default=None, gt=0, description="The most epsilon that a round of laplace-update may cost.", examples=[0.5]
    )
    trust_central_noise: bool = Field(
        default=False,
        description="distributed-gaussian: count the noise of the other honest members, not this member's own alone.",
    )
    own_lot: int | None = Field(
        default=None, ge=1, description="This member's own lot, in place of the job's.", examples=[64]
    )
    own_noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="This member's own noise multiplier, in place of the job's: more, and at most four times as much.",
        examples=[1.5],
    )
    report_epsilon: bool = Field(
        default=True,
        description="Tell the coordinator what was spent. With a known rate it tells the number of examples.",
    )

    # ---- made-up text ----

    corpora: Literal["never", "ask", "always"] = Field(
        default="ask",
        description="Give away text that is made up by what this member learnt, where a job orders it of its members: "
        "never (such a job is refused), ask (`edge_client corpus approve` gives away what you have read), or always.",
    )
    max_corpus_texts: int = Field(
        default=10_000, ge=1, description="The most made-up texts that a job may order of this member."
    )

    # ---- the cohort ----

    min_cohort: int = Field(default=3, ge=2, description="Members that an attempt must be drawn from, at least.")
    min_honest: int = Field(
        default=2, ge=2, description="Honest members' inputs that every opened sum must hold, at least (h)."
    )
    min_group: int = Field(
        default=3,
        ge=2,
        description="Where a cohort is split into groups: inputs that the sum of a group must hold, at least (t).",
    )
    assumed_corrupt: int | None = Field(
        default=None,
        ge=0,
        description="Members that an attempt must suppose the coordinator to run itself (n_C), at least. Not given: "
        "the protocol's default for the cohort's size, above 200 members min_corrupt_share of them; 0 trusts that it "
        "runs none.",
        examples=[1],
    )
    min_corrupt_share: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Share of a large cohort (above 200 members, on a sparse graph) that an attempt must suppose "
        "corrupt (gamma), at least. Six decimals count.",
    )
    min_sigma: int = Field(
        default=80,
        ge=40,
        description="Bits by which a sparse graph (large cohorts) must keep its promise of honest inputs, at least. 80 "
        "leave room for a coordinator that answers last and tries many graphs.",
    )
    allow_two_party_sums: bool = Field(
        default=False, description="Allow sums of two: each of the two is shown the other's input."
    )
    allow_second_sum: bool = Field(
        default=False,
        description="Without noise: send two different updates for one version, confirm two different sums of it, or "
        "send a second vector for it in groups. The coordinator can subtract the sums and read one member's update.",
    )
    peers: Annotated[dict[MemberName, Digest], AtMost(MAX_MEMBERS)] = Field(
        default={},
        description="Members whose keys were compared by other means: name = SHA-256 of the public key, as "
        "`edge_client policy show` prints it there. With any, the others of a roster must not be more than n_C.",
        examples=[{"north": "00" * 32}],
    )

    # ---- the machine ----

    hours: Annotated[tuple[Annotated[Short, AfterValidator(_window)], ...], AtMost(_MAX_NAMED)] = Field(
        default=(),
        description="When to train, local time. None named: always.",
        examples=["22:00-06:00", "sat,sun 00:00-24:00"],
    )
    devices: Annotated[tuple[DeviceKind, ...], AtMost(_MAX_KINDS)] = Field(
        default=("cpu", "cuda", "mps"), description="What may train."
    )
    min_free_memory_mib: int | None = Field(
        default=None, ge=1, description="Main memory that must be free, MiB.", examples=[4096]
    )
    on_power_only: bool = Field(default=False, description="Do not train on a battery.")
    interfaces: _Patterns = Field(
        default=(),
        description="Network interfaces that every default route must go through, with * and ? (Linux). None named: "
        "any.",
        examples=["eth*", "wlan0"],
    )

    def limit(self) -> "Limit":
        """The lifetime budget, as the ledger opens with."""
        from learning.accounting.spend import Limit

        return Limit(epsilon=self.epsilon, delta=self.delta, adjacency=self.adjacency, unit=self.unit)

    def own(self) -> "OwnNumbers":
        """The member's own numbers, as `protection_of` takes them."""
        from learning.mechanisms.protection import OwnNumbers

        return OwnNumbers(lot=self.own_lot, noise_multiplier=self.own_noise_multiplier)
