"""The rules of a policy, and when each is checked: the tables that `Policy.check_*` and `Policy.explain` share.

The rules are checked in the order of the tables.

Left to others: applying a rule (`verdicts`), the rules about a job's model (`model_rules`), the keys and their defaults
(`document`), and what follows from a verdict (`policy`).
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edge_client.policy.conditions import DAYS, Conditions, Window
from edge_client.policy.document import PolicyDocument
from edge_client.policy.model_rules import MODEL
from edge_client.policy.verdicts import (
    Finding,
    Job,
    Offer,
    Outcome,
    Rule,
    Verdict,
    When,
    fits_any,
    free_verdict,
    in_words,
    judge,
    listed,
    open_verdict,
)
from learning.accounting.events import Adjacency
from learning.synthesis.setting import NO_GUARANTEE
from secure_agg import COMPLETE_GRAPH_LIMIT, ContextInvalid, RoundContext, default_thresholds
from tacit.context import promise_of
from tacit.measurement import Measurement
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    Mechanism,
    NoMechanism,
    OwnDiscreteGaussian,
)
from tacit.model import RvaeModel
from tacit.question import multiplier_of
from tacit.reason import Reason
from tacit.survey import Survey
from tacit.vector import NOISE_ROOM

__all__ = [
    "ATTEMPT",
    "CONDITIONS",
    "JOB",
    "LOG",
    "MEASUREMENT",
    "QUESTION",
    "ROSTER",
    "SUM",
    "VECTOR",
    "Keys",
    "Numbers",
    "SumInQuestion",
    "VectorInQuestion",
    "Watched",
    "counted_multiplier",
    "fingerprint",
    "on_budget",
    "on_job",
    "witnesses_needed",
]


def fingerprint(key: bytes) -> bytes:
    """The value that `peers` pins: SHA-256 (32 bytes) of a public key (SubjectPublicKeyInfo, DER)."""
    return hashlib.sha256(key).digest()


def counted_multiplier(mechanism: Mechanism, policy: PolicyDocument) -> float | None:
    """The noise multiplier that a release is accounted with, up to rounding to a grid. None: the mechanism has none.

    It is the standard deviation of the noise divided by how far one unit can move what is released:

    - `dp-sgd`: the stated number.
    - `gaussian-update`: half the stated number, since neighbouring updates lie up to 2 C apart.
    - `distributed-gaussian`: the stated number is that of h shares of noise against one member's vector. If only this
      member's share counts, it is divided by sqrt(h). It is halved if the unit can move the vector across the whole
      ball, not only from zero (`learning.mechanisms.protection` says why).
    """
    own = policy.own_noise_multiplier
    match mechanism:
        case DpSgd():
            return own or mechanism.noise_multiplier
        case GaussianUpdate():
            return (own or mechanism.noise_multiplier) / 2
        case DistributedGaussian():
            one = mechanism.unit == "member" and policy.adjacency == "add-remove"
            shares = 1.0 if policy.trust_central_noise else math.sqrt(mechanism.honest)
            return mechanism.noise_multiplier / shares / (1 if one else 2)
        case _:
            return None


def on_job(policy: PolicyDocument, job: Job, federation: bytes | None) -> Iterator[Verdict]:
    """The verdicts on a job document. federation: fingerprint of the authority that this member enrolled under."""
    rules = JOB if job.question is None else MEASUREMENT if isinstance(job.question, Measurement) else QUESTION
    yield from judge(policy, rules, Offer(job, federation))
    yield from _on_attempts(policy, job)


def on_budget(policy: PolicyDocument) -> Iterator[Verdict]:
    """The budget's keys, as open verdicts so that `explain` shows them: only the ledger can decide them."""
    for key in ("epsilon", "epsilon_a_month", "epsilon_a_job"):
        if getattr(policy, key) is None:
            yield free_verdict(key, When.LEDGER, Reason.REASON_BUDGET_SPENT)
        else:
            yield open_verdict(policy, key, When.LEDGER, Reason.REASON_BUDGET_SPENT)


