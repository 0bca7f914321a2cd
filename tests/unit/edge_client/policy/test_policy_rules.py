"""Every floor and ceiling from both sides; `explain` and `check_*` cannot disagree."""

import hashlib
import math
import re
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from edge_client.policy.conditions import Conditions
from edge_client.policy.policy import Policy, PolicyRefusal
from edge_client.policy.rules import Watched, counted_multiplier, fingerprint
from edge_client.policy.verdicts import Outcome, When
from learning.accounting.events import DiscreteGaussianSum
from learning.accounting.spend import EventUnaccountable, cost
from learning.causal.config import check_causal
from learning.mechanisms.protection import OwnNumbers, protection_of
from secure_agg import RoundContext, sparse_thresholds
from tacit.context import promise_of
from tacit.corpus import CorpusOrder
from tacit.identity import Role
from tacit.job import Aggregation, JobDocument, JobSpec, Rounds
from tacit.manifest import Manifest, Tensor
from tacit.measurement import Measurement
from tacit.mechanism import (
    DistributedGaussian,
    DpSgd,
    GaussianUpdate,
    LaplaceUpdate,
    NoMechanism,
    OwnDiscreteGaussian,
    PersonRows,
)
from tacit.method import FedAvg, FedRecon, FedVocab, LgFedAvg, Method
from tacit.model import BiLSTMModel, NoModel, PluginModel, RvaeModel, TransformerModel
from tacit.prompt import PromptedModel
from tacit.reason import Reason
from tacit.survey import LabelHistogram, RowHistogram, Survey
from tacit.verification import verifiers
from tests.support import party
from tests.support.fleet import job_document
from tests.support.group_fleet import grouped_context
from tests.support.sum_fleet import make_context
from tests.support.tiny_causal import CONFIGS

ROOT, OTHER = hashlib.sha256(b"root").digest(), hashlib.sha256(b"other").digest()
NIGHT = datetime(2026, 11, 20, 23, 0)  # noqa: DTZ001  a Friday, local time
ALL = ("dp-sgd", "gaussian-update", "laplace-update", "distributed-gaussian", "none")


def a_job(**changes: Any) -> JobDocument:
    """A job under dp-sgd with cohorts of 3 to 200, with changes."""
    rounds = Rounds(**{key: changes.pop(key) for key in ("min_members", "target_members") if key in changes})
    base = {"mechanism": DpSgd(noise_multiplier=1.0), "rounds": rounds}
    return JobDocument.model_validate(job_document().model_dump() | base | changes)


def a_plugin(digest: int, distribution: str = "gated") -> PluginModel:
    return PluginModel(distribution=distribution, version="1.0", files=bytes([digest]) * 32, name="gated")


def a_manifest(*names: str) -> Manifest:
    return Manifest(tensors=tuple(Tensor(name=name, shape=(2,)) for name in names))


def machine(**changes: Any) -> Conditions:
    return Conditions(
        **{"now": NIGHT, "device": "cpu", "free_memory_mib": 4096, "on_power": True, "interfaces": ("eth0",)} | changes
    )


def ask(policy: Policy, subject: Any) -> None:
    """Calls the check for this kind of subject."""
    match subject:
        case JobDocument():
            policy.check_job(subject, federation=ROOT)
        case Manifest():
            policy.check_manifest(subject)
        case Conditions():
            policy.check_conditions(subject)
        case RoundContext():
            policy.check_attempt(subject)
        case (RoundContext() as context, names):
            policy.check_roster({name: name.encode() for name in names}, context.assumed_corrupt, own="own")
        case Watched():
            policy.check_log(subject)
        case (bytes() as update, earlier):
            policy.check_vector(update, earlier, grouped=False)
        case (str() as members, confirmed):
            policy.check_sum(members, confirmed)


def gaussian(multiplier: float, **changes: Any) -> JobDocument:
    return a_job(mechanism=GaussianUpdate(noise_multiplier=multiplier, **changes))


def shares(**numbers: Any) -> JobDocument:
    return a_job(min_members=5, mechanism=DistributedGaussian(**numbers))


def a_sparse_context(sigma: int, corrupt: int = 80) -> RoundContext:
    """A context of 400 members, of whom 20 may be lost."""
    graph, threshold, corrupt = sparse_thresholds(400, Fraction(corrupt, 400), Fraction(20, 400), sigma)
    return make_context(4, corrupt=1, cohort=400, threshold=threshold, assumed_corrupt=corrupt, graph=graph)


def pins(*names: str) -> dict[str, bytes]:
    return {name: fingerprint(name.encode()) for name in names}


def ordering(**changes: Any) -> JobDocument:
    """A job that orders synthetic text from its members."""
    order = CorpusOrder(**{"texts": 500, **changes})
    return a_job(mechanism=DpSgd(noise_multiplier=1.0)).model_copy(update={"model": RvaeModel(), "corpus": order})


def prompted(**changes: Any) -> JobDocument:
    """A prompted job. Its backbone is on the hub only if `changes` say so."""
    task = {"name": "cloze", "verbaliser": {"a": "great", "b": "bad"}}
    config = {"model_type": "bert", "vocab_size": 30}
    model = PromptedModel.model_validate({"task": task, "config": config, "backbone": OTHER.hex(), **changes})
    return a_job(weights=ROOT).model_copy(update={"model": model})


