"""`import tacit` is light, and offers what the commands do."""

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pandas
import pytest
import torch

import tacit
from learning.text.data import read_data
from learning.text.examples import DataInvalid
from learning.text.turns import Dialogue
from tacit.job import JobSpec
from tacit_api.jobs import read_job
from tacit_api.rows import rows_of
from tacit_api.torch_threads import threads_kept
from tests.support.tiny_models import saved
from tests.support.tried_jobs import DIVERGES, TOML, written_job, written_rows


def test_import_loads_nothing_heavy():
    """What makes it light, and not how many milliseconds it takes here."""
    script = "import sys, tacit; print(sorted({'torch','numpy','pandas','pydantic','grpc','typer'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("call", ["Member.enrol(home, 'token')", "Member(home).run([('a', 'b')], ledger='own')"])
def test_a_member_turns_tls_12_off_before_grpc_is_imported(call, tmp_path):
    """gRPC reads the setting when it is imported, which this process has done."""
    script = (
        "import sys, tacit, toolkit.tls\nfrom toolkit.console import CommandFailed\n"
        f"home = {str(tmp_path / 'home')!r}\n"
        f"try: tacit.{call}\nexcept CommandFailed: print('grpc' in sys.modules, toolkit.tls._set_in_time)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "True"]


def test_unknown_names_are_refused():
    assert {"simulate", "load"} <= set(dir(tacit))
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        getattr(tacit, "simulat")  # noqa: B009  a name that mypy would refuse


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interface")
    file, _ = written_job(folder, TOML.replace('optimiser = "sgd"\nlearning_rate = 2.0', "learning_rate = 0.05"))
    seen = []
    rows = pandas.DataFrame(written_rows(120))
    return tacit.simulate(file, rows, members=3, partition="column", column="site", progress=seen.append), seen


def test_the_last_one_to_end_gives_torchs_threads_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_kept():
            torch.set_num_threads(1)
            with threads_kept():
                pass
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_simulation_leaves_torchs_threads_as_they_were(tmp_path):
    """Its members train with one thread. Also if it fails."""
    file, _ = written_job(tmp_path)
    rows, before = written_rows(60), torch.get_num_threads()
    seen = []

    def fails(_):
        seen.append(torch.get_num_threads())
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            tacit.simulate(file, rows, members=3, progress=fails)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_loading_without_onnxruntime_names_the_extra(found, tmp_path, monkeypatch):
    result, _ = found
    model = result.export(tmp_path / "model")
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"tacit\.load needs onnxruntime, .*'\.\[notebook\]'"):
        tacit.load(model)
    monkeypatch.undo()
    assert tacit.load(model).predict(["sun"])


def test_a_data_frame_becomes_rounds_a_history_and_a_plot(found, tmp_path):
    result, seen = found
    assert [each.round for each in result.rounds] == [each.round for each in seen] == [1, 2]
    assert len(result.members) == 3
    assert list(result.history.index) == [1, 2]
    assert result.history.accuracy.iloc[-1] == result.accuracy
    result.plot(tmp_path / "rounds.svg")
    assert b"accuracy, %" in (tmp_path / "rounds.svg").read_bytes() or (tmp_path / "rounds.svg").stat().st_size > 5000
    moved = [np.linalg.norm(result.version(number) - result.version(number - 1)) for number in (1, 2)]
    assert np.allclose(moved, result.history.change)
    with pytest.raises(ValueError, match="there is no version 3; the last is 2"):
        result.version(3)


