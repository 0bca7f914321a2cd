"""Tests of `edge_client policy check`, `show` and `init`, run as a person types them."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edge_client.cli import app as app_of_everything
from edge_client.cli.policy import app, default_file
from edge_client.ledger.ledger import Ledger, Purpose, ledger_path
from edge_client.policy.policy import Policy
from edge_client.policy.rules import fingerprint
from export.bundle import make_job_bundle
from learning.accounting.filter import Limit
from learning.accounting.planning import cost_of_metrics, nothing_measured
from learning.mechanisms.protection import protection_of
from tacit.job import JobDocument, JobSpec
from tests.support import party
from tests.support.places import ROOT
from toolkit.console import CommandFailed, ExitCode

JOB = """\
schema = 1
name = "desk"
labels = ["a", "b"]

[vocabulary]
kind = "words"
file = "words.txt"

[model]
embedding = 4
maps = 2

[rounds]
count = {count}
min_members = 5

[mechanism]
{mechanism}
"""
DP_SGD = 'name = "dp-sgd"\nnoise_multiplier = 1.1\nlot = 32\nsteps = 5'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Returns a folder with a job.toml under dp-sgd and an empty home."""
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "words.txt").write_text("one\ntwo\nthree\n")
    job(tmp_path)
    return tmp_path


def job(folder: Path, mechanism: str = DP_SGD, count: int = 20) -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.format(mechanism=mechanism, count=count))
    return path


def document(folder: Path) -> JobDocument:
    """Returns the job as it is run, with made-up digests."""
    spec = JobSpec.from_toml(folder / "job.toml")
    digests = {"manifest": bytes(32), "tokenizer": bytes(32), "weights": bytes(32), "values": 1}
    return JobDocument.model_validate(spec.model_dump(exclude={"vocabulary", "start"}) | digests)


def policy(folder: Path, text: str) -> None:
    (folder / "home" / "policy.toml").write_text("schema = 1\n" + text)