def _on_attempts(policy: PolicyDocument, job: Job) -> Iterator[Verdict]:
    """Judges the attempts that a job allows, for the smallest cohort that keeps all rules, else the one that breaks the
    fewest.
    """
    sizes: dict[int, list[Verdict]] = {}
    for cohort in _sizes(job.rounds.min_members, job.rounds.target_members):
        try:
            numbers = Numbers.of(promise_of(job, cohort))
        except ContextInvalid:
            continue
        sizes[cohort] = list(judge(policy, ATTEMPT, numbers))
    if not sizes:
        yield from judge(policy, ATTEMPT, None)
        return
    broken = {size: sum(verdict.outcome is not Outcome.OK for verdict in found) for size, found in sizes.items()}
    shown = min(sizes, key=lambda size: (broken[size], size if not broken[size] else -size))
    largest = max(sizes)
    for at, verdict in enumerate(sizes[shown]):
        refused = [size for size, found in sizes.items() if found[at].outcome is Outcome.REFUSED]
        # A free rule does not depend on the cohort.
        note = _cohorts_of(job, shown, largest, sizes[largest][at].job) if verdict.job else ""
        if verdict.outcome is not Outcome.REFUSED and refused:
            note += f"; attempts of {_ranges(refused, list(sizes))} members would be refused"
            if refused[-1] > COMPLETE_GRAPH_LIMIT:
                note += f" (above {COMPLETE_GRAPH_LIMIT}, only some sizes were tried)"
        yield replace(verdict, sentence=verdict.sentence + note)


def _cohorts_of(job: Job, shown: int, largest: int, found: str) -> str:
    """Says for which cohort size a verdict holds, which sizes the job allows, and the value of the largest."""
    least, most = job.rounds.min_members, job.rounds.target_members
    if least == most:
        return f" (the job's cohorts have {most} members)"
    at_largest = f", in one of {largest} it is {found}" if largest != shown and found != str(largest) else ""
    return f" (in a cohort of {shown}{at_largest}; the job's cohorts have {least} to {most} members)"


def _sizes(least: int, most: int) -> list[int]:
    """The cohort sizes to check: every one with a complete graph, and larger ones in steps of a tenth.

    The numbers of large cohorts change little from one size to the next, and each attempt is checked when it comes.
    """
    sizes = list(range(least, min(most, COMPLETE_GRAPH_LIMIT) + 1))
    size = max(least, COMPLETE_GRAPH_LIMIT + 1)
    while size < most:
        sizes.append(size)
        size += size // 10
    if most > COMPLETE_GRAPH_LIMIT:
        sizes.append(most)
    return sizes


def _ranges(sizes: list[int], looked_at: list[int]) -> str:
    """Sorted sizes as text, such as `3 to 9, 12`. Neighbours in `looked_at` are one range."""
    places = {size: place for place, size in enumerate(looked_at)}
    spans: list[list[int]] = []
    for size in sizes:
        if spans and places[size] == places[spans[-1][-1]] + 1:
            spans[-1][1:] = [size]
        else:
            spans.append([size])
    return ", ".join(" to ".join(map(str, span)) for span in spans)


# ---- the job document ---------------------------------------------------------------------------------


def _jobs(policy: PolicyDocument, offer: Offer) -> Finding:
    name = offer.job.name
    if policy.jobs == "ask":
        return Finding(name, "ask", True, "a steward decides about the job {job}: `edge_client job show` prints it")
    return Finding(
        name, listed(policy.jobs), fits_any(name, policy.jobs), "the job's name is {job}; the policy allows {policy}"
    )


def _tags(policy: PolicyDocument, offer: Offer) -> Finding:
    wrong = [tag for tag in offer.job.tags if not fits_any(tag, policy.tags)]
    says = "the job's tags are {job}; the policy allows {policy}"
    return Finding(listed(wrong or offer.job.tags), listed(policy.tags), not wrong, says)


def _mechanisms(policy: PolicyDocument, offer: Offer) -> Finding:
    name = offer.job.mechanism.name
    says = 'the job uses "{job}"; the policy allows {policy}'
    if isinstance(offer.job.model, RvaeModel) and offer.job.model.variant == "published":
        says = f'the job uses "{{job}}", and its published variant has {NO_GUARANTEE}; the policy allows {{policy}}'
    advice = f'to allow it, write mechanisms = ["{name}"] in policy.toml'
    return Finding(name, listed(policy.mechanisms), name in policy.mechanisms, says, advice)


def _unit(policy: PolicyDocument, offer: Offer) -> Finding:
    # A bound for one unit is no bound for the other: the zero vector of an absent member is no neighbour of an
    # exchanged example, nor the reverse. So a ledger opened in one unit has no formula for the other.
    mechanism = offer.job.mechanism
    if isinstance(mechanism, NoMechanism):
        return _no_noise(policy.unit, "adds no noise, so the unit {policy} does not apply")
    says = "the job protects one {job}; the policy's ledger counts by {policy}"
    return Finding(mechanism.unit, policy.unit, mechanism.unit == policy.unit, says)