def of_words(words: int, **changes: Any) -> JobDocument:
    """A prompted job whose backbone has so many rows of 64 values, and little else."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    config = {"model_type": "bert", "vocab_size": words, "masked_lm": True, **sizes}
    return prompted(config=config, **changes)


def with_words(whose: str, method: Method = FedVocab(), **changes: Any) -> JobDocument:  # noqa: B008
    """A job without noise whose vocabulary its members build, or which brings one ("public")."""
    own = {"vocabulary": {"kind": "words"}, "tokenizer": None}
    start = {"private": {"manifest": bytes(32), "weights": OTHER, "values": 3}}
    if whose == "own-from-base":
        own |= start | {"vocabulary": {"kind": "wordpiece", "start": "base"}, "base_tokenizer": ROOT}
    brings = own if whose != "public" else {} if isinstance(method, FedAvg) else start
    return a_job(**{"mechanism": NoMechanism(), "method": method} | brings | changes)


# The policy's keys, a subject that it just allows, one that it refuses, the reason, and the two values that the refusal
# names.
def a_survey(**changes: Any) -> JobDocument:
    """A job that asks for labels and numbers of rows, under add-remove with a distance of sqrt(3)."""
    rounds = Rounds(count=1)
    base = {"question": ASKED, "model": NoModel(), "mechanism": OwnDiscreteGaussian(std=math.sqrt(3) * 10)}
    unused = {"labels": (), "vocabulary": None, "tokenizer": None, "values": ASKED.bins, "rounds": rounds}
    return JobDocument.model_validate(job_document().model_dump() | unused | base | changes)


def a_measurement(**changes: Any) -> JobDocument:
    """A job that asks how well a version does on kept-back rows, under add-remove with a distance of 32 sqrt(3)."""
    question = Measurement(
        job="desk", document=bytes(32), weights=bytes(32), manifest=bytes(32), values=1, **changes.pop("asks", {})
    )
    noise = OwnDiscreteGaussian(std=32 * math.sqrt(3) * 10, bound=64_000)
    base = {"question": question, "mechanism": noise, "values": question.bins, "rounds": Rounds(count=1)}
    return JobDocument.model_validate(job_document().model_dump() | base | changes)


ASKED = Survey(histograms=(LabelHistogram(labels=("a", "b")), RowHistogram(at_most=(10, 100))))


BOTH_SIDES: dict[str, tuple[dict[str, Any], Any, Any, Reason, tuple[str, str]]] = {
    "jobs": (
        {"jobs": ("quest*",)},
        a_job(),
        a_job(name="unquestioned"),
        Reason.REASON_JOB_NOT_ADMITTED,
        ("unquestioned", "quest*"),
    ),
    "surveys_epsilon": (
        {},
        a_job(),
        a_survey(),
        Reason.REASON_POLICY_JOB_KIND,
        ("labels, rows", "surveys spend 0", "surveys_epsilon = 0.5"),
    ),
    "metrics_epsilon": (
        {},
        a_job(),
        a_measurement(),
        Reason.REASON_POLICY_JOB_KIND,
        ("rows that this member keeps back", "spend 0", "metrics_epsilon = 1.0"),
    ),
    "architectures of a measurement": (
        {"metrics_epsilon": 1.0, "architectures": ("textcnn",)},
        a_measurement(),
        a_measurement(model=BiLSTMModel()),
        Reason.REASON_POLICY_JOB_KIND,
        ("measures a bilstm", "textcnn"),
    ),
    "plugins of a measurement": (
        {"metrics_epsilon": 1.0},
        a_measurement(),
        a_measurement(model=a_plugin(1)),
        Reason.REASON_POLICY_JOB_KIND,
        (f"gated {'01' * 32}", "nothing"),
    ),
    "min_noise_multiplier of a measurement": (
        {"metrics_epsilon": 1.0, "min_noise_multiplier": 9.99},
        a_measurement(),
        a_measurement(mechanism=OwnDiscreteGaussian(std=32 * math.sqrt(3) * 9.98, bound=64_000)),
        Reason.REASON_POLICY_NOISE,
        ("9.98", "9.99"),
    ),
    "min_cohort of a measurement": (
        {"metrics_epsilon": 1.0, "min_cohort": 10},
        a_measurement(),
        a_measurement(rounds=Rounds(count=1, min_members=3, target_members=9)),
        Reason.REASON_POLICY_COHORT,
        ("9", "10"),
    ),
    "min_noise_multiplier of an answer": (
        {"surveys_epsilon": 1.0, "min_noise_multiplier": 9.99},
        a_survey(),
        a_survey(mechanism=OwnDiscreteGaussian(std=math.sqrt(3) * 9.98)),
        Reason.REASON_POLICY_NOISE,
        ("9.98", "9.99"),
    ),
    "unit of an answer": (
        {"surveys_epsilon": 1.0, "unit": "member"},
        a_survey(mechanism=OwnDiscreteGaussian(std=20.0, unit="member")),
        a_survey(),
        Reason.REASON_PRIVACY_UNACCOUNTABLE,
        ("example", "member"),
    ),
    "min_cohort of a question": (
        {"surveys_epsilon": 1.0, "min_cohort": 10},
        a_survey(),
        a_survey(rounds=Rounds(count=1, min_members=3, target_members=9)),
        Reason.REASON_POLICY_COHORT,
        ("9", "10"),
    ),
    "tags": (
        {"tags": ("oncology", "trial-*")},
        a_job(tags=("oncology", "trial-7")),
        a_job(tags=("oncology", "marketing")),
        Reason.REASON_POLICY_JOB_KIND,
        ("marketing", "oncology, trial-*"),
    ),
    "architectures": (
        {"architectures": ("text*",)},
        a_job(),
        a_job().model_copy(update={"model": a_job().model.model_copy(update={"architecture": "mlp"})}),
        Reason.REASON_POLICY_JOB_KIND,
        ("mlp", "text*"),
    ),
    "plugins": (
        {"plugins": {"gated": "01" * 32, "other": "02" * 32}},
        a_job(model=a_plugin(1)),
        a_job(model=a_plugin(2)),
        Reason.REASON_POLICY_JOB_KIND,
        (f"gated {'02' * 32}", f"gated {'01' * 32}", "`edge_client models`"),
    ),
    "plugins by name": (
        {"plugins": {"gated": "01" * 32}},
        a_job(),
        a_job(model=a_plugin(1, "gated-x")),
        Reason.REASON_POLICY_JOB_KIND,
        (f"gated-x {'01' * 32}", "allows gated;"),
    ),
    "plugins by default": (
        {},
        a_job(),
        a_job(model=a_plugin(1)),
        Reason.REASON_POLICY_JOB_KIND,
        (f"gated {'01' * 32}", "allows nothing"),
    ),
    "tasks": (
        {"tasks": ("head", "cloze")},
        prompted(),
        prompted(
            task={"name": "generate", "template": "chatml"}, config=check_causal(CONFIGS["llama"]), injection="lora"
        ),
        Reason.REASON_POLICY_JOB_KIND,
        ("generate", "head, cloze"),
    ),
    "base_models": (
        {"base_models": (ROOT, OTHER)},
        a_job(weights=OTHER),
        a_job(weights=bytes(32)),
        Reason.REASON_POLICY_BASE_MODEL,
        ("00" * 32, OTHER.hex()),
    ),
    "base_models of a prompted job": (
        {"base_models": (ROOT, OTHER)},
        prompted(),
        prompted(backbone="00" * 32),
        Reason.REASON_POLICY_BASE_MODEL,
        ("the backbone " + "00" * 32, OTHER.hex()),
    ),
    "corpora": (
        {"corpora": "never"},
        ordering(source="operator"),
        ordering(),
        Reason.REASON_POLICY_CORPUS,
        ("500 synthetic texts", "never"),
    ),
    "max_corpus_texts": (
        {"max_corpus_texts": 500},
        ordering(),
        ordering(texts=501),
        Reason.REASON_POLICY_CORPUS,
        ("501 synthetic texts", "500"),
    ),
    "backbones": (
        {"backbones": ("hub",)},
        prompted(hub=f"owner/name@{'a1' * 20}"),
        prompted(),
        Reason.REASON_POLICY_BASE_MODEL,
        ("disk, coordinator", "hub"),
    ),
    "max_backbone_mib": (
        {"max_backbone_mib": 2},
        of_words(7093),
        of_words(7094),
        Reason.REASON_POLICY_BASE_MODEL,
        ("3 MiB", "at most 2"),
    ),
    "max_backbone_mib of what a member without torch fetches": (
        {"max_backbone_mib": 2},
        of_words(7093, task="head", injection="none", onnx={"digest": OTHER.hex(), "size": 2 * 2**20}),
        of_words(7093, task="head", injection="none", onnx={"digest": OTHER.hex(), "size": 2 * 2**20 + 1}),
        Reason.REASON_POLICY_BASE_MODEL,
        ("3 MiB", "at most 2"),
    ),
    "vocabularies": (
        {"vocabularies": ("own",)},
        with_words("own"),
        with_words("public"),
        Reason.REASON_POLICY_JOB_KIND,
        ("public", "own"),
    ),
    "vocabularies of everybody": (
        {"vocabularies": ("public",)},
        with_words("public"),
        with_words("own"),
        Reason.REASON_POLICY_JOB_KIND,
        ("own", "public"),
    ),
    "mechanisms": (
        {"mechanisms": ("dp-sgd",)},
        a_job(),
        gaussian(1.0),
        Reason.REASON_POLICY_MECHANISM,
        ("gaussian-update", "dp-sgd"),
    ),
    "unit": (
        {"unit": "member"},
        shares(noise_multiplier=1.0, unit="member"),
        shares(noise_multiplier=1.0, unit="example"),
        Reason.REASON_PRIVACY_UNACCOUNTABLE,
        ("example", "member"),
    ),
    "adjacency": (
        {"adjacency": "replace-one"},
        gaussian(1.0, sampling="fixed"),
        gaussian(1.0, sampling="poisson"),
        Reason.REASON_PRIVACY_UNACCOUNTABLE,
        ("add-remove", "replace-one"),
    ),
    "min_noise_multiplier": (
        {"min_noise_multiplier": 1.5},
        a_job(mechanism=DpSgd(noise_multiplier=1.5)),
        a_job(mechanism=DpSgd(noise_multiplier=1.49)),
        Reason.REASON_POLICY_NOISE,
        ("1.49", "1.5"),
    ),
    "min_noise_multiplier of gaussian-update": (
        {"min_noise_multiplier": 0.5},
        gaussian(1.0),
        gaussian(0.99),
        Reason.REASON_POLICY_NOISE,
        ("0.495", "0.5"),
    ),
    "min_noise_multiplier of a histogram of labels": (
        {"min_noise_multiplier": 0.75},
        ordering(histogram_std=0.75),
        ordering(histogram_std=0.74),
        Reason.REASON_POLICY_NOISE,
        ("histogram of labels", "0.74", "0.75"),
    ),
    "own_noise_multiplier": (
        {"own_noise_multiplier": 2.0},
        a_job(mechanism=DpSgd(noise_multiplier=0.5)),
        a_job(mechanism=DpSgd(noise_multiplier=0.49)),
        Reason.REASON_POLICY_NOISE,
        ("0.49 to 1.96", "2"),
    ),
    "own_noise_multiplier below": (
        {"own_noise_multiplier": 2.0},
        gaussian(2.0),
        gaussian(2.01),
        Reason.REASON_POLICY_NOISE,
        ("2.01 to 8.04", "2"),
    ),
    "max_epsilon_a_round": (
        {"max_epsilon_a_round": 0.5},
        a_job(mechanism=LaplaceUpdate(epsilon=0.5)),
        a_job(mechanism=LaplaceUpdate(epsilon=0.51)),
        Reason.REASON_POLICY_NOISE,
        ("0.51", "0.5"),
    ),
    # Before there is an attempt: the attempts that the job's numbers allow.
    "min_cohort of any attempt": (
        {"min_cohort": 20},
        a_job(target_members=20),
        a_job(target_members=19),
        Reason.REASON_POLICY_COHORT,
        ("19", "20"),
    ),
    "min_honest of any attempt": (
        {"min_honest": 5},
        a_job(target_members=9),
        a_job(target_members=7),
        Reason.REASON_POLICY_COHORT,
        ("4", "5"),
    ),
    "assumed_corrupt of any attempt": (
        {"assumed_corrupt": 2},
        a_job(aggregation=Aggregation(assumed_corrupt=2), min_members=5),
        a_job(aggregation=Aggregation(assumed_corrupt=1)),
        Reason.REASON_POLICY_CORRUPTION,
        ("1", "2"),
    ),
    "allow_two_party_sums in any attempt": (
        {"assumed_corrupt": 0, "min_cohort": 2},
        a_job(aggregation=Aggregation(assumed_corrupt=0), min_members=2, target_members=4),
        a_job(aggregation=Aggregation(assumed_corrupt=0), min_members=2, target_members=3),
        Reason.REASON_POLICY_TWO_PARTY_SUM,
        ("2", "false"),
    ),
    "min_cohort": (
        {"min_cohort": 6},
        make_context(6),
        make_context(5),
        Reason.REASON_POLICY_COHORT,
        ("5", "6"),
    ),
    "min_honest": (
        {"min_honest": 3},
        make_context(5),
        make_context(4),
        Reason.REASON_POLICY_COHORT,
        ("2", "3"),
    ),
    "min_group of any attempt": (
        {"min_group": 4, "assumed_corrupt": 1},
        a_job(aggregation=Aggregation(groups=3, assumed_corrupt=1), min_members=9, target_members=18),
        a_job(aggregation=Aggregation(groups=3, assumed_corrupt=1), min_members=9, target_members=12),
        Reason.REASON_POLICY_COHORT,
        ("3", "4"),
    ),
    "min_group": (
        {"min_group": 4, "assumed_corrupt": 1},
        grouped_context(18, 3, 1),
        grouped_context(12, 3, 1),
        Reason.REASON_POLICY_COHORT,
        ("3", "4"),
    ),
    "min_honest of a group": (
        {"min_honest": 3, "assumed_corrupt": 1},
        grouped_context(18, 3, 1),
        grouped_context(12, 3, 1),
        Reason.REASON_POLICY_COHORT,
        ("2", "3"),
    ),
    "min_sigma of groups": (
        {"assumed_corrupt": 1},
        grouped_context(12, 3, 1),
        grouped_context(12, 3, 1, sigma=79),
        Reason.REASON_POLICY_CORRUPTION,
        ("2^-79", "2^-80"),
    ),
    "assumed_corrupt": (
        {"assumed_corrupt": 2},
        make_context(6, corrupt=2, threshold=5),
        make_context(6),
        Reason.REASON_POLICY_CORRUPTION,
        ("1", "2"),
    ),
    "min_sigma": (
        {"assumed_corrupt": 80},
        a_sparse_context(80),
        a_sparse_context(79),
        Reason.REASON_POLICY_CORRUPTION,
        ("2^-79", "2^-80"),
    ),
    "assumed_corrupt of a large cohort": (
        {"min_corrupt_share": 0.2},
        a_sparse_context(80, corrupt=80),
        a_sparse_context(80, corrupt=79),
        Reason.REASON_POLICY_CORRUPTION,
        ("79", "80"),
    ),
    "assumed_corrupt of a large cohort by default": (
        {},
        a_sparse_context(80, corrupt=40),
        a_sparse_context(80, corrupt=39),
        Reason.REASON_POLICY_CORRUPTION,
        ("39", "40"),
    ),
    # A number that was meant for small cohorts is no floor for large ones; the share is.
    "min_corrupt_share": (
        {"assumed_corrupt": 1, "min_corrupt_share": 0.2},
        a_sparse_context(80, corrupt=80),
        a_sparse_context(80, corrupt=79),
        Reason.REASON_POLICY_CORRUPTION,
        ("0.1975", "0.2"),
    ),
    "min_corrupt_share of groups": (
        {"assumed_corrupt": 1, "min_corrupt_share": 0.2},
        grouped_context(400, 4, 80),
        grouped_context(400, 4, 79),
        Reason.REASON_POLICY_CORRUPTION,
        ("0.1975", "0.2"),
    ),
    # Rounded down as a job rounds it: a tenth of 209 is 20 members.
    "min_corrupt_share of groups, in whole members": (
        {"assumed_corrupt": 1},
        grouped_context(209, 3, 20),
        grouped_context(209, 3, 19),
        Reason.REASON_POLICY_CORRUPTION,
        ("0.090909", "0.1"),
    ),
    "allow_two_party_sums": (
        {"assumed_corrupt": 0},
        make_context(3, threshold=3, corrupt=0),
        make_context(3, threshold=2, corrupt=0),
        Reason.REASON_POLICY_TWO_PARTY_SUM,
        ("2", "false"),
    ),
    "shared_parameters": (
        {"shared_parameters": ("filters.*", "output.bias")},
        a_manifest("filters.2.weight", "output.bias"),
        a_manifest("filters.2.weight", "embedding.weight"),
        Reason.REASON_POLICY_PARAMETERS,
        ("embedding.weight", "filters.*, output.bias"),
    ),
    "hours": (
        {"hours": ("sat,sun 00:00-24:00", "22:00-06:00")},
        machine(),
        machine(now=NIGHT - timedelta(hours=2)),
        Reason.REASON_POLICY_CONDITIONS,
        ("fri 21:00", "sat,sun 00:00-24:00, 22:00-06:00"),
    ),
    "devices": (
        {"devices": ("cpu", "mps")},
        machine(),
        machine(device="cuda"),
        Reason.REASON_POLICY_CONDITIONS,
        ("cuda", "cpu, mps"),
    ),
    "min_free_memory_mib": (
        {"min_free_memory_mib": 4096},
        machine(),
        machine(free_memory_mib=4095),
        Reason.REASON_POLICY_CONDITIONS,
        ("4095", "4096"),
    ),
    "on_power_only": (
        {"on_power_only": True},
        machine(),
        machine(on_power=False),
        Reason.REASON_POLICY_CONDITIONS,
        ("a battery", "true"),
    ),
    "interfaces": (
        {"interfaces": ("eth*",)},
        machine(interfaces=("eth0", "eth1")),
        machine(interfaces=("eth0", "wwan0")),
        Reason.REASON_POLICY_CONDITIONS,
        ("wwan0", "eth*"),
    ),
    "peers": (
        {"peers": pins("north", "south", "gone")},
        (make_context(5, corrupt=1), ("own", "north", "south", "east")),
        (make_context(5, corrupt=1), ("own", "north", "south", "east", "west")),
        Reason.REASON_POLICY_PEERS,
        ("2 (east, west)", "1"),
    ),
    "min_member_age_days": (
        {"min_member_age_days": 7},
        Watched({"own": 0.0, "north": 7.0, "east": 6.9}, 0, 1, "own"),
        Watched({"own": 0.0, "north": 6.9, "east": 6.9}, 0, 1, "own"),
        Reason.REASON_POLICY_MEMBER_AGE,
        ("2 (east, north)", "7 days"),
    ),
    "min_witnesses": (
        {"witnesses": {"one": "00" * 32, "two": "11" * 32}},
        Watched({}, 2, 1, "own"),
        Watched({}, 1, 1, "own"),
        Reason.REASON_POLICY_WITNESSES,
        ("1;", "2"),
    ),
    "allow_second_sum of a vector": (
        {},
        (bytes(32), (bytes(32),)),
        (bytes(32), (bytes(32), OTHER)),
        Reason.REASON_POLICY_SECOND_SUM,
        ("1 other", "none"),
    ),
    "allow_second_sum of a sum": (
        {},
        ("abc", "abc"),
        ("abcd", "abc"),
        Reason.REASON_POLICY_SECOND_SUM,
        ("1 members (d)", "no difference"),
    ),
}


@pytest.mark.parametrize("case", BOTH_SIDES)
def test_allowed_at_the_boundary_and_refused_past_it(case):
    keys, allowed, refused, reason, values = BOTH_SIDES[case]
    policy = Policy.model_validate({"mechanisms": ALL, **keys})
    ask(policy, allowed)
    with pytest.raises(PolicyRefusal) as refusal:
        ask(policy, refused)
    assert refusal.value.reason == reason
    rule, _, said = refusal.value.detail.partition(": ")
    assert rule == case.split()[0]
    assert all(value in said for value in values)
    # A policy without the key refuses neither. Without `plugins` it refuses every plugin.
    if rule not in ("allow_second_sum", "assumed_corrupt", "min_sigma", "min_corrupt_share", "min_group", "plugins"):
        without = Policy.model_validate(
            {
                "mechanisms": ALL,
                "allow_two_party_sums": True,
                "assumed_corrupt": 0,
                "min_cohort": 2,
                "surveys_epsilon": 1.0,
                "metrics_epsilon": 1.0,
            }
        )
        if rule == "unit":
            without = without.model_copy(update={"unit": "example"})
        ask(without, refused)


def test_a_pattern_must_match_the_whole_name():
    Policy(jobs=("quest?ons",)).check_job(a_job())
    Policy(jobs=("no", "*tions")).check_job(a_job())
    for pattern in ("quest", "questions?", "Quest*", ""):
        with pytest.raises(PolicyRefusal):
            Policy(jobs=(pattern,)).check_job(a_job())


def test_long_lists_are_cut_before_the_wire_cuts_them():
    many = tuple(bytes([number]) * 32 for number in range(40))
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(base_models=many).check_job(a_job())
    assert refusal.value.detail.endswith("and 35 more")
    assert len(refusal.value.detail) <= 500


def test_pinned_base_models_cover_private_weights_too():
    """If only the shared weights were pinned, the operator could still write every row of the embedding."""
    start = {"manifest": bytes(32), "weights": OTHER, "values": 3}
    job = a_job(method="fedvocab", private=start, weights=ROOT)
    Policy(base_models=(OTHER, ROOT)).check_job(job)
    for admitted, named, unnamed in (
        ((ROOT,), f"starts from the private weights {OTHER.hex()}; the policy", f"the weights {ROOT.hex()}"),
        ((OTHER,), f"starts from the weights {ROOT.hex()}; the policy", "private"),
        ((bytes(32),), f"starts from the weights {ROOT.hex()} and the private weights {OTHER.hex()}; the", "more"),
        (
            tuple(bytes([number]) * 32 for number in range(40)),
            f"starts from the weights {ROOT.hex()} and the private weights {OTHER.hex()}; the policy",
            "and 35 more",
        ),
    ):
        with pytest.raises(PolicyRefusal) as refusal:
            Policy(base_models=admitted).check_job(job)
        assert refusal.value.reason == Reason.REASON_POLICY_BASE_MODEL
        assert named in refusal.value.detail
        assert unnamed not in refusal.value.detail
        assert len(refusal.value.detail) <= 500


def test_pinned_base_models_cover_the_bases_pieces_too():
    """They say which word gets which of the private rows."""
    job = with_words("own-from-base", model=ENCODER)
    start = (job.weights, job.private.weights)
    Policy(mechanisms=ALL, base_models=(*start, job.base_tokenizer)).check_job(job)
    pieces = f"starts from the base's word pieces {job.base_tokenizer.hex()}; the policy"
    with pytest.raises(PolicyRefusal, match=pieces):
        Policy(mechanisms=ALL, base_models=start).check_job(job)


def test_pinned_base_models_cover_the_onnx_backbone_too():
    """A member without torch computes with it, and the operator chooses it."""
    onnx = {"digest": "44" * 32, "size": 5}
    job = prompted(task={"name": "head"}, injection="none", onnx=onnx)
    Policy(base_models=(ROOT, OTHER, bytes.fromhex("44" * 32))).check_job(job)
    with pytest.raises(PolicyRefusal, match=f"starts from the ONNX backbone {'44' * 32}; the policy") as refusal:
        Policy(base_models=(ROOT, OTHER)).check_job(job)
    assert refusal.value.reason == Reason.REASON_POLICY_BASE_MODEL


def test_pinned_base_models_cover_frozen_weights_too():
    """They are the largest part of many a starting model, and the operator chooses them."""
    start = {"manifest": bytes(32), "weights": OTHER, "values": 3}
    job = a_job(model={"architecture": "textcnn", "freeze_embedding": True}, frozen=start, weights=ROOT)
    Policy(base_models=(OTHER, ROOT)).check_job(job)
    with pytest.raises(PolicyRefusal, match=f"starts from the frozen weights {OTHER.hex()}; the policy") as refusal:
        Policy(base_models=(ROOT,)).check_job(job)
    assert refusal.value.reason == Reason.REASON_POLICY_BASE_MODEL


ENCODER = TransformerModel(config={"model_type": "bert", "hidden_size": 4}, max_tokens=8)

# The keys of a document that a job file does not have.
BUNDLED = {
    *("manifest", "tokenizer", "base_tokenizer", "weights", "values", "private", "frozen", "earlier", "question"),
}

# For each kind of job: whose vocabulary it has, and what a refusal of it advises.
VOCABULARIES: dict[str, tuple[JobDocument, str, str]] = {
    "fedvocab over members' own words": (with_words("own"), "own", "names a file"),
    "fedvocab over members' own word pieces, above a base's encoder": (
        with_words("own", model=ENCODER, vocabulary={"kind": "wordpiece"}),
        "own",
        "names a file",
    ),
    "fedvocab over members' own word pieces, whose rows start from a base's": (
        with_words("own-from-base", model=ENCODER),
        "own-from-base",
        'vocabulary.start = "random"',
    ),
    "lg-fedavg over members' own words": (with_words("own", LgFedAvg()), "own", "names a file"),
    "fedvocab over a list": (with_words("public"), "public", "method fedvocab whose [vocabulary] names no file"),
    "fedvocab over a base's word pieces": (with_words("public", model=ENCODER), "public", "names no file"),
    "frozen rows of a list, under noise": (
        with_words("public", mechanism=DpSgd(noise_multiplier=1.0)),
        "public",
        "names no file",
    ),
    "lg-fedavg over a list": (with_words("public", LgFedAvg()), "public", "names no file"),
    "fedrecon, whose rows are made anew from a list's": (with_words("public", FedRecon()), "public", "names no file"),
    "fedavg": (a_job(), "public", "names no file"),
    "a prompted job, whose backbone has its own": (prompted(), "public", "architecture prompted have no other"),
    "a job that generates text over a list": (ordering(), "public", "architecture rvae have no other"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_the_job_alone_tells_whose_its_vocabulary_is(case):
    job, whose, advice = VOCABULARIES[case]
    other = {"own": "own-from-base", "own-from-base": "own", "public": "own"}[whose]
    for admitted in ((whose,), (whose, other), (other, whose)):
        Policy(mechanisms=ALL, vocabularies=admitted).check_job(job)
    Policy(mechanisms=ALL).check_job(job)
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(mechanisms=ALL, vocabularies=(other,)).check_job(job)
    assert refusal.value.reason == Reason.REASON_POLICY_JOB_KIND
    said = refusal.value.detail
    assert said.startswith(f"vocabularies: the job's vocabulary is {whose}; the policy allows {other}; ")
    assert advice in said
    # The rule relies on this: a job over members' own words can name neither a list nor rows to start from.
    brought = {"tokenizer.json", "private.bin", "backbone.safetensors"} & job.files.keys()
    assert bool(brought) == (whose != "own")
    # The operator's job file gives the same verdict as the document.
    words = {"kind": "words", "file": "words.txt"}
    unbundled = job.model_dump(exclude=BUNDLED | {"vocabulary"})
    if isinstance(job.model, PromptedModel):
        unbundled["model"] |= {"base": "owner/name", "config": None, "backbone": None}
    elif job.vocabulary is not None:
        unbundled["vocabulary"] = job.vocabulary
    else:
        unbundled["vocabulary"] = (
            words if not isinstance(job.model, TransformerModel) else words | {"kind": "wordpiece"}
        )
    told = {each.rule: each for each in Policy(vocabularies=(other,)).explain(JobSpec.model_validate(unbundled))}
    assert (told["vocabularies"].outcome, told["vocabularies"].sentence) == (Outcome.REFUSED, said)


def test_a_policy_without_vocabularies_allows_all():
    every = ("public", "own-from-base", "own")
    for policy in (Policy(), Policy(vocabularies=every), Policy.model_validate({"schema": 1})):
        for job in (with_words("own"), with_words("own-from-base", model=ENCODER), with_words("public"), a_job()):
            told = {each.rule: each for each in policy.explain(job)}["vocabularies"]
            assert (told.outcome, told.sentence) == (Outcome.OK, "vocabularies: the policy sets no limit")


def test_authorities():
    policy = Policy(authorities=(ROOT,))
    policy.check_job(a_job(), federation=ROOT)
    for federation, named in ((OTHER, OTHER.hex()), (None, "not known to be enrolled")):
        with pytest.raises(PolicyRefusal) as refusal:
            policy.check_job(a_job(), federation=federation)
        assert refusal.value.reason == Reason.REASON_POLICY_AUTHORITY
        assert refusal.value.detail.startswith("authorities: ")
        assert named in refusal.value.detail
        assert ROOT.hex() in refusal.value.detail
    Policy().check_job(a_job(), federation=OTHER)
    Policy().check_job(a_job())


def test_a_job_of_thousands_is_explained_by_some_cohort_sizes():
    job = a_job(min_members=150, target_members=10_000)
    verdicts = {each.rule: each for each in Policy(mechanisms=ALL).explain(job)}
    assert verdicts["min_corrupt_share"].outcome is Outcome.OK
    assert not [each for each in verdicts.values() if each.outcome is Outcome.REFUSED]
    Policy(mechanisms=ALL).check_job(job)
    # On the complete graph h is 61 to 81 for 150 to 200 members. Sparse graphs guarantee fewer, larger ones more.
    strict = {each.rule: each for each in Policy(mechanisms=ALL, min_honest=40).explain(job)}["min_honest"]
    assert strict.outcome is Outcome.OK
    refused = re.search(r"attempts of 201 to (\d+)[ ,].*would be refused \(above 200, only some sizes", strict.sentence)
    assert refused is not None, strict.sentence
    assert 1000 < int(refused[1]) < 10_000
    for members in (201, int(refused[1])):
        context = promise_of(job, members)
        assert context.honest < 40
        with pytest.raises(PolicyRefusal, match="min_honest"):
            Policy(mechanisms=ALL, min_honest=40).check_attempt(context)
    Policy(mechanisms=ALL, min_honest=40).check_attempt(promise_of(job, 10_000))


def test_a_job_with_weak_large_cohorts_is_taken_for_its_small_ones():
    job = a_job(min_members=150, target_members=1000, aggregation=Aggregation(max_corrupt_share=0.05))
    verdict = {each.rule: each for each in Policy(mechanisms=ALL).explain(job)}["min_corrupt_share"]
    assert verdict.outcome is Outcome.OK
    assert "attempts of 201 to 1000 members would be refused" in verdict.sentence
    job = a_job(min_members=300, target_members=1000, aggregation=Aggregation(max_corrupt_share=0.05))
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(mechanisms=ALL).check_job(job)
    assert refusal.value.reason == Reason.REASON_POLICY_CORRUPTION
    trusting = Policy(mechanisms=ALL, assumed_corrupt=0, min_corrupt_share=0)
    trusting.check_job(job)


def test_every_key_of_a_policy_is_a_rule_or_listed_as_none():
    # The ledger or training reads these; none is compared with a job's value.
    no_rules = {"schema_version", "delta", "trust_central_noise", "own_lot", "report_epsilon", "max_canaries"}
    # `min_witnesses` counts them.
    no_rules |= {"witnesses", "members_witness"}
    # The ledger counts what metrics beside a training spend, and nobody learns whether it was too much. Only a
    # measurement is declined by it.
    no_rules |= {"metrics_epsilon", "validation_share"}
    # The desk compares these with what stewards signed.
    no_rules |= {"stewards", "min_approvals", "max_approval_days"}
    rules = [verdict.rule for verdict in Policy().explain(a_job())]
    assert len(set(rules)) == len(rules)
    assert set(rules) == Policy.model_fields.keys() - no_rules
    by_ledger = {"epsilon", "epsilon_a_month", "epsilon_a_job", "authorities"}
    assert {case.split()[0] for case in BOTH_SIDES} | by_ledger == set(rules) | {"metrics_epsilon"}
    measuring = [verdict.rule for verdict in Policy().explain(a_measurement())]
    assert {"metrics_epsilon", "architectures", "backbones", "max_backbone_mib", "min_cohort"} <= set(measuring)
    assert not {"mechanisms", "base_models", "shared_parameters"} & set(measuring)


def test_a_backbone_is_bounded_by_default_and_one_that_nobody_can_read_is_left_to_preparation():
    (told,) = [each for each in Policy().explain(of_words(7093)) if each.rule == "max_backbone_mib"]
    assert (told.job, told.policy) == ("2", "16384")
    # Its config has no model type. Preparation refuses it before it asks anybody for it.
    Policy(max_backbone_mib=1).check_job(prompted(config={}))


# ---- conditions that cannot be read, rules that cannot be decided -----------------------------------------------


@pytest.mark.parametrize(
    ("keys", "gone"),
    [
        ({"devices": ("cpu",)}, {"device": None}),
        ({"min_free_memory_mib": 1}, {"free_memory_mib": None}),
        ({"on_power_only": True}, {"on_power": None}),
        ({"interfaces": ("*",)}, {"interfaces": None}),
        ({"interfaces": ("*",)}, {"interfaces": ()}),
    ],
)
def test_a_condition_that_cannot_be_read_is_not_met(keys, gone):
    Policy(**keys).check_conditions(machine())
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(**keys).check_conditions(machine(**gone))
    assert refusal.value.reason == Reason.REASON_POLICY_CONDITIONS
    assert refusal.value.detail.startswith(next(iter(keys)) + ": ")
    # Without a rule, an unreadable condition does not matter.
    Policy().check_conditions(machine(**gone))


def test_one_window_that_holds_is_enough():
    night = Policy(hours=("06:00-07:00", "22:00-06:00"))
    night.check_conditions(machine())
    with pytest.raises(PolicyRefusal, match="fri 23:00"):
        Policy(hours=("06:00-07:00",)).check_conditions(machine())


def test_a_job_file_leaves_open_what_only_the_bundle_decides():
    document = a_job()
    spec = JobSpec.model_validate(
        document.model_dump(exclude=BUNDLED) | {"vocabulary": {"kind": "words", "file": "words.txt"}}
    )
    policy = Policy(base_models=(ROOT,), shared_parameters=("output.*",), hours=("22:00-06:00",), peers=pins("north"))
    told = {verdict.rule: verdict for verdict in policy.explain(spec)}
    opened = {rule for rule, verdict in told.items() if verdict.outcome is Outcome.OPEN}
    always = {"epsilon", "allow_second_sum"}
    assert opened == {"base_models", "shared_parameters", "hours", "peers"} | always
    assert told["shared_parameters"].when is When.MANIFEST
    assert "output.*" in told["shared_parameters"].sentence
    # Every other verdict equals that on the document.
    others = {verdict.rule: verdict for verdict in policy.explain(document)}
    assert {rule: told[rule] for rule in told if rule != "base_models"} == {
        rule: others[rule] for rule in others if rule != "base_models"
    }
    assert others["base_models"].outcome is Outcome.REFUSED


# ---- the cohorts of a job --------------------------------------------------------------------------------------


def test_explain_names_the_cohort_sizes_that_would_be_refused():
    policy = Policy(min_cohort=6)
    policy.check_job(a_job())
    told = {verdict.rule: verdict for verdict in policy.explain(a_job())}
    assert told["min_cohort"].job == "6"
    assert "attempts of 3 to 5 members would be refused" in told["min_cohort"].sentence
    assert "would be refused" not in told["min_honest"].sentence
    with pytest.raises(PolicyRefusal):
        policy.check_attempt(make_context(5))


def test_a_job_is_refused_if_no_one_cohort_keeps_all_rules():
    # n_C = 1 satisfies only cohorts up to 9, and the policy requires 10 members.
    job = a_job(aggregation=Aggregation(assumed_corrupt=1), target_members=30)
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(min_cohort=10).check_job(job)
    assert "the job's cohorts have 3 to 30 members" in refusal.value.detail
    Policy(min_cohort=9).check_job(job)
    told = {verdict.rule: verdict for verdict in Policy(min_cohort=9).explain(job)}
    assert "10 to 30" in told["assumed_corrupt"].sentence


def test_cohorts_that_no_graph_has_numbers_for_stay_open():
    large = a_job().model_copy(update={"rounds": Rounds.model_construct(min_members=10**6, target_members=10**6 + 1)})
    Policy().check_job(large)
    told = {verdict.rule: verdict.outcome for verdict in Policy().explain(large)}
    assert told["min_cohort"] is told["assumed_corrupt"] is Outcome.OPEN


def test_a_verdict_names_its_cohort_and_the_largest_ones_value():
    job = a_job(min_members=3, target_members=1000)
    told = {verdict.rule: verdict for verdict in Policy().explain(job)}
    largest = promise_of(job, 1000)
    range_of = "; the job's cohorts have 3 to 1000 members)"
    for rule, value in (
        ("min_honest", largest.honest),
        ("assumed_corrupt", 100),
        ("min_corrupt_share", 0.1),
        ("min_sigma", 80),
    ):
        assert told[rule].outcome is Outcome.OK
        assert f"(in a cohort of 3, in one of 1000 it is {value}{range_of}" in told[rule].sentence
    assert told["min_cohort"].sentence.endswith(f"(in a cohort of 3{range_of}")
    assert told["min_honest"].job == "2"
    one = {verdict.rule: verdict for verdict in Policy().explain(a_job(min_members=5, target_members=5))}
    assert one["min_honest"].sentence.endswith("the policy requires 2 (the job's cohorts have 5 members)")
    free = {verdict.rule: verdict for verdict in Policy(allow_two_party_sums=True).explain(job)}
    assert free["allow_two_party_sums"].sentence == "allow_two_party_sums: the policy sets no limit"


@pytest.mark.parametrize(
    ("policy", "members", "advice"),
    [
        ({"assumed_corrupt": 9}, 40, "writes assumed_corrupt = 0"),
        ({"assumed_corrupt": 90}, 400, "leave out a number"),
        ({"min_corrupt_share": 0.2}, 400, "smaller min_corrupt_share"),
        ({"min_honest": 90}, 40, "larger rounds.min_members"),
        ({"min_honest": 90}, 400, "larger aggregation.max_lost_share"),
        ({"min_sigma": 81}, 400, "jobs have 80 bits"),
    ],
)
def test_a_refused_attempt_says_what_to_change(policy, members, advice):
    context = promise_of(a_job(target_members=1000), members)
    with pytest.raises(PolicyRefusal) as refusal:
        Policy(**policy).check_attempt(context)
    assert refusal.value.detail.startswith(next(iter(policy)) if "share" not in str(policy) else "assumed_corrupt")
    assert advice in refusal.value.detail
    assert ("assumed_corrupt = 0" in refusal.value.detail) == (members <= 200 and "assumed_corrupt" in policy)
    assert len(refusal.value.detail) <= 500


def test_the_advice_of_a_refused_attempt_helps():
    job = a_job(target_members=1000)
    Policy(mechanisms=ALL).check_attempt(promise_of(job, 400))
    more = a_job(target_members=1000, aggregation=Aggregation(max_lost_share=0.3))
    Policy(min_honest=90).check_attempt(promise_of(more, 400))
    graph = promise_of(job, 400).sparse
    assert graph is not None
    assert graph.sigma == 80


def test_a_group_of_two_is_a_two_party_sum_in_any_cohort():
    policy = Policy(mechanisms=ALL, assumed_corrupt=0, min_group=2)
    policy.check_attempt(grouped_context(8, 2, 0))
    with pytest.raises(PolicyRefusal, match="a sum of 2 members can be opened") as refusal:
        policy.check_attempt(grouped_context(9, 3, 0))
    assert refusal.value.reason == Reason.REASON_POLICY_TWO_PARTY_SUM


def test_a_sparse_graphs_threshold_is_not_the_size_of_its_sum():
    context = a_sparse_context(80)
    assert context.threshold < context.min_survivors == 380
    Policy(assumed_corrupt=80).check_attempt(context)
    with pytest.raises(PolicyRefusal, match=f"guarantees {context.honest} honest"):
        Policy(assumed_corrupt=80, min_honest=context.honest + 1).check_attempt(context)


# ---- noise, against the modules that account for it ------------------------------------------------------------

MECHANISMS = [
    DpSgd(noise_multiplier=0.8),
    GaussianUpdate(noise_multiplier=1.2),
    GaussianUpdate(noise_multiplier=1.2, sampling="fixed"),
    LaplaceUpdate(epsilon=0.3),
    *(
        DistributedGaussian(noise_multiplier=1.1, honest=honest, unit=unit)
        for honest in (1, 3)
        for unit in ("example", "member")
    ),
]


def test_a_policy_of_persons_takes_dp_sgd_by_person_alone_and_only_under_add_remove():
    policy = Policy(unit="person")
    rows = PersonRows(max_examples=8)
    # What a mechanism's model must be is the job's own rule.
    job = a_job().model_copy(update={"mechanism": DpSgd(noise_multiplier=1.0, unit="person", person=rows)})
    policy.check_job(job)
    for mechanism in MECHANISMS:
        with pytest.raises(PolicyRefusal, match="the policy's ledger counts by person"):
            policy.check_job(a_job(min_members=5, mechanism=mechanism))
    for other in ("example", "member"):
        with pytest.raises(PolicyRefusal, match=f"protects one person; the policy's ledger counts by {other}"):
            Policy(unit=other).check_job(job)
    with pytest.raises(ValidationError, match="only it protects persons"):
        Policy(unit="person", adjacency="replace-one")


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("unit", ["example", "member"])
def test_unit_and_adjacency_refuse_what_the_ledger_cannot_account(mechanism, adjacency, unit):
    policy, job = Policy(adjacency=adjacency, unit=unit), a_job(min_members=5, mechanism=mechanism)
    event = protection_of(job, 1000).event
    assert event is not None
    try:
        cost(event, policy.limit())
    except EventUnaccountable:
        with pytest.raises(PolicyRefusal) as refusal:
            policy.check_job(job)
        assert refusal.value.reason == Reason.REASON_PRIVACY_UNACCOUNTABLE
    else:
        policy.check_job(job)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("own", [None, 0.5, 1.0, 1.2, 3.2, 4.8, 5.0])
def test_own_noise_is_refused_where_training_would_refuse_it(mechanism, own):
    job, policy = a_job(min_members=5, mechanism=mechanism), Policy(own_noise_multiplier=own)
    policy = policy.model_copy(update={"unit": mechanism.unit})
    if getattr(mechanism, "sampling", "") == "fixed":
        policy = policy.model_copy(update={"adjacency": "replace-one"})
    try:
        protection_of(job, 1000, own=policy.own())
    except ValueError:
        with pytest.raises(PolicyRefusal) as refusal:
            policy.check_job(job)
        assert refusal.value.reason == Reason.REASON_POLICY_NOISE
    else:
        policy.check_job(job)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("central", [False, True])
def test_min_noise_multiplier_compares_the_accounted_number(mechanism, central):
    policy = Policy(trust_central_noise=central)
    # A wide clip on a fine grid, so that rounding adds almost nothing to the norm.
    job = a_job(min_members=5, mechanism=mechanism)
    event = protection_of(job, 1000, trust_central_noise=central).event
    counted = counted_multiplier(mechanism, policy)
    match event:
        case None:
            raise AssertionError
        case _ if event.kind == "laplace":
            assert counted is None
        case _ if event.kind == "discrete-gaussian-sum":
            assert counted == pytest.approx(event.honest**0.5 * event.std / event.distance, rel=1e-3)
        case _:
            assert counted == event.multiplier


def test_replacing_a_member_moves_twice_as_far_as_removing_one():
    mechanism = DistributedGaussian(noise_multiplier=2.0, unit="member")
    present, replaced = Policy(unit="member"), Policy(unit="member", adjacency="replace-one")
    assert counted_multiplier(mechanism, present) == 2.0
    assert counted_multiplier(mechanism, replaced) == 1.0
    # The ledger's cost agrees.
    event = protection_of(a_job(mechanism=mechanism), 10).event
    assert isinstance(event, DiscreteGaussianSum)
    twice = event.model_copy(update={"distance": 2 * event.distance})
    assert cost(event, replaced.limit()).tolist() == cost(twice, present.limit()).tolist()


def test_more_noise_of_the_members_own_satisfies_the_minimum():
    policy = Policy(min_noise_multiplier=1.0)
    with pytest.raises(PolicyRefusal):
        policy.check_job(gaussian(1.9))
    policy.model_copy(update={"own_noise_multiplier": 2.0}).check_job(gaussian(1.9))


def test_noise_limits_do_not_refuse_a_job_without_noise():
    strict = Policy(mechanisms=ALL, min_noise_multiplier=10, own_noise_multiplier=2, max_epsilon_a_round=0.01)
    strict.check_job(a_job(mechanism=NoMechanism()))


def test_own_numbers_and_limit_are_the_policys():
    assert Policy(own_lot=7, own_noise_multiplier=2.0).own() == OwnNumbers(7, 2.0)
    limit = Policy(epsilon=3, delta=1e-5, adjacency="replace-one", unit="member").limit()
    assert (limit.epsilon, limit.delta, limit.adjacency, limit.unit) == (3, 1e-5, "replace-one", "member")


# ---- pinned peers ----------------------------------------------------------------------------------------------


def test_pins_compare_keys_and_not_names_or_certificates():
    of = party.authority()
    _, key_of = verifiers(of.certificate, now=party.present)

    def issued(name: str, number: int) -> bytes:
        certificate = of.issue(party.key(number).public_key(), Role.MEMBER, name, now=party.present())
        return key_of(certificate.public_bytes(serialization.Encoding.DER))

    north, impostor = issued("north", 2), issued("north", 3)
    assert issued("north", 2) == north  # A renewed certificate keeps the pin.
    policy, context = Policy(peers={"north": fingerprint(north)}), make_context(3, corrupt=0)
    policy.check_roster({"own": b"any", "north": north}, context.assumed_corrupt, own="own")
    for stranger in ({"north": impostor}, {"other": north}):
        with pytest.raises(PolicyRefusal) as refusal:
            policy.check_roster({"own": b"any", **stranger}, context.assumed_corrupt, own="own")
        assert refusal.value.reason == Reason.REASON_POLICY_PEERS
    Policy().check_roster({"own": b"any", "north": impostor}, context.assumed_corrupt, own="own")


def test_pins_stop_a_coordinator_that_fills_the_roster_itself():
    """Without pins its members look like any others, and n_C rests on trust. With pins, more than n_C are refused."""
    keys = {"own": b"own", "north": b"north"} | {f"m{number}": b"its own" for number in range(8)}
    context = make_context(10, corrupt=2)
    Policy().check_roster(keys, context.assumed_corrupt, own="own")
    with pytest.raises(PolicyRefusal):
        Policy(peers=pins("north")).check_roster(keys, context.assumed_corrupt, own="own")


# ---- explain and check -----------------------------------------------------------------------------------------

mechanisms = st.sampled_from([NoMechanism(), *MECHANISMS])
digests = st.lists(st.sampled_from([ROOT, OTHER, bytes(32)]), max_size=2).map(tuple)
patterns = st.lists(st.sampled_from(["*", "quest*", "text*", "filters.*", "other"]), max_size=2).map(tuple)
numbers = st.none() | st.sampled_from([0.1, 0.4, 0.6, 1.0, 2.0, 4.0])

policies = st.builds(
    Policy,
    jobs=st.just(("*",)) | patterns,
    architectures=st.just(("*",)) | patterns,
    tasks=st.just(("*",)) | patterns,
    plugins=st.sampled_from([{}, {"x" * 64: ROOT}, {"y" * 64: OTHER, "x" * 64: OTHER}]),
    base_models=digests,
    authorities=digests,
    shared_parameters=st.just(("*",)) | patterns,
    vocabularies=st.sampled_from([("own", "public"), ("own",), ("public",)]),
    mechanisms=st.just(ALL) | st.lists(st.sampled_from(ALL), max_size=len(ALL)).map(tuple),
    adjacency=st.sampled_from(["add-remove", "replace-one"]),
    unit=st.sampled_from(["example", "member"]),
    min_noise_multiplier=numbers,
    own_noise_multiplier=numbers,
    max_epsilon_a_round=numbers,
    trust_central_noise=st.booleans(),
    min_cohort=st.integers(2, 12),
    min_honest=st.integers(2, 8),
    assumed_corrupt=st.none() | st.integers(0, 4),
    allow_two_party_sums=st.booleans(),
    hours=st.lists(st.sampled_from(["22:00-06:00", "mon-thu 00:00-24:00", "fri 12:00-13:00"]), max_size=2).map(tuple),
    devices=st.sets(st.sampled_from(["cpu", "cuda", "mps"])).map(tuple),
    min_free_memory_mib=st.none() | st.sampled_from([1, 4096, 4097]),
    on_power_only=st.booleans(),
    interfaces=st.lists(st.sampled_from(["eth*", "wlan0", "*"]), max_size=2).map(tuple),
)
# Members' own words, which need a job without noise here.
OWN = {"method": FedVocab(), "vocabulary": {"kind": "words"}, "tokenizer": None, "mechanism": NoMechanism()}
# The longest name of a plugin, so that no refusal is too long.
PLUGGED = {"model": PluginModel(distribution="x" * 64, version="1.0", files=ROOT, name="gated")}
jobs = st.builds(
    lambda said, least, more, corrupt, name: a_job(
        name=name,
        aggregation=Aggregation(assumed_corrupt=corrupt),
        min_members=least,
        target_members=least + more,
        **said,
    ),
    st.fixed_dictionaries({"mechanism": mechanisms}) | st.just(OWN) | st.just(PLUGGED),
    st.integers(6, 12),
    st.integers(0, 6),
    st.none() | st.integers(0, 1),
    st.sampled_from(["questions", "other"]),
)
manifests = st.sampled_from([a_manifest("filters.2.weight"), a_manifest("filters.2.weight", "embedding.weight")])
machines = st.builds(
    machine,
    now=st.sampled_from([NIGHT, NIGHT - timedelta(hours=10, minutes=30), NIGHT + timedelta(days=1)]),
    device=st.sampled_from([None, "cpu", "cuda"]),
    free_memory_mib=st.sampled_from([None, 4095, 4096]),
    on_power=st.sampled_from([None, False, True]),
    interfaces=st.sampled_from([None, (), ("eth0",), ("eth0", "wlan0")]),
)


def refusal_of(check: Any, *arguments: Any, **named: Any) -> tuple[Reason, str] | None:
    try:
        check(*arguments, **named)
    except PolicyRefusal as refusal:
        return refusal.reason, refusal.detail
    return None


@given(policy=policies, job=jobs, federation=st.sampled_from([ROOT, OTHER]))
def test_check_job_refuses_exactly_what_explain_says_it_refuses(policy, job, federation):
    refused = [each for each in policy.explain(job, federation=federation) if each.outcome is Outcome.REFUSED]
    said = refusal_of(policy.check_job, job, federation=federation)
    assert said == ((refused[0].reason, refused[0].sentence) if refused else None)


@given(policy=policies, job=jobs, manifest=manifests, conditions=machines)
def test_the_first_refusal_of_all_checks_is_the_first_of_explain(policy, job, manifest, conditions):
    told = policy.explain(job, federation=ROOT, manifest=manifest, conditions=conditions)
    refused = [(each.reason, each.sentence) for each in told if each.outcome is Outcome.REFUSED]
    said = (
        refusal_of(policy.check_job, job, federation=ROOT)
        or refusal_of(policy.check_manifest, manifest)
        or refusal_of(policy.check_conditions, conditions)
    )
    assert said == (refused[0] if refused else None)


@given(policy=policies, job=jobs, manifest=manifests, conditions=machines, enrolled=st.booleans())
def test_every_sentence_names_its_rule_and_both_values(policy, job, manifest, conditions, enrolled):
    federation = OTHER if enrolled else None
    for verdict in policy.explain(job, federation=federation, manifest=manifest, conditions=conditions):
        assert verdict.sentence.startswith(verdict.rule + ": ")
        assert verdict.job in verdict.sentence
        if verdict.outcome is not Outcome.OK:
            assert verdict.policy in verdict.sentence
        # A longer sentence is cut on its way to the coordinator.
        assert len(verdict.sentence) <= 500


@given(policy=policies, job=jobs)
def test_an_admitted_job_has_an_attempt_that_is_joined(policy, job):
    """`check_job` agrees with `check_attempt` on each of the job's cohort sizes."""
    alone = policy.model_copy(
        update={
            **dict.fromkeys(("jobs", "architectures", "tasks"), ("*",)),
            **dict.fromkeys(("base_models", "authorities"), ()),
            "plugins": {"x" * 64: ROOT},
            "vocabularies": ("own", "public"),
            **dict.fromkeys(("min_noise_multiplier", "own_noise_multiplier", "max_epsilon_a_round")),
            "mechanisms": ALL,
            "unit": "example",
            "adjacency": "add-remove",
        }
    )
    job = job.model_copy(update={"mechanism": NoMechanism()})
    joined = []
    for cohort in range(job.rounds.min_members, job.rounds.target_members + 1):
        context = make_context(cohort, corrupt=job.aggregation.assumed_corrupt)
        joined.append(refusal_of(alone.check_attempt, context) is None)
    assert (refusal_of(alone.check_job, job) is None) == any(joined)


# Keys that list what is allowed. Left out: lists that allow everything when empty, and lists with values of their own.
ADMITTED = ("jobs", "architectures", "tasks", "backbones", "shared_parameters", "vocabularies", "mechanisms", "devices")


@given(
    policy=policies, job=jobs, manifest=manifests, conditions=machines, key=st.sampled_from(ADMITTED), data=st.data()
)
def test_a_shorter_list_admits_nothing_that_a_longer_one_refuses(policy, job, manifest, conditions, key, data):
    """A list can only narrow: a member that takes an item out of it takes part in no more jobs."""
    items = getattr(policy, key)
    assume(items)
    fewer = data.draw(st.lists(st.sampled_from(items), min_size=1, unique=True).map(tuple))
    narrower = Policy.model_validate(policy.model_dump() | {key: fewer})

    def refused(by: Policy) -> set[str]:
        told = by.explain(job, federation=ROOT, manifest=manifest, conditions=conditions)
        return {each.rule for each in told if each.outcome is Outcome.REFUSED}

    assert refused(policy) <= refused(narrower)
    # The other rules are not affected.
    assert refused(narrower) - refused(policy) <= {key}