def run(folder: Path, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--home", str(folder / "home")])
    if isinstance(result.exception, CommandFailed):
        return int(result.exception.code), result.exception.sentence
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def verdicts(folder: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    code, output = run(folder, "check", *arguments, "--json")
    return code, json.loads(output)


# ---- check ----------------------------------------------------------------------------------------


def test_a_job_that_the_policy_accepts_exits_with_0(place):
    code, output = run(place, "check", place / "job.toml", "--all")
    assert code == ExitCode.OK
    assert output.splitlines()[0] == "desk against the defaults:"
    assert output.splitlines()[-1] == "This member would take part, as far as can be told here."
    (place / "asks.toml").write_text(f'schema = 1\njobs = "ask"\nstewards = {{ mary = "{"11" * 32}" }}\n')
    asked = run(place, "check", place / "job.toml", "--policy", place / "asks.toml")
    assert asked[0] == ExitCode.OK
    assert asked[1].endswith("take part, once its stewards have approved it, as far as can be told here.\n")
    keys = [line.split()[1].removesuffix(":") for line in output.splitlines()[1:-2]]
    assert [verdict.rule for verdict in Policy().explain(JobSpec.from_toml(place / "job.toml"))] == keys


def test_check_shows_what_matters_and_counts_the_rest(place):
    job_file = place / "job.toml"
    every = Policy().explain(JobSpec.from_toml(job_file))
    code, output = run(place, "check", job_file)
    assert code == ExitCode.OK
    # Without a policy file, only the open rules are shown.
    rules = [verdict.rule for verdict in every if verdict.outcome == "open"]
    _, *shown, rest, cost, _ = output.splitlines()
    assert cost == "cost     unknown: give --examples N, and this says how many rounds the budget allows"
    assert [line.split()[:2] for line in shown] == [["open", f"{rule}:"] for rule in rules]
    assert rest == f"{len(every) - len(rules)} more rules refuse nothing; --all shows them."

    # A rule that the member set is shown if it requires something. A rule that refuses is always shown.
    policy(place, 'min_cohort = 7\nhours = []\nmechanisms = ["none"]\n')
    code, output = run(place, "check", job_file)
    assert code == ExitCode.REFUSED
    _, *shown, rest, _ = output.splitlines()
    told = {line.split()[1]: line.split()[0] for line in shown}
    assert told == {f"{rule}:": "open" for rule in rules} | {"min_cohort:": "ok", "mechanisms:": "refused"}
    assert rest == f"{len(every) - len(rules) - 2} more rules refuse nothing; --all shows them."
    code, told = verdicts(place, job_file)
    assert len(told["verdicts"]) == len(every)


def test_a_refused_job_exits_with_4_and_names_every_refusing_rule(place):
    policy(place, 'mechanisms = ["none"]\nmin_cohort = 201\n')
    code, output = run(place, "check", place / "job.toml")
    assert code == ExitCode.REFUSED
    assert re.search(r'^refused +mechanisms: the job uses "dp-sgd"; the policy allows none', output, re.MULTILINE)
    assert re.search(
        r"^refused +min_cohort: the attempt has 200 members; the policy requires 201", output, re.MULTILINE
    )
    assert output.splitlines()[-1] == "This member would not take part: mechanisms, min_cohort."


def test_json_agrees_with_the_text(place):
    code, told = verdicts(place, place / "job.toml")
    assert (code, told["takes_part"], told["job"], told["cost"]) == (0, True, "desk", None)
    policy(place, 'jobs = ["other"]\n')
    code, told = verdicts(place, place / "job.toml")
    assert (code, told["takes_part"], told["policy"]) == (4, False, str(place / "home" / "policy.toml"))
    (refused,) = (verdict for verdict in told["verdicts"] if verdict["outcome"] == "refused")
    assert refused["sentence"] == "jobs: the job's name is desk; the policy allows other"
    assert (refused["rule"], refused["job"], refused["policy"]) == ("jobs", "desk", "other")
    assert refused["reason"] == "job_not_admitted"


def test_a_bundle_or_job_document_settles_more_than_a_job_file(place):
    spec = JobSpec.from_toml(place / "job.toml")
    document = make_job_bundle(spec, place, place / "bundle")
    policy(place, f'base_models = ["{document.weights.hex()}"]\nshared_parameters = ["filters.*"]\n')

    def outcomes(path: Path) -> dict[str, str]:
        return {verdict["rule"]: verdict["outcome"] for verdict in verdicts(place, path)[1]["verdicts"]}

    of_file, of_bundle = outcomes(place / "job.toml"), outcomes(place / "bundle")
    assert (of_file["base_models"], of_file["shared_parameters"]) == ("open", "open")
    assert (of_bundle["base_models"], of_bundle["shared_parameters"]) == ("ok", "refused")
    assert outcomes(place / "bundle" / "job.json") == of_bundle
    (place / "alone").mkdir()
    (place / "alone" / "job.json").write_bytes((place / "bundle" / "job.json").read_bytes())
    assert outcomes(place / "alone" / "job.json")["shared_parameters"] == "open"
    (place / "alone" / "manifest.json").write_text('{"schema": 1, "tensors": [{"name": "a", "shape": [1]}]}')
    code, sentence = run(place, "check", place / "alone")
    assert code == ExitCode.USAGE
    assert "not the manifest" in sentence


def test_the_vocabulary_rule_reads_job_files_and_bundles(place):
    policy(place, 'mechanisms = ["none"]\nvocabularies = ["own"]\n')
    path = job(place, 'name = "none"')
    public = path.read_text()
    make_job_bundle(JobSpec.from_toml(path), place, place / "public")
    # The same words with private rows: the vocabulary is still the operator's.
    path.write_text(public + '[method]\nname = "fedvocab"\n')
    make_job_bundle(JobSpec.from_toml(path), place, place / "private")
    assert (place / "private" / "private.bin").exists()
    for offered in ("job.toml", "public", "private"):
        code, output = run(place, "check", place / offered)
        assert code == ExitCode.REFUSED
        assert "refused  vocabularies: the job's vocabulary is public; the policy allows own; members build" in output
        assert output.splitlines()[-1] == "This member would not take part: vocabularies."
    path.write_text(public.replace('file = "words.txt"\n', "") + '[method]\nname = "fedvocab"\n')
    make_job_bundle(JobSpec.from_toml(path), place, place / "own")
    for offered in ("job.toml", "own"):
        code, output = run(place, "check", place / offered)
        assert code == ExitCode.OK
        assert "ok       vocabularies: the job's vocabulary is own; the policy allows own\n" in output
    assert 'vocabularies = ["own"]\n' in run(place, "show")[1]
    policy(place, "vocabularies = []\n")
    code, sentence = run(place, "show")
    assert code == ExitCode.USAGE
    assert 'vocabularies: is empty, but every job has a vocabulary; write some of "own", "own-from-base"' in sentence


def test_the_authority_rule_uses_the_enrolled_federation(place):
    federation = party.authority().federation.hex()
    policy(place, f'authorities = ["{federation}"]\n')

    def authorities() -> str:
        told = verdicts(place, place / "job.toml")[1]["verdicts"]
        return next(verdict["outcome"] for verdict in told if verdict["rule"] == "authorities")

    assert authorities() == "open"
    party.member_home(place / "home", "localhost:7441")
    assert authorities() == "ok"
    policy(place, f'authorities = ["{"00" * 32}"]\n')
    assert authorities() == "refused"


def test_now_checks_this_machine(place):
    policy(place, "min_free_memory_mib = 1\n")
    assert "open     min_free_memory_mib" in run(place, "check", place / "job.toml")[1]
    code, output = run(place, "check", place / "job.toml", "--now")
    assert code == 0
    assert re.search(
        r"ok +min_free_memory_mib: free memory in MiB is \d+; the policy requires at least 1$", output, re.MULTILINE
    )
    policy(place, "min_free_memory_mib = 1000000000\n")
    assert run(place, "check", place / "job.toml", "--now")[0] == ExitCode.REFUSED
    policy(place, 'devices = ["cuda"]\n')
    assert run(place, "check", place / "job.toml", "--now", "--device", "cuda")[0] == ExitCode.OK
    assert run(place, "check", place / "job.toml", "--now", "--device", "cpu")[0] == ExitCode.REFUSED


def test_now_says_what_keeps_a_member_from_starting(place, monkeypatch):
    policy(place, 'devices = ["cuda"]\n')
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    code, output = run(place, "check", place / "job.toml", "--now")
    assert code == ExitCode.USAGE
    assert "ONEDNN_DEFAULT_FPMATH_MODE=BF16" in output


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("missing.toml", None, "does not exist"),
        ("missing.json", None, "No such file"),
        ("job.toml", "schema = 1\nname = 3\n", "name"),
        ("job.json", "{", "not JSON"),
        (
            "job.toml",
            JOB.format(mechanism=DP_SGD, count=1) + "[aggregation]\nbits = 8\n",
            "aggregation.bits: the sum of",
        ),
    ],
)
def test_an_unreadable_job_exits_with_2(place, name, content, complaint):
    if content is not None:
        (place / name).write_text(content)
    code, sentence = run(place, "check", place / name)
    assert code == ExitCode.USAGE
    assert complaint in sentence


