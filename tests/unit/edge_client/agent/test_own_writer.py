"""Tests of `edge_client export` and `edge_client evaluate` of a model that writes, as whole commands.

Its template has no turns of a system, so that a row with one makes no row, as in training.
"""

import json

import pytest

from export.generating import Generator
from tacit.job import JobSpec
from tests.support.tiny_writers import saved_writer
from toolkit.console import CommandFailed, ExitCode

TEMPLATE = {
    "user": {"before": "{<|im_start|>}user\n", "after": "{<|im_end|>}\n"},
    "assistant": {"before": "{<|im_start|>}assistant\n", "after": "\n"},
    "end": "<|im_end|>",
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Is the food good?"}
ASSISTANT = {"role": "assistant", "content": "The food is good."}
READ = [{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}]
# By a role that the template lacks, and without a response.
UNREAD = [{"messages": [SYSTEM, USER, ASSISTANT]}, {"messages": [USER]}]


@pytest.fixture(scope="module")
def writer(served, tmp_path_factory):
    """The name of a job that the coordinator serves."""
    folder = tmp_path_factory.mktemp("writer")
    saved_writer(folder / "base")
    task = {"name": "generate", "template": TEMPLATE, "max_new_tokens": 8}
    model = {"architecture": "prompted", "base": "base", "max_tokens": 64, "injection": "lora", "task": task}
    served[0].add(JobSpec(name="writer", model=model, seed=3), folder)
    return "writer"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def told(said):
    """What `--json` prints, after what this process logs."""
    return json.loads(said.splitlines()[-1])


def test_an_export_is_compared_on_rows_that_the_model_reads(machine, town, writer):
    # More than are compared.
    write(machine.data, [*UNREAD * 40, *READ])
    said, _ = machine.export(writer, "--json")
    assert told(said)["max_difference"] < 1e-3
    generator = Generator.load(machine.out, threads=1)
    assert (generator.facts.job, generator.facts.texts) == (writer, len(READ))


def test_a_measurement_counts_rows_that_the_model_does_not_read(machine, town, writer):
    write(machine.data, READ)
    test = machine.data.with_name("test.jsonl")
    found = []
    for rows in (READ, [*UNREAD * 10, *READ]):
        write(test, rows)
        said, _ = machine.command("evaluate", writer, "--test", test, "--generate", "--json")
        found.append(told(said))
    assert [each["unusable_rows"] for each in found] == [0, 20]
    for key in ("loss", "loss_interval", "examples", "greedy", "sampled"):
        assert found[0][key] == found[1][key], key


def test_without_a_row_that_the_model_reads_a_command_says_what_to_give(machine, town, writer):
    write(machine.data, UNREAD)
    code, sentence = machine.refused(writer)
    assert code == ExitCode.USAGE
    assert "no row is a dialogue with a response, and with turns of user, assistant only; give rows" in sentence
    with pytest.raises(CommandFailed, match=r"rows.jsonl: no row is a dialogue with a response") as refused:
        machine.command("evaluate", writer, "--test", machine.data)
    assert refused.value.code == ExitCode.USAGE