def _adjacency(policy: PolicyDocument, offer: Offer) -> Finding:
    adjacencies: tuple[Adjacency, ...]
    match offer.job.mechanism:
        case NoMechanism():
            return _no_noise(policy.adjacency, "adds no noise, so adjacency {policy} does not apply")
        case DpSgd() | GaussianUpdate(sampling="poisson"):
            adjacencies = ("add-remove",)
        case GaussianUpdate():
            adjacencies = ("replace-one",)
        case LaplaceUpdate() | DistributedGaussian() | OwnDiscreteGaussian():
            adjacencies = ("add-remove", "replace-one")
    says = f"the job's {offer.job.mechanism.name} is accounted for under {{job}}; the policy's ledger uses {{policy}}"
    return Finding(" or ".join(adjacencies), policy.adjacency, policy.adjacency in adjacencies, says)


def _min_noise(policy: PolicyDocument, offer: Offer) -> Finding:
    wanted, counted = policy.min_noise_multiplier, counted_multiplier(offer.job.mechanism, policy)
    if isinstance(offer.job.mechanism, NoMechanism):
        return _no_noise(in_words(wanted), "adds no noise, so the minimum {policy} does not apply; see mechanisms")
    labels = _noise_on_labels(policy, offer.job)
    if labels is not None and (counted is None or labels < counted):
        says = (
            "the noise on the job's histogram of labels counts as a multiplier of {job}; the policy requires at least "
            "{policy}"
        )
        return Finding(in_words(labels), in_words(wanted), wanted is None or labels >= wanted, says)
    if counted is None:
        says = "{job} has no noise multiplier, so the minimum {policy} does not apply; see max_epsilon_a_round"
        return Finding(offer.job.mechanism.name, in_words(wanted), True, says)
    says = (
        f"the job's {offer.job.mechanism.name} counts as a noise multiplier of {{job}}; the policy requires at least "
        "{policy}"
    )
    return Finding(in_words(counted), in_words(wanted), wanted is None or counted >= wanted, says)


def _noise_on_labels(policy: PolicyDocument, job: Job) -> float | None:
    """The multiplier of the noise on the histogram of labels behind the texts that a job orders. None: it has none."""
    if job.corpus is None or _ordered(job) is None or job.corpus.histogram_std is None:
        return None
    from learning.synthesis.labels import histogram_event

    event = histogram_event(job.corpus.histogram_std, len(job.labels), policy.adjacency)
    return event.std / event.distance


def _own_noise(policy: PolicyDocument, offer: Offer) -> Finding:
    own = policy.own_noise_multiplier
    match offer.job.mechanism:
        case NoMechanism():
            return _no_noise(in_words(own), "adds no noise, so the policy's {policy} does not apply")
        case (DpSgd() | GaussianUpdate()) as mechanism:
            least, most = mechanism.noise_multiplier, NOISE_ROOM * mechanism.noise_multiplier
            says = "the job allows a member's own noise multiplier of {job}; the policy sets {policy}"
            fits = own is None or least <= own <= most
            return Finding(f"{in_words(least)} to {in_words(most)}", in_words(own), fits, says)
        case mechanism:
            says = "the job's {job} allows no noise multiplier of a member's own; the policy sets {policy}"
            return Finding(mechanism.name, in_words(own), own is None, says)


def _max_epsilon_a_round(policy: PolicyDocument, offer: Offer) -> Finding:
    most, mechanism = policy.max_epsilon_a_round, offer.job.mechanism
    if not isinstance(mechanism, LaplaceUpdate):
        return Finding(
            mechanism.name, in_words(most), True, "{job} states no epsilon a round, so {policy} does not apply"
        )
    says = "a round of the job costs epsilon {job}; the policy allows {policy}"
    return Finding(in_words(mechanism.epsilon), in_words(most), most is None or mechanism.epsilon <= most, says)


def _no_noise(policy: str, says: str) -> Finding:
    return Finding("none", policy, True, "the job's mechanism {job} " + says)


def _authorities(policy: PolicyDocument, offer: Offer) -> Finding:
    trusted = in_words(policy.authorities)
    if offer.federation is None:
        says = "this member is {job}; the policy trusts {policy}"
        return Finding("not known to be enrolled", trusted, None, says)
    says = "the federation's authority is {job}; the policy trusts {policy}"
    return Finding(offer.federation.hex(), trusted, offer.federation in policy.authorities, says)


def _ordered(job: Job) -> int | None:
    """How many synthetic texts the job orders from each member. None: none."""
    return job.corpus.texts if job.corpus is not None and job.corpus.source == "members" else None


_NO_ORDER = "no text"