def test_an_unreadable_policy_exits_with_2(place):
    policy(place, "min_cohrt = 3\n")
    for command in (("check", place / "job.toml"), ("show",)):
        code, sentence = run(place, *command)
        assert code == ExitCode.USAGE
        assert "min_cohrt: unknown key" in sentence
    code, sentence = run(place, "show", "--policy", place / "none.toml")
    assert code == ExitCode.USAGE
    assert "does not exist" in sentence


# ---- the cost of a job ----------------------------------------------------------------------------


def test_the_cost_agrees_with_the_gate(place):
    _, told = verdicts(place, place / "job.toml", "--examples", 1000)
    cost, reach = told["cost"], told["outlook"]
    assert (reach["rounds"], reach["possible"], reach["spent_by"], cost["delta"]) == (20, 20, None, 1e-6)
    assert reach["sentence"] == "the budget lets this member take part in all 20 rounds"
    assert 0 < cost["epsilon"] < 8
    # A limit of exactly this epsilon lets all rounds pass; a tenth less does not.
    policy(place, f"epsilon = {cost['epsilon'] * (1 + 1e-9)!r}\n")
    assert verdicts(place, place / "job.toml", "--examples", 1000)[1]["outlook"]["possible"] == 20
    policy(place, f"epsilon = {cost['epsilon'] * 0.9!r}\n")
    code, told = verdicts(place, place / "job.toml", "--examples", 1000)
    assert (code, told["takes_part"]) == (0, True)
    fitting = told["outlook"]["possible"]
    assert 0 < fitting < 20
    for count in range(fitting, 40):
        other = job(place, count=count)
        assert verdicts(place, other, "--examples", 1000)[1]["outlook"]["possible"] == fitting
    job(place)
    assert told["cost"]["epsilon"] == pytest.approx(cost["epsilon"])
    # With fewer examples, each is drawn more often.
    assert verdicts(place, place / "job.toml", "--examples", 100)[1]["cost"]["epsilon"] > cost["epsilon"]


