"""[server] in a job: published defaults, and keys that an optimiser does not use."""

import json

import pytest
from pydantic import ValidationError

from tacit.documents import DocumentInvalid
from tacit.job import JobDocument, JobSpec
from tacit.server_optimiser import (
    FedAdagradServer,
    FedAdamServer,
    FedAvgMServer,
    FedAvgServer,
    FedYogiServer,
)
from tests.support.fleet import job_document


def a_job(server):
    return JobDocument.model_validate(job_document().model_dump() | {"server": server})


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fedavg", FedAvgServer(learning_rate=1.0)),
        ("fedavgm", FedAvgMServer(learning_rate=1.0, momentum=0.9)),
        ("fedadagrad", FedAdagradServer(learning_rate=0.01, beta_1=0.0, tau=1e-3)),
        ("fedadam", FedAdamServer(learning_rate=0.01, beta_1=0.9, beta_2=0.99, tau=1e-3)),
        ("fedyogi", FedYogiServer(learning_rate=0.01, beta_1=0.9, beta_2=0.99, tau=1e-3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_optimisers_defaults_are_published_and_in_the_document(word, said):
    assert a_job(word) == a_job({"optimiser": word}) == a_job(said)
    job = a_job(word)
    assert job.server == said
    written = json.loads(job.canonical())["server"]
    assert written.keys() == type(said).model_fields.keys()
    assert written["optimiser"] == word
    assert JobDocument.from_json(job.canonical()) == job
    assert (job.digest() == job_document().digest()) == (word == "fedavg")
    if word not in ("fedavg", "fedavgm"):
        assert job.server.first_accumulator == 1e-6


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"momentum": 0.9}, "fedavg has no such key (fedavgm has)"),
        ({"optimiser": "fedavgm", "beta_1": 0.9}, "fedavgm has no such key (fedadagrad, fedadam, fedyogi have)"),
        ({"optimiser": "fedadagrad", "beta_2": 0.99}, "fedadagrad has no such key (fedadam, fedyogi have)"),
        ({"optimiser": "fedadam", "momentum": 0.9}, "fedadam has no such key (fedavgm has)"),
        (
            {"optimiser": "fedyogi", "taau": 1e-3},
            'fedyogi has no such key; check its spelling, or optimiser = "fedyogi"',
        ),
        ({"optimiser": "adam"}, "'adam' is not one of fedavg, fedavgm, fedadagrad, fedadam, fedyogi"),
        (
            {"optimiser": "fedadam", "tau": 0.01, "initial_accumulator": 1e-6},
            "initial_accumulator: must be at least tau squared",
        ),
        ({"optimiser": "fedadam", "beta_2": 1.0}, "must be below 1"),
        ({"optimiser": "fedadam", "tau": 0.0}, "tau"),
        ({"optimiser": "fedavgm", "momentum": 1.0}, "must be below 1"),
        ({"learning_rate": 0}, "must be above 0"),
        ({"name": "fedavg"}, "fedavg has no such key"),
        ("fedsgd", "'fedsgd' is not one of"),
    ],
    ids=str,
)
def test_keys_that_do_not_fit_together_are_refused_with_the_reason(table, says):
    with pytest.raises(ValidationError) as refused:
        a_job(table)
    assert says in str(refused.value)


def test_an_accumulator_may_start_higher_and_is_tau_squared_to_a_decimal():
    assert a_job({"optimiser": "fedadam", "initial_accumulator": 0.1}).server.first_accumulator == 0.1
    # 0.07 squared is 0.0049000000000000007 as a float.
    assert a_job({"optimiser": "fedyogi", "tau": 0.07, "initial_accumulator": 0.0049}).server.tau == 0.07


def test_an_optimiser_is_a_word_or_a_table(tmp_path):
    head = 'schema = 1\nname = "desk"\nlabels = ["a", "b"]\n'
    tail = '[vocabulary]\nkind = "words"\nfile = "words.txt"\n'
    path = tmp_path / "job.toml"
    path.write_text(head + 'server = "fedyogi"\n' + tail)
    assert JobSpec.from_toml(path).server == FedYogiServer()
    path.write_text(head + tail + '[server]\noptimiser = "fedavgm"\nlearning_rate = 0.3\n')
    assert JobSpec.from_toml(path).server == FedAvgMServer(learning_rate=0.3)
    path.write_text(head + tail + "[server]\nlearning_rate = 0.3\n")
    assert JobSpec.from_toml(path).server == FedAvgServer(learning_rate=0.3)
    path.write_text(head + tail + '[server]\noptimiser = "fedadam"\nmomentum = 0.3\n')
    with pytest.raises(DocumentInvalid, match=r"server\.momentum: fedadam has no such key"):
        JobSpec.from_toml(path)