def _corpora(policy: PolicyDocument, offer: Offer) -> Finding:
    texts = _ordered(offer.job)
    if texts is None:
        says = "the job orders {job} from its members; the policy has corpora = {policy}"
        return Finding(_NO_ORDER, policy.corpora, True, says)
    says = (
        f"the job orders {{job}} from each member, {_promise_of_text(offer.job)}; the policy has corpora = {{policy}}"
    )
    if policy.corpora == "ask":
        says = says.replace(
            "the policy has corpora = {policy}", "the policy has corpora = {policy}: its owner reads them first"
        )
    advice = 'to take part and decide once you have read them, write corpora = "ask" in policy.toml'
    return Finding(f"{texts} synthetic texts", policy.corpora, policy.corpora != "never", says, advice)


def _promise_of_text(job: Job) -> str:
    """What protects the ordered texts, as a clause."""
    if isinstance(job.model, RvaeModel) and job.model.variant == "published":
        return f"by the published variant, with {NO_GUARANTEE}"
    if isinstance(job.mechanism, NoMechanism):
        return f"without noise, so with {NO_GUARANTEE}"
    return f"differentially private by {job.mechanism.name}"


def _max_corpus_texts(policy: PolicyDocument, offer: Offer) -> Finding:
    texts = _ordered(offer.job)
    says = "the job orders {job} from each member; the policy allows {policy}"
    shown = _NO_ORDER if texts is None else f"{texts} synthetic texts"
    return Finding(shown, str(policy.max_corpus_texts), (texts or 0) <= policy.max_corpus_texts, says)


def _surveys(policy: PolicyDocument, offer: Offer) -> Finding:
    most = in_words(policy.surveys_epsilon)
    if not isinstance(offer.job.question, Survey):
        does = "trains" if offer.job.question is None else "measures"
        return Finding(does, most, True, "the job {job}, so the limit {policy} of surveys does not apply")
    kinds = listed(each.kind for each in offer.job.question.histograms)
    says = "the job asks for histograms of {job}; the policy lets surveys spend {policy}"
    advice = "to answer surveys, write surveys_epsilon = 0.5 in policy.toml"
    return Finding(kinds, most, policy.surveys_epsilon > 0, says, advice)


def _measurements(policy: PolicyDocument, offer: Offer) -> Finding:
    most, question = in_words(policy.metrics_epsilon), offer.job.question
    if not isinstance(question, Measurement):
        return Finding("measures nothing", most, True, "the job {job}, so the limit {policy} does not apply")
    by = " by label" if question.breakdown else ""
    which = "all rows" if question.rows == "all" else "rows that this member keeps back"
    says = "the job measures a version on {job}; the policy lets metrics and measurements spend {policy}"
    advice = "to measure versions, and keep rows back from every training, write metrics_epsilon = 1.0 in policy.toml"
    return Finding(f"{which}{by}", most, policy.measures, says, advice)


def _min_noise_of_answer(policy: PolicyDocument, offer: Offer) -> Finding:
    wanted, question, mechanism = policy.min_noise_multiplier, offer.job.question, offer.job.mechanism
    if question is None or not isinstance(mechanism, OwnDiscreteGaussian):
        return _min_noise(policy, offer)
    counted = multiplier_of(question, mechanism, policy.adjacency)
    says = "the noise on an answer counts as a multiplier of {job}; the policy requires at least {policy}"
    return Finding(in_words(counted), in_words(wanted), wanted is None or counted >= wanted, says)


# About every job.
_ANY: tuple[Rule[Offer], ...] = (
    Rule("jobs", When.JOB, Reason.REASON_JOB_NOT_ADMITTED, _jobs),
    Rule("tags", When.JOB, Reason.REASON_POLICY_JOB_KIND, _tags, lambda p: "*" in p.tags),
    Rule("authorities", When.JOB, Reason.REASON_POLICY_AUTHORITY, _authorities, lambda p: not p.authorities),
    Rule("surveys_epsilon", When.JOB, Reason.REASON_POLICY_JOB_KIND, _surveys),
)

# About a job that asks a question. It has no model, and keys about models and their training do not apply.
QUESTION: tuple[Rule[Offer], ...] = (
    *_ANY,
    Rule("unit", When.JOB, Reason.REASON_PRIVACY_UNACCOUNTABLE, _unit),
    Rule("adjacency", When.JOB, Reason.REASON_PRIVACY_UNACCOUNTABLE, _adjacency),
    Rule(
        "min_noise_multiplier",
        When.JOB,
        Reason.REASON_POLICY_NOISE,
        _min_noise_of_answer,
        lambda p: p.min_noise_multiplier is None,
    ),
)

# Of the rules about models, those about what a measurement fetches and runs.
_MEASURED = ("architectures", "plugins", "backbones", "max_backbone_mib", "vocabularies")

