"""`coordinator job try` as an operator runs it: real processes train in the pool, and the tuned job makes a bundle."""

import json

from tacit.job import JobSpec
from tests.support.processes import command, succeed
from tests.support.tried_jobs import written_job


def test_an_operator_tries_a_job_and_bundles_what_it_wrote(tmp_path):
    job, data = written_job(tmp_path)
    words = ("coordinator", "job", "try", job, "--data", data, "--rows", "public", "--column", "site")
    limits = ("--epsilon", "50", "--minutes", "30", "--cores", "2", "--no-search")
    found = json.loads(succeed(*words, *limits, "--json"))
    assert found["rows"] == {"training": 72, "validation": 24, "test": 24}
    assert sum(found["members"]) == 72
    assert len(found["members"]) == 3
    assert {each["origin"]: each["seeds"] for each in found["tried"]} == {"as written": 2, "suggested": 2}
    majority, counts = found["baselines"]
    assert majority["validation"] <= 0.7
    assert counts["validation"] >= 0.9
    # One word of each text decides, so that a job with this little noise learns it.
    assert found["verdicts"][-1]["at_chance"] is False, found["verdicts"]
    tuned = job.with_name("job.tuned.toml")
    assert JobSpec.from_toml(tuned).labels == ("day", "night")
    assert "# Found by the operator." in tuned.read_text()
    said = succeed("coordinator", "job", "bundle", tuned, "--out", tmp_path / "bundle")
    assert "Expected noise to signal" in said
    planned = succeed("edge_client", "privacy", "plan", tuned, "--examples", "24", "--epsilon", "50")
    assert "Expected noise to signal" in planned


def test_a_refusal_ends_with_its_code(tmp_path):
    job, data = written_job(tmp_path)
    done = command("coordinator", "job", "try", job, "--data", data, "--rows", "own-private", "--members", "3")
    assert done.returncode == 4
    assert "private rows are refused" in done.stderr