def test_a_version_leaves_as_onnx_and_is_loaded(found, tmp_path):
    folder = found[0].export(tmp_path / "model")
    card = (folder / "README.md").read_text()
    assert "| version | 2, `" in card
    assert "| rounds | 2 of 2 |" in card
    assert "A simulation of the job" in card
    model = tacit.load(folder)
    assert model.labels == ("day", "night")
    (answer,) = model.predict(["the sun was bright"])
    assert answer.label in ("day", "night")
    assert sum(answer.probabilities.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([{"text": "the sun"}], r"row 1: no column 'label'; there are: text. Name yours with label="),
        ([("the sun", "day"), ("", "night")], "row 2: no text in column 'text'"),
        ([("the sun", "day", 3)], "tuple is no row"),
        (7, "int is no data"),
        (1, "int is no data"),
        ([], "there are no rows"),
        # What pandas makes of a missing label, and of whole numbers beside one.
        (pandas.DataFrame({"text": ["a", "b"], "label": ["day", None]}), "row 2: no label in column 'label'"),
        (pandas.DataFrame({"text": ["a", "b"], "label": [1, None]}), "row 1: no label in column 'label'; it must be"),
        ([("the sun", True)], "row 1: no label"),
        ([("half \ud800", "day")], "row 1: half of a surrogate pair"),
        (pandas.DataFrame([["a", "b", "day"]], columns=["text", "text", "label"]), "two columns of the data frame"),
    ],
)
def test_rows_that_cannot_be_used(data, says):
    with pytest.raises(DataInvalid, match=says):
        rows_of(data, text="text", label="label")


def test_a_row_without_its_members_column_names_that_argument():
    rows = [{"text": "the sun", "label": "day", "site": "north"}, {"text": "the moon", "label": "night"}]
    with pytest.raises(DataInvalid, match=r"row 2: no column 'site'; .* Name yours with column="):
        rows_of(rows, text="text", label="label", column="site")


def test_a_frame_from_parquet_has_dialogues(tmp_path):
    """pandas reads a column of lists as arrays."""
    turns = [{"role": "user", "content": "Is it late?"}, {"role": "assistant", "content": "It is."}]
    pandas.DataFrame({"messages": [turns, turns]}).to_parquet(tmp_path / "rows.parquet")
    rows = rows_of(pandas.read_parquet(tmp_path / "rows.parquet"), text="text", label=None).examples
    assert [each.dialogue for each in rows] == [Dialogue.of("Is it late?", "It is.")] * 2