# About a job that asks for a measurement. It runs a model, and trains none.
MEASUREMENT: tuple[Rule[Offer], ...] = (
    *QUESTION,
    Rule("metrics_epsilon", When.JOB, Reason.REASON_POLICY_JOB_KIND, _measurements),
    *(each for each in MODEL if each.key in _MEASURED),
)

# About a job that trains.
JOB: tuple[Rule[Offer], ...] = (
    *_ANY,
    *MODEL,
    Rule("mechanisms", When.JOB, Reason.REASON_POLICY_MECHANISM, _mechanisms),
    Rule("unit", When.JOB, Reason.REASON_PRIVACY_UNACCOUNTABLE, _unit),
    Rule("adjacency", When.JOB, Reason.REASON_PRIVACY_UNACCOUNTABLE, _adjacency),
    Rule(
        "min_noise_multiplier",
        When.JOB,
        Reason.REASON_POLICY_NOISE,
        _min_noise,
        lambda p: p.min_noise_multiplier is None,
    ),
    Rule(
        "own_noise_multiplier",
        When.JOB,
        Reason.REASON_POLICY_NOISE,
        _own_noise,
        lambda p: p.own_noise_multiplier is None,
    ),
    Rule(
        "max_epsilon_a_round",
        When.JOB,
        Reason.REASON_POLICY_NOISE,
        _max_epsilon_a_round,
        lambda p: p.max_epsilon_a_round is None,
    ),
    Rule("corpora", When.JOB, Reason.REASON_POLICY_CORPUS, _corpora),
    Rule("max_corpus_texts", When.JOB, Reason.REASON_POLICY_CORPUS, _max_corpus_texts),
)


# ---- the machine ----------------------------------------------------------------------------------

# Completes a sentence such as "the training device is ...".
_UNREADABLE = "not readable here, which counts as not met"


def _hours(policy: PolicyDocument, conditions: Conditions) -> Finding:
    now = conditions.now
    # Not %a: the member's locale must not change what the operator reads.
    moment = f"{DAYS[now.weekday()]} {now:%H:%M}"
    inside = any(Window.parse(text).holds(now) for text in policy.hours)
    return Finding(moment, listed(policy.hours), inside, "the local time is {job}; the policy allows {policy}")


def _devices(policy: PolicyDocument, conditions: Conditions) -> Finding:
    says = "the training device is {job}; the policy allows {policy}"
    return Finding(conditions.device or _UNREADABLE, listed(policy.devices), conditions.device in policy.devices, says)


def _free_memory(policy: PolicyDocument, conditions: Conditions) -> Finding:
    free, least = conditions.free_memory_mib, policy.min_free_memory_mib
    says = "free memory in MiB is {job}; the policy requires at least {policy}"
    return Finding(
        _UNREADABLE if free is None else str(free),
        in_words(least),
        least is None or (free is not None and free >= least),
        says,
        "" if free is not None else "install psutil, or leave the key out",
    )


def _on_power(policy: PolicyDocument, conditions: Conditions) -> Finding:
    power = conditions.on_power
    has = {True: "mains power", False: "a battery", None: _UNREADABLE}[power]
    says = "the power source is {job}; the policy has on_power_only = {policy}"
    return Finding(
        has,
        in_words(policy.on_power_only),
        power is True,
        says,
        "" if power is not None else "install psutil, or leave the key out",
    )


def _interfaces(policy: PolicyDocument, conditions: Conditions) -> Finding:
    used = conditions.interfaces
    says = "the interfaces of the default routes are {job}; the policy allows {policy}"
    wanted = listed(policy.interfaces)
    if used is None:
        return Finding(_UNREADABLE, wanted, False, says, "leave the key out on a machine without /proc/net/route")
    wrong = [name for name in used if not fits_any(name, policy.interfaces)]
    return Finding(listed(wrong or used), wanted, bool(used) and not wrong, says)


CONDITIONS: tuple[Rule[Conditions], ...] = (
    Rule("hours", When.CONDITIONS, Reason.REASON_POLICY_CONDITIONS, _hours, lambda p: not p.hours),
    Rule(
        "devices",
        When.CONDITIONS,
        Reason.REASON_POLICY_CONDITIONS,
        _devices,
        lambda p: len(set(p.devices)) == 3,
    ),
    Rule(
        "min_free_memory_mib",
        When.CONDITIONS,
        Reason.REASON_POLICY_CONDITIONS,
        _free_memory,
        lambda p: p.min_free_memory_mib is None,
    ),
    Rule("on_power_only", When.CONDITIONS, Reason.REASON_POLICY_CONDITIONS, _on_power, lambda p: not p.on_power_only),
    Rule("interfaces", When.CONDITIONS, Reason.REASON_POLICY_CONDITIONS, _interfaces, lambda p: not p.interfaces),
)


