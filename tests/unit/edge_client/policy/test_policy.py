"""The member's policy: every floor refuses, and names the rule and both values."""

import pytest

import secure_agg
from edge_client.policy.policy import Policy, PolicyRefusal
from tacit.documents import DocumentInvalid
from tacit.mechanism import DpSgd
from tacit.reason import Reason
from tests.support.fleet import job_document
from tests.support.sum_fleet import make_context


def test_without_a_file_a_job_without_noise_is_refused():
    with pytest.raises(PolicyRefusal) as refused:
        Policy().check_job(job_document())
    assert refused.value.reason == Reason.REASON_POLICY_MECHANISM
    assert 'mechanisms = ["none"]' in refused.value.detail
    Policy(mechanisms=("none",)).check_job(job_document())


def test_jobs_are_admitted_by_name():
    Policy(mechanisms=("none",), jobs=("quest*",)).check_job(job_document())
    with pytest.raises(PolicyRefusal) as refused:
        Policy(mechanisms=("none",), jobs=("other",)).check_job(job_document())
    assert refused.value.reason == Reason.REASON_JOB_NOT_ADMITTED


@pytest.mark.parametrize(
    ("policy", "context", "reason", "values"),
    [
        (Policy(min_cohort=6), make_context(5), Reason.REASON_POLICY_COHORT, ("5", "6")),
        (Policy(min_honest=4), make_context(5), Reason.REASON_POLICY_COHORT, ("3", "4")),
        (Policy(), make_context(5, corrupt=0), Reason.REASON_POLICY_CORRUPTION, ("0", "1")),
        (Policy(assumed_corrupt=2), make_context(6), Reason.REASON_POLICY_CORRUPTION, ("1", "2")),
        (Policy(), make_context(20, corrupt=3), Reason.REASON_POLICY_CORRUPTION, ("3", "4")),
        (
            Policy(assumed_corrupt=0),
            make_context(3, threshold=2, corrupt=0),
            Reason.REASON_POLICY_TWO_PARTY_SUM,
            ("2",),
        ),
        (
            Policy(assumed_corrupt=0, min_cohort=2),
            make_context(2),
            Reason.REASON_POLICY_TWO_PARTY_SUM,
            ("2",),
        ),
    ],
)
def test_a_number_weaker_than_the_policys_is_refused_with_both(policy, context, reason, values):
    with pytest.raises(PolicyRefusal) as refused:
        policy.check_attempt(context)
    assert refused.value.reason == reason
    assert all(value in refused.value.detail for value in values)


def test_two_members_need_an_explicit_exception():
    exception = Policy(assumed_corrupt=0, min_cohort=2, allow_two_party_sums=True)
    exception.check_attempt(make_context(2))
    with pytest.raises(PolicyRefusal):
        Policy(assumed_corrupt=0, min_cohort=2).check_attempt(make_context(2))
    with pytest.raises(PolicyRefusal):
        Policy(min_cohort=2, allow_two_party_sums=True).check_attempt(make_context(2))


@pytest.mark.parametrize("members", range(3, 30))
def test_the_protocols_defaults_pass_the_default_policy(members):
    Policy().check_attempt(make_context(members))