def test_a_version_that_is_no_whole_model_is_not_exported(tmp_path):
    plain = DIVERGES.replace("learning_rate = 1000\nepochs = 30", "learning_rate = 0.05")
    file, _ = written_job(tmp_path, plain + '[method]\nname = "lg-fedavg"\n')
    simulated = tacit.simulate(file, written_rows(60), members=3)
    with pytest.raises(ValueError, match=r"members of job tried keep a part of the model \(lg-fedavg\)"):
        simulated.export(tmp_path / "model")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"q": "Is it late?", "a": "It is."}, {"prompt": "q", "response": "a"}),
        (
            {"talk": [{"role": "user", "content": "Is it late?"}, {"role": "assistant", "content": "It is."}]},
            {"messages": "talk"},
        ),
        ({"prompt": "Is it late?", "response": "It is."}, {}),
    ],
)
def test_a_member_has_dialogues_in_memory(row, columns, monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr("edge_client.agent.runner.run_member", lambda options, **_: taken.append(options))
    tacit.Member(tmp_path).run(pandas.DataFrame([row]), ledger="own", **columns)
    tacit.Member(tmp_path).start([row], ledger="own", **columns).wait()
    assert [[each.dialogue for each in options.rows] for options in taken] == [
        [Dialogue.of("Is it late?", "It is.")]
    ] * 2
    assert all({name: getattr(options, name) for name in columns} == columns for options in taken)


def test_a_member_without_texts_or_dialogues_learns_which_columns_to_name(tmp_path):
    with pytest.raises(
        DataInvalid,
        match=r"row 1: no column 'text', 'prompt' or 'messages'.*with prompt= and response=, or with messages=",
    ) as failed:
        tacit.Member(tmp_path).run([{"q": "Is it late?", "a": "It is."}], ledger="own")
    assert "--" not in str(failed.value)


def test_a_frame_that_is_not_pandas_is_refused():
    """Of polars, which the tests do not install: names of columns are a list, and iteration gives columns."""

    class DataFrame:
        columns: ClassVar = ["text", "label"]

        def to_dict(self):
            pytest.fail("it gives columns")

    DataFrame.__module__ = "polars.dataframe.frame"
    says = r"a DataFrame of polars is not read; give its rows \(in polars: frame.to_dicts\(\)\), or a pandas DataFrame"
    with pytest.raises(DataInvalid, match=says):
        rows_of(DataFrame(), text="text", label="label")


def test_rows_in_memory_are_those_of_a_file(tmp_path):
    """Otherwise a member's ledger would take them for other rows, and count nothing of what they have spent."""
    frame = pandas.DataFrame(
        {"text": ["a sun", "b moon "], "label": [" day", "night"], "n": [1, 2], "who": ["e\u0301", "x"]}
    )
    frame.to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    for label in ("label", "n"):
        held = rows_of(frame, text="text", label=label, person="who").examples
        assert list(held) == read_data(tmp_path / "rows.jsonl", label=label, person="who").examples


def test_a_members_rows_are_not_simulated(tmp_path):
    for folder in ("identity", "ledgers"):
        (tmp_path / "home" / folder).mkdir(parents=True)
    rows = tmp_path / "home" / "rows.jsonl"
    rows.write_text("")
    file, _ = written_job(tmp_path)
    with pytest.raises(ValueError, match="lies in a member's home"):
        tacit.simulate(file, rows)
    with pytest.raises(ValueError, match="lies in a member's home"):
        tacit.simulate(file, [("a", "day")], test=rows)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan"), 1.5])
def test_a_share_that_leaves_nothing_is_refused(share, tmp_path):
    with pytest.raises(ValueError, match="is no share of the rows; give one from"):
        tacit.simulate(written_job(tmp_path)[0], [("a", "day"), ("b", "night")], test=share)


@pytest.mark.parametrize("given", [{"partition": "column"}, {"column": "site"}], ids=str)
def test_a_partition_by_a_column_and_its_column_go_together(given, tmp_path):
    with pytest.raises(ValueError, match='partition="column" and column="NAME" go together'):
        tacit.simulate(written_job(tmp_path)[0], written_rows(60), members=3, **given)


@pytest.mark.parametrize("where", ["data", "test"])
def test_pairs_without_a_second_text_are_refused(where, tmp_path):
    saved(tmp_path / "base", "bert")
    head = {"name": "head", "pairs": True}
    model = {"architecture": "prompted", "base": "base", "injection": "none", "task": head, "max_tokens": 16}
    job = JobSpec.model_validate({"name": "pairs", "labels": ["day", "night"], "model": model})
    whole = [{**row, "text_b": "and then"} for row in written_rows(60)]
    lacking = [*whole[:-1], {"text": "the sun", "label": "day"}]
    data, test = (lacking, whole) if where == "data" else (whole, lacking)
    with pytest.raises(ValueError, match="the job reads pairs of texts, and 1 of 120 rows have no second text"):
        tacit.simulate(job, data, test=test, members=3)


def test_a_closed_coordinator_says_so(tmp_path):
    (tmp_path / "operator.toml").touch()
    coordinator = tacit.Coordinator(tmp_path)
    coordinator.close()
    coordinator.close()
    with pytest.raises(RuntimeError, match="this Coordinator is closed; make another one"):
        coordinator.status()


def test_a_change_that_there_is_not_is_a_sentence(tmp_path):
    (tmp_path / "operator.toml").touch()
    with (
        tacit.Coordinator(tmp_path) as coordinator,
        pytest.raises(ValueError, match="'stop' is no change of a job; give"),
    ):
        coordinator.change("desk", "stop")


def test_the_readme_of_simulate_runs(tmp_path, monkeypatch):
    """The docstring's example, as somebody types it."""
    import doctest

    import tacit_api.simulating as module

    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("the\nsun\nmoon\nrose\nover\nhill\n")
    done = doctest.testmod(module, raise_on_error=False)
    assert done.attempted >= 4
    assert done.failed == 0


def test_a_job_may_be_a_mapping(tmp_path, monkeypatch):
    spec = JobSpec.from_toml(written_job(tmp_path)[0])
    assert read_job(spec.model_dump(mode="json", exclude_none=True))[0] == spec
    with pytest.raises(ValueError, match="the job is not valid: labels"):
        read_job({"schema": 1, "name": "sky"})
