"""A simulated job is the same to the bit for any engine, number of workers, sum and interruption."""

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from coordinator.rounds.in_memory import InMemory
from coordinator.rounds.masked_sum import MaskedSums
from learning.text.examples import Example
from learning.text.turns import Dialogue, Turn
from simulation.engines import NoRoom, WorkersDied, local_engine, ray_engine, room_of
from simulation.preparing import Engines, Shares, dealt, opened, parts_of, prepared
from simulation.simulate import Losses, NotSimulated, Plan, Played
from simulation.trial import Rows, RowsUnfit
from simulation.trying import read_rows
from simulation.virtual_members import Crew
from tacit.job import JobSpec
from tests.support.dying import Dying
from tests.support.dying_member import Killed
from tests.support.tried_jobs import TOML, written_job, written_rows

FEDADAM = TOML + '\n[server]\noptimiser = "fedadam"\nlearning_rate = 0.01\n'
GROUPS = TOML.replace("min_members = 3", "min_members = 12")
GROUPS += "max_attempts = 3\n[aggregation]\ngroups = 3\nmin_groups = 2\nassumed_corrupt = 1\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("simulated"), FEDADAM)


def prepare(folder, toml, **changes):
    file, data = written_job(folder, toml)
    job = JobSpec.from_toml(file)
    rows, test = parts_of(read_rows(data, job, text="text", label="label"), test=0.2, seed=0)
    shares = Shares(**{"kind": "even", "members": 5, **changes})
    return prepared(job, folder, rows, test, shares, folder / "first", seed=0)


def play(made, folder, plan=Plan(seed=3), engines=Engines(), summing=None, rounds=None):  # noqa: B008
    with opened(made, plan, engines, InMemory(), Path(folder), summing=summing) as simulation:
        list(simulation.run(rounds=rounds))
        return [(each.version, each.cohort, each.lost, each.attempts) for each in simulation.played]


@pytest.fixture(scope="module")
def alone(made, tmp_path_factory):
    return play(made, tmp_path_factory.mktemp("alone"))


def test_versions_move_and_another_seed_moves_them_elsewhere(made, alone, tmp_path):
    assert len({version for version, *_ in alone}) == 2
    assert not {version for version, *_ in alone} & {version for version, *_ in play(made, tmp_path, Plan(seed=4))}


def test_a_masked_sum_leaves_out_the_lost(made, tmp_path):
    plan = Plan(seed=3, losses=Losses("fixed", 0.2))
    plain = play(made, tmp_path / "plain", plan)
    assert [lost for _, _, lost, _ in plain] == [1, 1]
    assert play(made, tmp_path / "masked", plan, summing=MaskedSums) == plain


def test_a_simulation_goes_on_where_it_stopped(made, alone, tmp_path):
    first = play(made, tmp_path, rounds=1)
    assert first == alone[:1]
    # A crash cut the next line off, and left a version that no line names.
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "att')
    (tmp_path / "versions" / "2.bin").write_bytes(b"half")
    assert play(made, tmp_path) == alone
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2]


def test_a_server_optimisers_state_goes_on_too(made, alone, tmp_path):
    play(made, tmp_path, rounds=1)
    kept = tmp_path / "versions" / "1.state.npz"
    with np.load(kept) as file:
        assert set(file) == {"momentum", "accumulator"}
    whole = kept.read_bytes()
    for damage in (None, b"", whole[:-40]):
        kept.unlink() if damage is None else kept.write_bytes(damage)
        # With a fresh state the next version would be another one, and nobody would notice.
        with pytest.raises(NotSimulated, match=r"1\.state\.npz is missing or damaged"):
            play(made, tmp_path)
    kept.write_bytes(whole)
    assert play(made, tmp_path) == alone


def test_a_round_without_its_line_is_played_again_from_the_state_before(made, alone, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stops(value):
        if isinstance(value, Played) and value.round == 2:
            # Everything of round 2 is on the disk, but its line.
            raise Stopped
        return asdict(value)

    monkeypatch.setattr("simulation.simulate.asdict", stops)
    with pytest.raises(Stopped):
        play(made, tmp_path)
    monkeypatch.undo()
    assert play(made, tmp_path) == alone


def test_a_group_that_lost_too_many_is_in_no_sum(tmp_path):
    made = prepare(tmp_path / "made", GROUPS, members=12)
    # Three of twelve members are lost. Each group of four needs three members, so two losses in a group cost it all.
    plans = [Plan(seed, losses=Losses("fixed", 0.25)) for seed in (0, 6)]
    found = [play(made, tmp_path / f"{plan.seed}", plan, rounds=1) for plan in plans]
    assert [each[2:] for (each,) in found] == [(5, 1), (3, 1)]
    with pytest.raises(NotSimulated, match=r"so that 0 of 3 groups kept 3 members in the last of 3 attempts"):
        play(made, tmp_path / "none", Plan(losses=Losses("fixed", 0.6)))


def test_private_states_go_on_and_half_a_round_is_forgotten(tmp_path):
    toml = TOML.replace('name = "dp-sgd"', 'name = "none"').split("noise_multiplier")[0]
    toml += '[training]\nlearning_rate = 0.05\n[rounds]\ncount = 2\n[method]\nname = "fedvocab"\n'
    made = prepare(tmp_path, toml)
    whole = play(made, tmp_path / "whole")
    play(made, tmp_path / "parts", rounds=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "parts" / "states").glob("000000/*")}
    assert sorted(before) == ["000001.npz"]
    # A worker trained in the second round before everything stopped.
    (tmp_path / "parts" / "states" / "000000" / "000002.npz").write_bytes(b"of a round that nobody finished")
    assert play(made, tmp_path / "parts") == whole