def test_a_second_vector_for_a_version_is_refused_in_groups():
    Policy().check_vector(bytes(32), (), grouped=True)
    with pytest.raises(PolicyRefusal) as refused:
        Policy().check_vector(bytes(32), (bytes(32),), grouped=True)
    assert refused.value.reason == Reason.REASON_POLICY_SECOND_SUM


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("mechanisms = []", "schema"),
        ("schema = 2", "schema = 2"),
        ("schema = 1\nmin_cohrt = 5", "min_cohrt: unknown key"),
        ("schema = 1\nmin_cohort = 1", "min_cohort"),
        ("schema = 1\nsurveys_epsilon = true", "surveys_epsilon: must be a number, not true or false"),
        ("schema = 1\nepsilon_a_month = true", "epsilon_a_month: must be a number, not true or false"),
        ("schema = 1\njobs = 3", 'jobs: must be "ask", or a list of names such as'),
        ('schema = 1\nmechanisms = ["noise"]', "mechanisms"),
        ("schema = ", "not TOML"),
        ('schema = 1\nhours = ["22-06"]', "hours.*22:00-06:00"),
        ('schema = 1\nbase_models = ["ab"]', "base_models.*64 hexadecimal"),
        ('schema = 1\n[peers]\nnorth = "ab"', "peers.north.*64 hexadecimal"),
        ('schema = 1\n[peers]\n"No Name" = ""', "peers"),
        ('schema = 1\ndevices = ["tpu"]', "devices"),
        ("schema = 1\nmin_noise_multiplier = 0", "min_noise_multiplier"),
        (
            "schema = 1\nvocabularies = []",
            'vocabularies: is empty.*write some of "own", "own-from-base" and "public", or leave',
        ),
        ('schema = 1\nvocabularies = ["ours"]', "vocabularies.0: 'ours' is not one of own, own-from-base, public"),
        ('schema = 1\nvocabularies = "own"', "vocabularies: must be a list, not text"),
    ],
)
def test_an_invalid_policy_is_refused_with_the_key(tmp_path, text, complaint):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(DocumentInvalid, match=complaint):
        Policy.from_toml(path)


def test_a_policy_that_asks_needs_as_many_stewards_as_approvals():
    mary, john = "11" * 32, "22" * 32
    assert Policy(jobs="ask", stewards={"mary": mary}).asks
    assert not Policy(stewards={"mary": mary}).asks
    # Whoever is asked decides about any job, whatever its name.
    Policy(jobs="ask", stewards={"mary": mary}, mechanisms=("none",)).check_job(job_document())
    for keys, why in (
        ({"jobs": "ask"}, "needs 1 of them, and there are 0"),
        ({"jobs": "ask", "min_approvals": 2, "stewards": {"mary": mary}}, "needs 2 of them, and there are 1"),
        ({"stewards": {"mary": mary, "twin": mary}}, "the same key"),
        ({"jobs": "all"}, r"is 'all'; write \"ask\", or a list of names"),
        ({"jobs": "ask", "min_approvals": 3, "stewards": {"mary": mary, "john": john}}, "less than or equal to 2"),
    ):
        with pytest.raises(ValueError, match=why):
            Policy(**keys)


def test_a_file_with_only_its_version_takes_only_jobs_with_noise(tmp_path):
    (tmp_path / "policy.toml").write_text("schema = 1\n")
    policy, path = Policy.load(tmp_path)
    assert path == tmp_path / "policy.toml"
    assert policy == Policy()
    noisy = job_document().model_copy(update={"mechanism": DpSgd(noise_multiplier=1.0)})
    policy.check_job(noisy, federation=bytes(32))
    with pytest.raises(PolicyRefusal):
        policy.check_job(job_document(), federation=bytes(32))


def test_the_option_wins_over_the_home_and_the_defaults(tmp_path):
    assert Policy.load(tmp_path) == (Policy(), None)
    (tmp_path / "policy.toml").write_text("schema = 1\nmin_cohort = 4\n")
    (tmp_path / "other.toml").write_text("schema = 1\nmin_cohort = 5\n")
    assert Policy.load(tmp_path)[0].min_cohort == 4
    assert Policy.load(tmp_path, tmp_path / "other.toml") == (Policy(min_cohort=5), tmp_path / "other.toml")
    # A named file that does not exist is an error: nothing else takes its place.
    with pytest.raises(DocumentInvalid, match="does not exist"):
        Policy.load(tmp_path, tmp_path / "none.toml")


def test_a_link_to_a_file_that_is_gone_is_no_policy_of_defaults(tmp_path):
    """The disk that has the policy may not be mounted, and a member's own limits must not be the defaults then."""
    link = tmp_path / "policy.toml"
    link.symlink_to(tmp_path / "elsewhere.toml")
    with pytest.raises(DocumentInvalid, match=r"policy\.toml points to a file that is not there"):
        Policy.load(tmp_path)
    (tmp_path / "elsewhere.toml").write_text("schema = 1\nepsilon = 1\n")
    assert Policy.load(tmp_path)[0].epsilon == 1


def test_honest_inputs_are_the_threshold_minus_the_corrupt():
    assert secure_agg.default_thresholds(5) == (4, 1)
    assert make_context(5).honest == 3