def test_the_cost_that_is_printed_is_no_less_than_the_exact_one(place):
    costs = [verdicts(place, place / "job.toml", "--examples", count)[1]["cost"] for count in (1000, 1100, 1200, 1300)]
    for cost in costs:
        printed = float(re.search("cost an untouched ledger epsilon ([0-9.]+) at", cost["sentence"])[1])
        assert cost["epsilon"] <= printed < 1.01 * cost["epsilon"]
    # Rounding to nearest would print less of one.
    assert any(float(f"{cost['epsilon']:.3g}") < cost["epsilon"] for cost in costs)


METRICS = DP_SGD + "\n\n[metrics]\nnoise_multiplier = 28.0"


def test_the_cost_of_metrics_is_said_as_the_plan_says_it(place):
    bare = verdicts(place, place / "job.toml", "--examples", 1000)[1]["cost"]["epsilon"]
    measured = job(place, METRICS)
    cost = verdicts(place, measured, "--examples", 1000)[1]["cost"]
    assert cost["epsilon"] == bare
    assert cost["sentence"].endswith(f"; {nothing_measured(0)}")
    policy(place, "metrics_epsilon = 1.0\n")
    cost = verdicts(place, measured, "--examples", 1000)[1]["cost"]
    event = protection_of(JobSpec.from_toml(measured), 1000, metrics="add-remove").event
    assert event is not None
    told = cost_of_metrics(event, 20, Limit(1.0, 1e-6), 1.0)
    assert told is not None
    assert (cost["epsilon"], told.without) == pytest.approx((told.together, bare))
    assert cost["sentence"].endswith(f"; {told.sentence}")
    plan = CliRunner().invoke(app_of_everything, ["privacy", "plan", str(measured), "--examples", "1000"])
    assert told.sentence[1:].split(";")[0] in plan.output.replace("\n", " ")


def test_a_budget_too_small_for_one_round_is_a_refusal(place):
    policy(place, "epsilon = 0.01\n")
    code, output = run(place, "check", place / "job.toml", "--examples", 1000)
    assert code == ExitCode.REFUSED
    assert "the budget lets this member take part in 0 of 20 rounds; then epsilon is spent" in output
    assert output.splitlines()[-1] == "This member would not take part: epsilon."
    policy(place, "epsilon_a_job = 0.01\n")
    code, output = run(place, "check", place / "job.toml", "--examples", 1000)
    assert code == ExitCode.REFUSED
    assert "the policy allows 8, 0.01 for a job" in output
    assert output.splitlines()[-1] == "This member would not take part: epsilon_a_job."