def test_a_killed_worker_is_replaced(tmp_path):
    with local_engine(Dying, tmp_path, 2) as engine:
        assert list(engine.each("square", [(number,) for number in range(8)])) == [n * n for n in range(8)]
        assert (tmp_path / "died").exists()
        with pytest.raises(WorkersDied, match="use fewer workers"):
            list(engine.each("dies", [()]))
        # The next round begins with workers that died while nobody looked.
        (pid, *_) = engine.each("pid", [()])
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)
        assert list(engine.each("square", [(3,)])) == [9]


def test_workers_have_the_environment_of_the_process_that_asks(tmp_path, monkeypatch):
    for value in ("before", "after"):
        monkeypatch.setenv("TACIT_EXAMPLE", value)
        with local_engine(Dying, tmp_path, 1) as engine:
            assert list(engine.each("variable", [("TACIT_EXAMPLE",)])) == [value]


def test_ctrl_c_waits_for_no_worker(tmp_path):
    with ExitStack() as held:
        # A shell lets what it starts in the background ignore SIGINT.
        held.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        engine = held.enter_context(local_engine(Dying, tmp_path, 1))
        (pid,) = engine.each("pid", [()])
        process = psutil.Process(pid)
        # A terminal sends it to the workers, too.
        process.send_signal(signal.SIGINT)
        assert list(engine.each("pid", [()])) == [pid]
        # It interrupts this process, and then never answers.
        answers = engine.each("interrupts", [()])
        with pytest.raises(KeyboardInterrupt) as pressed:
            next(answers)
        assert held.pop_all().__exit__(pressed.type, pressed.value, pressed.tb) is False
    process.wait(10)


def test_neither_workers_nor_a_killed_one_change_a_version(made, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("simulation.preparing.Worker", Killed)
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "died"))
    assert play(made, tmp_path / "run", engines=Engines(workers=2)) == alone
    assert (tmp_path / "died").exists()