# ---- an attempt -----------------------------------------------------------------------------------


_MILLION = 10**6
# Statistical security, in bits, of a job's cohorts above COMPLETE_GRAPH_LIMIT (`tacit.context.thresholds_of`).
_SIGMA_OF_JOBS = 80


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an attempt that the policy has rules about.

    Args:
        cohort: n.
        min_sum: the fewest members that a sum can have.
        assumed_corrupt: n_C.
        honest: h.
        sigma: bits of a sparse graph or of groups. None: the complete graph.
        corrupt_millionths: gamma of a sparse graph, in millionths.
        groups: number of groups. None: one sum.
    """

    cohort: int
    min_sum: int
    assumed_corrupt: int
    honest: int
    sigma: int | None = None
    corrupt_millionths: int | None = None
    groups: int | None = None

    @classmethod
    def of(cls, context: RoundContext) -> "Numbers":
        """The numbers in an attempt's context."""
        graph, split = context.sparse, context.grouped
        return cls(
            cohort=context.cohort,
            min_sum=context.min_survivors,
            assumed_corrupt=context.assumed_corrupt,
            honest=context.honest,
            sigma=graph.sigma if graph else split.sigma if split else None,
            groups=split.groups if split else None,
            corrupt_millionths=graph.corrupt_millionths if graph else None,
        )


def _min_cohort(policy: PolicyDocument, attempt: Numbers) -> Finding:
    says = "the attempt has {job} members; the policy requires {policy}"
    return Finding(str(attempt.cohort), str(policy.min_cohort), attempt.cohort >= policy.min_cohort, says)


def _min_honest(policy: PolicyDocument, attempt: Numbers) -> Finding:
    says = "the attempt guarantees {job} honest inputs; the policy requires {policy}"
    key = "a larger rounds.min_members" if attempt.sigma is None else "a larger aggregation.max_lost_share"
    if attempt.groups is not None:
        key = "fewer aggregation.groups"
    advice = f"a job with {key} guarantees more, or lower min_honest"
    return Finding(str(attempt.honest), str(policy.min_honest), attempt.honest >= policy.min_honest, says, advice)


def _min_group(policy: PolicyDocument, attempt: Numbers) -> Finding:
    if attempt.groups is None:
        says = "the attempt has {job} over its whole cohort; the policy requires {policy} inputs in a group's sum"
        return Finding("one sum", str(policy.min_group), True, says)
    says = f"the cohort is split into {attempt.groups} groups, and a group's sum may hold only {{job}} inputs; the "
    says += "policy requires {policy}"
    advice = "a job with fewer aggregation.groups or a larger rounds.min_members has more in each"
    return Finding(str(attempt.min_sum), str(policy.min_group), attempt.min_sum >= policy.min_group, says, advice)


def _assumed_corrupt(policy: PolicyDocument, attempt: Numbers) -> Finding:
    wanted = policy.assumed_corrupt
    if wanted is None and attempt.cohort <= COMPLETE_GRAPH_LIMIT:
        try:
            wanted = default_thresholds(attempt.cohort)[1]
        except ContextInvalid:
            # Two members cannot form a cohort in which one is corrupt.
            wanted = 1
    elif wanted is None:
        # The protocol fixes no number for a large cohort; the policy's share takes its place.
        wanted = attempt.cohort * _millionths(policy.min_corrupt_share) // _MILLION
    says = "the attempt assumes {job} corrupt members; the policy requires {policy}"
    if attempt.cohort <= COMPLETE_GRAPH_LIMIT:
        advice = "a member that trusts the coordinator's enrolment writes assumed_corrupt = 0"
    elif policy.assumed_corrupt is None:
        advice = (
            f"above {COMPLETE_GRAPH_LIMIT} members min_corrupt_share sets this number: use a job that assumes a larger "
            "share, or a smaller min_corrupt_share if you trust the coordinator's enrolment"
        )
    else:
        advice = (
            "use a job that assumes more, or leave out a number that was meant for small cohorts: above "
            f"{COMPLETE_GRAPH_LIMIT} members min_corrupt_share then takes its place"
        )
    return Finding(str(attempt.assumed_corrupt), str(wanted), attempt.assumed_corrupt >= wanted, says, advice)


def _millionths(share: float) -> int:
    return round(share * _MILLION)