def test_a_budget_that_ends_before_the_job_says_in_how_many_rounds(place):
    needed = verdicts(place, place / "job.toml", "--examples", 1000)[1]["cost"]["epsilon"]
    policy(place, f"epsilon = {needed * 0.95!r}\n")
    code, output = run(place, "check", place / "job.toml", "--examples", 1000)
    *_, budget, last = output.splitlines()
    count = verdicts(place, place / "job.toml", "--examples", 1000)[1]["outlook"]["possible"]
    assert (code, 0 < count < 20) == (ExitCode.OK, True)
    assert budget == (
        f"budget   the budget lets this member take part in {count} of 20 rounds; then epsilon is spent, and the job "
        "pauses if fewer than 5 members are left"
    )
    assert last == f"This member would take part in {count} of 20 rounds, as far as can be told here."


def test_what_the_ledger_has_charged_counts(place):
    policy(place, "epsilon = 4.0\n")
    job(place, count=200)
    untouched = verdicts(place, place / "job.toml", "--examples", 1000)[1]["outlook"]
    for name, other in (("data", "another"), ("mine", "desk")):
        path = ledger_path(place / "home", name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with Ledger.open(path, name, Policy(epsilon=4.0).limit()) as ledger:
            for round in (1, 2):
                event = protection_of(document(place), 1000).event
                paid = {"job": other, "round": round, "mechanism": "dp-sgd"}
                digests = dict.fromkeys(("federation", "version", "document", "data"), bytes(32))
                held = ledger.reserve(event, Purpose(**paid, **digests))
                ledger.charge(held.number, round)
    charged = verdicts(place, place / "job.toml", "--examples", 1000)[1]["outlook"]
    mine = verdicts(place, place / "job.toml", "--examples", 1000, "--data-name", "mine")[1]["outlook"]
    # Rounds of another job take from this one's; rounds of this one are rounds of this one.
    assert charged == {**untouched, **charged, "further": untouched["further"] - 2, "paid": 0}
    assert (mine["paid"], mine["further"], mine["possible"]) == (2, untouched["further"] - 2, untouched["possible"])
    assert "of which its ledger has 2" in mine["sentence"]
    # The check changes nothing.
    assert verdicts(place, place / "job.toml", "--examples", 1000)[1]["outlook"] == charged


@pytest.mark.parametrize(
    "name",
    [
        "first-hour/job.toml",
        "first-hour/small.toml",
        "fedvocab.toml",
        "fedprompt.toml",
        "synthesis.toml",
        "assistant.toml",
    ],
)
def test_a_job_file_has_a_cost_before_there_is_a_bundle(place, name):
    """With a frozen or private embedding, or a backbone, a document names files that a job file does not know."""
    _, told = verdicts(place, ROOT / "examples" / name, "--examples", 363)
    spec = JobSpec.from_toml(ROOT / "examples" / name)
    assert ("no epsilon" in told["cost"]["sentence"]) == (spec.mechanism.name == "none")
    assert (told["cost"]["epsilon"] is not None) == (spec.mechanism.name != "none")


def test_an_unknown_cost_says_why(place):
    policy(place, 'mechanisms = ["none", "distributed-gaussian"]\nunit = "member"\n')
    job(place, 'name = "none"')
    code, output = run(place, "check", place / "job.toml", "--examples", 10)
    assert code == ExitCode.OK
    assert "no epsilon: the job adds no noise" in output
    job(place, 'name = "distributed-gaussian"\nnoise_multiplier = 2.0\nunit = "member"')
    assert "make the bundle" in run(place, "check", place / "job.toml", "--examples", 10)[1]
    make_job_bundle(JobSpec.from_toml(place / "job.toml"), place, place / "bundle")
    told = verdicts(place, place / "bundle", "--examples", 10)[1]
    assert told["cost"]["epsilon"] > 0
    assert "every further attempt" in told["cost"]["sentence"]
    policy(place, "own_noise_multiplier = 50.0\n")
    job(place)
    code, told = verdicts(place, place / "job.toml", "--examples", 10)
    assert code == ExitCode.REFUSED
    assert "own_noise_multiplier" in told["cost"]["sentence"]


def test_a_job_by_person_costs_by_persons(place):
    policy(place, 'unit = "person"\nshared_parameters = ["output.*"]\n')
    file = ROOT / "examples" / "mechanisms" / "dp-sgd-by-person.toml"
    code, told = verdicts(place, file, "--persons", 200)
    assert code == ExitCode.OK
    assert "5 rounds with 200 persons cost an untouched ledger epsilon 3.62" in told["cost"]["sentence"]
    assert 3.61 < told["cost"]["epsilon"] <= 3.62
    assert "give --persons N, and this says" in run(place, "check", file)[1]
    code, said = run(place, "check", file, "--examples", 2000)
    assert (code, "give --persons N, how many persons" in said) == (ExitCode.USAGE, True)
    # A ledger of rows has no formula for it, and its policy refuses.
    policy(place, "")
    code, told = verdicts(place, file, "--persons", 200)
    assert code == ExitCode.REFUSED
    assert "the unit of this ledger is one example" in told["cost"]["sentence"]


# ---- show and init --------------------------------------------------------------------------------


def test_show_prints_the_policy_as_an_equivalent_file(place):
    policy(place, 'min_cohort = 7\nhours = ["22:00-06:00"]\npeers.north = "' + "ab" * 32 + '"\n')
    code, output = run(place, "show")
    assert code == 0
    assert str(place / "home" / "policy.toml") in output
    assert Policy.model_validate(tomllib.loads(output)) == Policy.load(place / "home")[0]
    assert all(re.search(rf"^(# )?{key}\b", output, re.MULTILINE) for key in Policy.model_fields if "schema" not in key)
    shown = json.loads(run(place, "show", "--json")[1])
    assert Policy.model_validate(shown["policy"]) == Policy.load(place / "home")[0]
    assert shown["fingerprint"] is None


def test_show_prints_the_fingerprint_that_others_pin(place):
    party.member_home(place / "home", "localhost:7441")
    shown = json.loads(run(place, "show", "--json")[1])
    assert shown["federation"] == party.authority().federation.hex()
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = party.key(2).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert shown["fingerprint"] == fingerprint(key).hex()
    assert shown["fingerprint"] in run(place, "show")[1]


def test_init_writes_the_defaults_and_replaces_only_with_force(place):
    code, output = run(place, "init")
    path = place / "home" / "policy.toml"
    assert code == 0
    assert str(path) in output
    assert Policy.from_toml(path) == Policy()
    path.write_text("schema = 1\nmin_cohort = 9\n")
    code, sentence = run(place, "init")
    assert code == ExitCode.USAGE
    assert "--force" in sentence
    assert Policy.from_toml(path).min_cohort == 9
    assert run(place, "init", "--force", "--json")[0] == 0
    assert Policy.from_toml(path) == Policy()
    assert run(place, "init", "--policy", place / "no" / "policy.toml")[0] == ExitCode.USAGE


def test_each_key_of_the_default_file_can_be_uncommented():
    keys = re.findall(r"^# (\w+) = ", default_file(), re.MULTILINE)
    assert keys == [key for key in Policy.model_fields if key != "schema_version"]
    defaults = Policy()
    for key in keys:
        text = re.sub(rf"^# ({key} = )", r"\1", default_file(), flags=re.MULTILINE)
        changed = Policy.model_validate(tomllib.loads(text))
        example = f"# Not set. For example:\n{key} = " in text
        assert (getattr(changed, key) != getattr(defaults, key)) == example, key


def test_every_key_has_its_meaning_above_it():
    lines = default_file().splitlines()
    for key in Policy.model_fields:
        if key != "schema_version":
            at = next(number for number, line in enumerate(lines) if line.startswith(f"# {key} = "))
            assert len(lines[at - 1]) > 10
    assert all(len(line) <= 112 for line in lines)


def test_check_needs_no_torch_and_help_imports_little(place):
    code = (
        "import sys\n"
        "from edge_client.cli.policy import app\n"
        "assert not {'numpy', 'pydantic', 'cryptography'} & sys.modules.keys()\n"
        f"app(['check', {str(place / 'job.toml')!r}, '--examples', '100', '--now', '--home', {str(place)!r}],"
        " standalone_mode=False)\n"
        # The gate's epsilon is that of a PLD, so scipy and dp_accounting are there.
        "heavy = {'torch', 'opacus', 'transformers'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