@pytest.mark.long
def test_ray_and_a_killed_actor_change_no_version(made, alone, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("simulation.preparing.Worker", Killed)
    monkeypatch.setenv("KILLED_ONCE", str(tmp_path / "died"))
    assert play(made, tmp_path / "run", engines=Engines("ray", workers=2)) == alone
    assert (tmp_path / "died").exists()


@pytest.mark.long
def test_a_killed_actor_is_replaced_with_the_calls_that_waited_for_it(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    put, sizes = ray.put, []
    monkeypatch.setattr(
        ray, "put", lambda value: sizes.append(len(value) if isinstance(value, bytes) else 0) or put(value)
    )
    with ray_engine(Dying, tmp_path, 2) as engine:
        assert list(engine.each("square", [(number,) for number in range(8)])) == [n * n for n in range(8)]
        assert (tmp_path / "died").exists()
        with pytest.raises(WorkersDied, match="use fewer workers"):
            list(engine.each("dies", [()] * 4))
        assert list(engine.each("square", [(3,)])) == [9]
        # What many calls share, such as a version, goes into the store once, and small things never.
        version = bytes(200_000)
        found = list(engine.each("length", [(version,) for _ in range(6)] + [(b"small",)]))
    assert found == [200_000] * 6 + [5]
    assert sizes == [0, 200_000]


@pytest.mark.parametrize(
    ("nodes", "gpus", "room"),
    [
        ([{"CPU": 4.0}, {"CPU": 1.0, "memory": 9.0}], 0.0, 5),
        ([], 0.0, 0),
        ([{"CPU": 4.0}], 0.5, 0),
        # A share is of one GPU: three shares of 0.6 need three.
        ([{"CPU": 16.0, "GPU": 3.0}], 0.6, 3),
        ([{"CPU": 16.0, "GPU": 1.0}], 0.1, 10),
        ([{"CPU": 2.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 3.0}], 2.0, 3),
    ],
)
def test_room_is_counted_node_by_node(nodes, gpus, room):
    assert room_of(nodes, gpus) == room


@pytest.mark.long
def test_a_ray_cluster_without_room_says_so_and_nobody_waits(tmp_path):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        told = []
        for more, said in (
            ({"workers": 5}, "room for 2 of 5 workers: each needs one CPU, and .* 2 CPUs and 0 GPUs; use --workers 2,"),
            ({"workers": 1, "gpus": 0.5}, "room for 0 of 1 workers: each needs one CPU and 0.5 GPU.*; lower --gpus,"),
        ):
            with pytest.raises(NoRoom, match=said), ray_engine(Dying, tmp_path, report=told.append, **more):
                pytest.fail("nothing can run")
        assert told == []
        (tmp_path / "died").touch()
        # Somebody else's actor has one of the two CPUs.
        other = ray.remote(num_cpus=1)(Dying).remote(tmp_path)
        assert ray.get(other.square.remote(3)) == 9
        with ray_engine(Dying, tmp_path, 2, report=told.append) as engine:
            (sentence,) = told
            assert sentence.startswith("Ray has room for 1 of 2 workers now, each with one CPU, because others use")
            ray.kill(other)
            assert list(engine.each("square", [(number,) for number in range(8)])) == [n * n for n in range(8)]
    finally:
        ray.shutdown()


def test_another_simulation_in_the_folder_is_refused(made, tmp_path):
    play(made, tmp_path, rounds=1)
    with pytest.raises(NotSimulated, match=r"another plan, job\); choose another folder"):
        play(made, tmp_path, Plan(seed=4))
    with pytest.raises(NotSimulated, match=r"another rows\)"):
        play(replace(made, test=made.test[1:]), tmp_path)


def test_a_test_part_needs_two_labels_as_a_whole():
    """A fifth of twenty rows is four, of which each half often has one label."""
    rows = Rows(tuple(Example(row["text"], row["label"]) for row in written_rows(20)))
    told = []
    for seed in range(20):
        try:
            train, test = parts_of(rows, test=0.2, seed=seed)
        except RowsUnfit as error:
            told.append(str(error))
            continue
        assert (len(train.examples), len(test)) == (16, 4)
        assert {each.label for each in test} == {"day", "night"}
        assert not set(train.examples) & set(test)
    assert len(told) <= 4
    assert all("the test part would have 4 of them" in each for each in told)


def test_a_dialogue_that_changed_beside_a_text_is_another_simulation(made, tmp_path):
    def with_turns(*turns):
        first, *rest = made.members[0]
        told = replace(first, dialogue=Dialogue(tuple(Turn("user", turn) for turn in turns)))
        return replace(made, members=((told, *rest), *made.members[1:]))

    play(with_turns("who is", "it"), tmp_path, rounds=1)
    assert len(play(with_turns("who is", "it"), tmp_path, rounds=1)) == 1
    for other in (("who is", "he"), ("who", "is it"), ("who is\nit",)):
        with pytest.raises(NotSimulated, match=r"another rows\)"):
            play(with_turns(*other), tmp_path, rounds=1)


def test_the_protocol_is_refused_for_groups_before_anything_is_played(tmp_path):
    grouped = prepare(tmp_path, GROUPS, members=12)
    made: list[int] = []
    with pytest.raises(NotSimulated, match="this job is in groups; leave the option out"):
        play(grouped, tmp_path / "out", summing=made.append)
    assert made == []
    assert len(play(grouped, tmp_path / "out", rounds=1)) == 1


def test_a_damaged_version_is_refused(made, tmp_path):
    play(made, tmp_path, rounds=1)
    (tmp_path / "versions" / "1.bin").write_bytes(bytes(4))
    with pytest.raises(NotSimulated, match=r"1\.bin is damaged"):
        play(made, tmp_path)


def test_too_many_losses_end_with_a_sentence(made, tmp_path):
    with pytest.raises(NotSimulated, match=r"round 1: 4 of 5 members were lost in the last of 3 attempts"):
        play(made, tmp_path, Plan(losses=Losses("fixed", 0.8)))


@pytest.mark.parametrize("text", ["random", "random:1", "random:-0.1", "none:0.1", "often:0.1", "random:x"])
def test_losses_that_cannot_be_read(text):
    with pytest.raises(NotSimulated, match=r"write none, random:0\.1 or fixed:0\.1"):
        Losses.read(text)


@pytest.mark.parametrize("text", ["ratios", "ratios:a", "even:3", "labels"])
def test_partitions_that_cannot_be_read(text):
    with pytest.raises(NotSimulated, match="is no partition"):
        Shares.read(text, 3, 1.0)


def test_every_partition_deals_all_rows(made):
    rows = tuple(row for part in made.members for row in part)
    column = tuple(str(number % 4) for number in range(len(rows)))
    for text, sizes in (("even", 5), ("label", 5), ("quantity", 5), ("ratios:1,2,3", 3), ("column", 4)):
        found = dealt(Rows(rows, column), Shares.read(text, 5, 1.0), 0)
        assert len(found) == sizes
        assert sum(map(len, found)) == len(rows)


def test_a_job_that_protects_persons_is_not_played_as_one_that_protects_rows(tmp_path):
    file, data = written_job(tmp_path)
    job = JobSpec.from_toml(file)
    job = job.model_copy(update={"mechanism": job.mechanism.model_copy(update={"unit": "person"})})
    rows, test = parts_of(read_rows(data, job, text="text", label="label"), test=0.2, seed=0)
    with pytest.raises(NotSimulated, match="the rows do not say whose they are"):
        prepared(job, tmp_path, rows, test, Shares(), tmp_path / "out", seed=0)


def test_a_changed_job_does_not_go_on_in_an_old_folder(tmp_path):
    prepare(tmp_path, TOML)
    prepare(tmp_path, TOML)
    with pytest.raises(NotSimulated, match="before it was changed"):
        prepare(tmp_path, TOML.replace("learning_rate = 2.0", "learning_rate = 1.0"))


def test_a_changed_word_list_does_not_go_on_in_an_old_folder(tmp_path):
    """Its bundle would have the words of before, without a word about it."""
    file, data = written_job(tmp_path)
    job = JobSpec.from_toml(file)
    rows, test = parts_of(read_rows(data, job, text="text", label="label"), test=0.2, seed=0)
    given = job, tmp_path, rows, test, Shares(members=5), tmp_path / "first"
    prepared(*given, seed=0)
    words = tmp_path / "words.txt"
    before = words.read_bytes()
    words.write_bytes(before + b"more\n")
    with pytest.raises(NotSimulated, match="or a file that it names"):
        prepared(*given, seed=0)
    words.write_bytes(before)
    prepared(*given, seed=0)


@pytest.mark.parametrize(
    ("engines", "says"),
    [
        (Engines("Ray", 2), "'Ray' is no engine; write local or ray"),
        # As if it were not installed. Nothing is released, so an index would install a stranger's package.
        (Engines("ray", 2), r"Ray is not installed; `.* '\.\[ray\]'` in Tacit's source folder, or use --engine local"),
    ],
)
def test_an_engine_that_cannot_be_used(engines, says, made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=says):
        play(made, tmp_path, engines=engines)


def test_two_processes_at_once_do_not_mix_their_rounds(made, alone, tmp_path):
    taken = r"another simulation runs in .*; wait until it ends, or choose another folder"
    with opened(made, Plan(seed=3), Engines(), InMemory(), tmp_path) as simulation:
        next(simulation.run())
        with pytest.raises(NotSimulated, match=taken):
            play(made, tmp_path)
        with pytest.raises(NotSimulated, match=taken):
            prepare_in(tmp_path)
    assert play(made, tmp_path) == alone


def prepare_in(folder):
    file, data = written_job(folder, FEDADAM)
    job = JobSpec.from_toml(file)
    rows = read_rows(data, job, text="text", label="label")
    prepared(job, folder, rows, rows.examples[:5], Shares(), folder, seed=0)


def test_a_killed_simulation_leaves_no_lock(made, alone, tmp_path):
    # Another process takes the lock as a simulation does, and is killed while it has it.
    words = "import sys; from pathlib import Path; from simulation.preparing import _alone\n"
    words += "with _alone(Path(sys.argv[1])): print('has it', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", words, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"has it\n"
        with pytest.raises(NotSimulated, match="another simulation runs in"):
            play(made, tmp_path)
        other.kill()
    assert play(made, tmp_path) == alone


def test_vectors_are_added_by_workers_and_the_share_of_one_is_bounded(monkeypatch):
    calls = []

    class Watching:
        workers, shares = 2, 8

        def each(self, what, given):
            calls.append((what, [places for places, *_ in given]))
            for places, *_ in given:
                sent = np.full(3, sum(places), np.uint32)
                sent.flags.writeable = False
                yield sent

    crew = Crew(None, Watching())
    assert crew.train_sum(range(20), 1, b"", 20).tolist() == [190] * 3
    assert crew.train_sum([7], 1, b"", 1).tolist() == [7] * 3
    assert crew.train_sum(range(5000), 1, b"", 5000).tolist() == [5000 * 4999 // 2] * 3
    assert [what for what, _ in calls] == ["train_sum"] * 3
    (_, few), (_, one), (_, many) = calls
    assert [list(each) for each in few] == [[2 * at, 2 * at + 1] for at in range(10)]
    assert [list(each) for each in one] == [[7]]
    assert max(map(len, many)) == 64
    assert [place for each in many for place in each] == list(range(5000))