def _min_corrupt_share(policy: PolicyDocument, attempt: Numbers) -> Finding:
    least = policy.min_corrupt_share
    advice = "a member that trusts the coordinator's enrolment writes min_corrupt_share = 0"
    if attempt.groups is not None and attempt.cohort > COMPLETE_GRAPH_LIMIT:
        # A share of a cohort is a whole number of members, rounded down as a job rounds it.
        wanted = attempt.cohort * _millionths(least) // _MILLION
        says = "the attempt's groups assume a share of {job} corrupt members; the policy requires {policy}"
        share = in_words(round(attempt.assumed_corrupt / attempt.cohort, 6))
        return Finding(share, in_words(least), attempt.assumed_corrupt >= wanted, says, advice)
    if attempt.corrupt_millionths is None:
        says = (
            "the attempt's graph is {job}, so a number of corrupt members applies and the policy's share {policy} does "
            "not"
        )
        return Finding("complete" if attempt.groups is None else "in groups", in_words(least), True, says)
    says = "the attempt's graph withstands a share of {job} corrupt members; the policy requires {policy}"
    found = in_words(attempt.corrupt_millionths / _MILLION)
    return Finding(found, in_words(least), attempt.corrupt_millionths >= _millionths(least), says, advice)


def _two_party_sums(policy: PolicyDocument, attempt: Numbers) -> Finding:
    says = "a sum of {job} members can be opened in this attempt; the policy has allow_two_party_sums = {policy}"
    advice = "a sum of two shows each member the other's input"
    return Finding(str(attempt.min_sum), in_words(policy.allow_two_party_sums), attempt.min_sum >= 3, says, advice)


def _min_sigma(policy: PolicyDocument, attempt: Numbers) -> Finding:
    least = policy.min_sigma
    if attempt.sigma is None:
        return Finding(
            "complete", str(least), True, "the attempt's graph is {job}, which satisfies the policy's {policy} bits"
        )
    says = "the attempt's guarantee fails with probability at most 2^-{job}; the policy requires 2^-{policy}"
    if attempt.groups is not None:
        advice = (
            f"jobs have {_SIGMA_OF_JOBS} bits and cannot ask for more; lower min_sigma, or keep to jobs with one sum"
        )
        return Finding(str(attempt.sigma), str(least), (attempt.sigma or 0) >= least, says, advice)
    advice = (
        f"jobs have {_SIGMA_OF_JOBS} bits and cannot ask for more; lower min_sigma, or keep to jobs of up to "
        f"{COMPLETE_GRAPH_LIMIT} members"
    )
    return Finding(str(attempt.sigma), str(least), attempt.sigma >= least, says, advice)


ATTEMPT: tuple[Rule[Numbers], ...] = (
    Rule("min_cohort", When.ATTEMPT, Reason.REASON_POLICY_COHORT, _min_cohort),
    Rule("min_honest", When.ATTEMPT, Reason.REASON_POLICY_COHORT, _min_honest),
    Rule("min_group", When.ATTEMPT, Reason.REASON_POLICY_COHORT, _min_group),
    Rule("assumed_corrupt", When.ATTEMPT, Reason.REASON_POLICY_CORRUPTION, _assumed_corrupt),
    Rule("min_corrupt_share", When.ATTEMPT, Reason.REASON_POLICY_CORRUPTION, _min_corrupt_share),
    Rule("min_sigma", When.ATTEMPT, Reason.REASON_POLICY_CORRUPTION, _min_sigma),
    Rule(
        "allow_two_party_sums",
        When.ATTEMPT,
        Reason.REASON_POLICY_TWO_PARTY_SUM,
        _two_party_sums,
        lambda p: p.allow_two_party_sums,
    ),
)


# ---- roster, vector, sum, ledger ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Keys:
    keys: Mapping[str, bytes]
    max_doubtful: int
    own: str


def _peers(policy: PolicyDocument, roster: Keys) -> Finding:
    unknown = sorted(
        name
        for name, key in roster.keys.items()
        # This member needs no pin for itself; a pinned name with another key counts as unpinned.
        if name != roster.own and policy.peers.get(name) != fingerprint(key)
    )
    says = "members of the roster without a pin for their key: {job}; with the number that the attempt assumes "
    says += "corrupt, the policy allows {policy}"
    who = f"{len(unknown)} ({listed(unknown)})" if unknown else "0"
    return Finding(who, str(roster.max_doubtful), len(unknown) <= roster.max_doubtful, says)


ROSTER: tuple[Rule[Keys], ...] = (
    Rule("peers", When.ROSTER, Reason.REASON_POLICY_PEERS, _peers, lambda p: not p.peers),
)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the roster log says about a roster.

    Args:
        ages: for each member, how long this member has known its key, in days.
        witnesses: number of witnesses that have signed a head with every certificate of the roster.
        max_doubtful: n_C of the attempt or, of one group, what n_C of all make likely there.
        own: this member's name.
        unwitnessed: members whose certificates fewer witnesses have signed than the policy asks for, sorted.
    """

    ages: Mapping[str, float]
    witnesses: int
    max_doubtful: int
    own: str
    unwitnessed: Sequence[str] = ()


def witnesses_needed(policy: PolicyDocument) -> int:
    """The number of witnesses that must have signed; 0 if the policy asks for none."""
    return len(policy.witnesses) if policy.min_witnesses is None else policy.min_witnesses


def _member_age(policy: PolicyDocument, roster: Watched) -> Finding:
    young = sorted(name for name, age in roster.ages.items() if name != roster.own and age < policy.min_member_age_days)
    says = f"members of the roster whose keys are younger than {policy.min_member_age_days:g} days: {{job}}; with "
    says += "the number that the attempt assumes corrupt, the policy allows {policy}"
    who = f"{len(young)} ({listed(young)})" if young else "0"
    advice = "`edge_client members` shows who has joined; wait, or ask the operator who they are"
    return Finding(who, str(roster.max_doubtful), len(young) <= roster.max_doubtful, says, advice)


def _witnessed(policy: PolicyDocument, roster: Watched) -> Finding:
    needed = witnesses_needed(policy)
    says = "witnesses that signed the roster log with every certificate of this roster: {job}; the policy asks for "
    says += "{policy}"
    advice = "a witness signs within a minute of a change; if it does not, ask who runs it"
    who = f"{roster.witnesses}"
    if roster.unwitnessed:
        who += f" (too few signed for {listed(roster.unwitnessed)})"
    return Finding(who, str(needed), roster.witnesses >= needed, says, advice)


LOG: tuple[Rule[Watched], ...] = (
    Rule(
        "min_member_age_days",
        When.ROSTER,
        Reason.REASON_POLICY_MEMBER_AGE,
        _member_age,
        lambda p: not p.min_member_age_days,
    ),
    Rule("min_witnesses", When.ROSTER, Reason.REASON_POLICY_WITNESSES, _witnessed, lambda p: not witnesses_needed(p)),
)


# ---- one update, one sum a version ------------------------------------------------------------------
# Only without noise. docs/secure-aggregation.md, "Sums of one version", has the theorem that rests on these rules.


@dataclass(frozen=True, slots=True)
class VectorInQuestion:
    """A masked vector that is about to leave, and those that left before for the same version or round.

    Args:
        update: SHA-256 of the update in it.
        earlier: the same for each earlier vector.
        grouped: whether it goes into the sum of a group.
    """

    update: bytes
    earlier: tuple[bytes | None, ...]
    grouped: bool


def _one_update(policy: PolicyDocument, vector: VectorInQuestion) -> Finding:
    sent = len(vector.earlier)
    if vector.grouped:
        says = "this member sent {job} vectors for this version; in groups without noise the policy allows {policy}"
        advice = "each attempt draws new groups; the member takes part again with the next version"
        return Finding(str(sent), "one", not sent, says, advice)
    others = sum(each != vector.update for each in vector.earlier)
    says = "this member sent {job} other updates for this version; without noise the policy allows {policy}"
    advice = "the difference of two is this member's alone; it takes part again with the next version"
    return Finding(str(others), "none", not others, says, advice)


VECTOR: tuple[Rule[VectorInQuestion], ...] = (
    Rule(
        "allow_second_sum",
        When.VECTOR,
        Reason.REASON_POLICY_SECOND_SUM,
        _one_update,
        lambda p: p.allow_second_sum,
    ),
)


@dataclass(frozen=True, slots=True)
class SumInQuestion:
    """The members of a roster or of a list of survivors, and those of the sum that this member confirmed before."""

    members: frozenset[str]
    confirmed: frozenset[str]


def _one_sum(policy: PolicyDocument, this: SumInQuestion) -> Finding:
    differ = sorted(this.members ^ this.confirmed)
    says = "this sum differs in {job} from the one this member confirmed for this version; the policy allows {policy}"
    advice = "two sums can be subtracted; this member continues with exactly the same members or the next version"
    who = f"{len(differ)} members ({listed(differ)})" if differ else "no member"
    return Finding(who, "no difference", not differ, says, advice)


SUM: tuple[Rule[SumInQuestion], ...] = (
    Rule(
        "allow_second_sum",
        When.SUM,
        Reason.REASON_POLICY_SECOND_SUM,
        _one_sum,
        lambda p: p.allow_second_sum,
    ),
)
