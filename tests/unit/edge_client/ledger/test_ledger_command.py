"""`edge_client ledger`: what people and scripts see, and the exit codes."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.operations.ledger_faults import EVENT, LIMIT, Member, purpose_of, receipt_of
from edge_client.cli.ledger import app
from edge_client.ledger.ledger import Ledger, ledger_path
from edge_client.ledger.receipt_book import ReceiptBook
from learning.accounting.gate import epsilon_counted
from tacit.rounding import percent_left, rounded_up
from tests.support import party
from toolkit.console import CommandFailed, ExitCode


@pytest.fixture(scope="session")
def signer(tmp_path_factory):
    return party.member(tmp_path_factory.mktemp("north") / "home", "localhost:7441")


@pytest.fixture
def home(tmp_path, signer):
    """A home with two releases of one job, one of another, one reservation, and two receipts."""
    member = Member(signer.member, signer.key, signer.certificate, signer.root_pem, signer.federation)
    home = tmp_path / "home"
    with Ledger.open(ledger_path(home, "data"), "data", LIMIT, monthly=2.0) as ledger:
        book = ReceiptBook(home / "receipts")
        for job, round_ in (("desk", 1), ("desk", 2), ("ward", 1)):
            held = ledger.reserve(EVENT, purpose_of(member, job, round_))
            ledger.charge(held.number, round_)
            ledger.settle(held.number, round_, "published", b"")
            if job == "desk":
                receipt = receipt_of(ledger, held, round_, member)
                moment = int(party.present().timestamp() * 1000) + 1000
                book.write(receipt.model_copy(update={"at_ms": moment}), signer, ledger)
        ledger.reserve(EVENT, purpose_of(member, "ward", 2))
    return home


def ended(*words: object) -> tuple[int, str]:
    """Runs a command line; returns its exit code and what it printed."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})
    if isinstance(result.exception, CommandFailed):
        return int(result.exception.code), result.exception.sentence
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def counted(events: int) -> float:
    return epsilon_counted([EVENT] * events, LIMIT)


def test_show_prints_what_each_job_spent(home):
    code, shown = ended("show", "--home", home)
    assert code == 0
    assert f"epsilon {LIMIT.epsilon:g} at delta 1e-05, add-remove, one example" in shown
    # One epsilon, as the gate counts, and the share left in the same unit.
    spent, alone = counted(4), counted(2)
    up, whole, month = rounded_up(spent), percent_left(1 - spent / LIMIT.epsilon), percent_left(1 - spent / 2)
    assert f"epsilon {up:g} of {LIMIT.epsilon:g} at delta 1e-05; {whole} left" in shown
    assert f"epsilon {up:g} of 2; {month} left" in shown
    # Rounding to nearest would state less.
    assert f"{spent:.3g}" not in shown or float(f"{spent:.3g}") >= spent
    assert "3 charged, 1 reserved, 2 receipts" in shown
    assert all(word in shown for word in ("desk", "ward", f"{rounded_up(alone):g}"))
    assert not any(word in shown for word in ("PLD", "Rényi", "gate"))


def test_json_has_one_epsilon_each(home):
    code, shown = ended("show", "--home", home, "--json")
    assert code == 0
    found = json.loads(shown)
    assert found["spent"] == {"epsilon": pytest.approx(counted(4))}
    assert found["month"] == {"month": found["month"]["month"], "limit": 2.0, "epsilon": pytest.approx(counted(4))}
    assert found["jobs"] == [
        {"job": job, "releases": 2, "epsilon_alone": pytest.approx(counted(2))} for job in ("desk", "ward")
    ]
    assert found["share_left"] == pytest.approx(1 - counted(4) / 2)
    assert (found["charged"], found["reserved"], found["receipts"], found["records"]) == (3, 1, 2, 13)


def test_a_ledger_without_a_record_hides_no_other(home):
    """A process that is killed at its first start leaves an empty file."""
    ledger_path(home, "later").touch()
    code, shown = ended("show", "--home", home)
    assert code == 0
    assert "3 charged, 1 reserved" in shown
    assert "later: no record yet" in shown
    code, shown = ended("show", "--home", home, "--json")
    assert code == 0
    assert [json.loads(line)["records"] for line in shown.splitlines()] == [13, 0]
    code, out = ended("verify", "--home", home)
    assert code == 0
    assert "sound; 13 records, 2 receipts" in out
    assert "later.db: no record yet" in " ".join(out.split())


def test_a_ledger_that_was_cut_to_nothing_is_not_one_that_never_began(home):
    """Its pin knows how far it was."""
    path = ledger_path(home, "data")
    for each in path.parent.glob(f"{path.name}*"):
        each.write_bytes(b"")
    code, shown = ended("show", "--home", home)
    assert code == ExitCode.FAILED
    assert f"{path} holds no record, but it had 13 when it was last used" in " ".join(shown.split())
    code, out = ended("verify", "--home", home)
    assert code == ExitCode.FAILED
    assert f"pin: {path} holds no record, but it had 13 when it was last used" in " ".join(out.split())


def test_a_ledger_in_use_can_be_shown_and_verified(home):
    with Ledger.open(ledger_path(home, "data"), "data", LIMIT, monthly=2.0) as ledger:
        ledger.recover()
        assert ended("verify", "--home", home)[0] == 0
        code, shown = ended("show", "--home", home)
        assert code == 0
        assert "3 charged, 0 reserved" in shown


def test_verify_exits_with_1_and_prints_a_line_for_each_problem(home):
    code, out = ended("verify", "--home", home)
    assert code == ExitCode.OK
    assert "sound; 13 records, 2 receipts" in out
    assert "note: reservation 13: reserved" in out
    (home / "receipts" / "desk" / "1.1.json").unlink()
    (home / "receipts" / "desk" / "2.2.sig").write_bytes(b"x")
    code, out = ended("verify", "--home", home)
    assert code == ExitCode.FAILED
    problems = [line for line in out.splitlines() if line.startswith("receipt ")]
    assert [line.split(" (")[0] for line in problems] == ["receipt desk/1.1", "receipt desk/2.2"]
    assert out.splitlines()[-1].endswith("2 problems")
    code, out = ended("verify", "--home", home, "--json")
    assert code == ExitCode.FAILED
    found = json.loads(out)
    assert not found["sound"]
    assert len(found["problems"]) == 2


def test_a_kept_head_reveals_a_tail_cut_off_together_with_its_pin(home, tmp_path):
    """`verify` alone calls this sound, because the chain and its pin go back together."""
    code, out = ended("verify", "--home", home)
    assert code == ExitCode.OK
    head = out.splitlines()[-1].removeprefix("  head, to keep elsewhere: ")
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    with Ledger.open(ledger_path(home, "data"), "data", LIMIT, monthly=2.0) as ledger:
        ledger.recover()
        later = f"{ledger.head.hex()}:{ledger.sequence}"
    code, out = ended("verify", "--home", home, "--head", head)
    assert code == ExitCode.OK
    assert "the kept head is that of record 13" in out
    # By chain and pin alone, the older copy is sound.
    assert ended("verify", "--home", copy)[0] == ExitCode.OK
    for kept in (later, later.partition(":")[0]):
        code, out = ended("verify", "--home", copy, "--head", kept)
        assert code == ExitCode.FAILED
        assert f"head: no record has the head {kept}, and the ledger ends at record 13" in out
    assert ended("verify", "--home", home, "--head", head.replace(":13", ":12"))[0] == ExitCode.FAILED
    for wrong in ("abc", head + ":1", head.replace(":13", ":0")):
        assert ended("verify", "--home", home, "--head", wrong)[0] == ExitCode.USAGE


def test_an_export_is_verified_without_the_home(home, tmp_path):
    file = tmp_path / "ledger.jsonl"
    assert ended("export", file, "--home", home)[0] == 0
    assert ended("export", file, "--home", home)[0] == ExitCode.USAGE
    assert file.read_bytes().count(b"\n") == 13 + 2 + 2
    code, out = ended("verify", "--export", file)
    assert code == ExitCode.OK
    assert "sound; 13 records, 2 receipts" in out
    file.write_bytes(file.read_bytes().replace(b'"round":2', b'"round":1', 1))
    code, out = ended("verify", "--export", file)
    assert code == ExitCode.FAILED
    assert out.startswith("record ")


def test_a_file_that_is_no_export_is_one_problem_in_one_line(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("# A title\n\nand more\n")
    code, out = ended("verify", "--export", file)
    assert code == ExitCode.USAGE
    assert "is not an export of a ledger" in out
    assert out.count("\n") <= 1
    # An export that is damaged further down is still checked line by line.
    file.write_text('{"a": 1}\nspoilt\n')
    code, out = ended("verify", "--export", file)
    assert code == ExitCode.FAILED
    assert "line 2: it cannot be read" in out


def test_a_missing_ledger_or_export_is_reported(home, tmp_path):
    assert ended("show", "--home", tmp_path / "nowhere")[0] == ExitCode.NOT_FOUND
    assert ended("verify", "--home", home, "--data-name", "other")[0] == ExitCode.NOT_FOUND
    assert ended("export", tmp_path / "file", "--data-name", "other", "--home", home)[0] == ExitCode.NOT_FOUND
    assert not (tmp_path / "file").exists()
    assert ended("verify", "--export", tmp_path / "file")[0] == ExitCode.NOT_FOUND
    assert ended("show", "--home", home, "--data-name", "../x")[0] == ExitCode.USAGE
    assert ended("verify", "--home", home, "--export", tmp_path / "file")[0] == ExitCode.USAGE


def test_a_damaged_ledger_gives_a_sentence(home, tmp_path):
    path = ledger_path(home, "data")
    path.write_bytes(b"x" * 5000)
    for words in (("show",), ("verify",), ("export", tmp_path / "file")):
        code, said = ended(*words, "--home", home)
        assert code == ExitCode.FAILED
        assert "put back the newest copy" in said
    assert not (tmp_path / "file").exists()


def test_a_ledger_of_rows_is_shown_as_persons_and_turned_into_one(home, tmp_path):
    data, apart = tmp_path / "rows.csv", tmp_path / "apart.csv"
    data.write_text("text,label,patient\none,a,ann\ntwo,a,ann\nthree,b,ben\n")
    apart.write_text("text,label,patient\none,a,ann\ntwo,a,cleo\nthree,b,ben\n")

    def asked(file, *more):
        return ended("persons", "--data", file, "--person", "patient", "--home", home, *more)

    code, said = asked(data, "--json")
    found = json.loads(said)
    assert (code, found["rows"], found["now"], found["gone"], found["recorded"]) == (0, 2, 2, 0, False)
    assert counted(4) == pytest.approx(found["of_row"])
    # Two rows of a person double the multiplier's part: more than this ledger's limit.
    assert found["of_row"] < LIMIT.epsilon < found["of_person"]
    code, said = asked(data)
    assert (code, 'That is more than the limit, so keep unit = "example"' in said) == (0, True)
    code, said = asked(data, "--record")
    assert (code, "give --max-rows K" in said) == (int(ExitCode.USAGE), True)
    code, said = asked(data, "--record", "--max-rows", 1)
    assert (code, "--max-rows 1 is too few: a person may have had 2 rows" in said) == (int(ExitCode.REFUSED), True)
    code, said = asked(data, "--record", "--max-rows", 2)
    assert (code, "for a person with 2 rows. Keep unit" in said) == (int(ExitCode.REFUSED), True)
    code, said = ended("persons", "--data", data, "--person", "nobody", "--home", home)
    assert (code, "no column 'nobody'" in said) == (int(ExitCode.USAGE), True)

    code, said = asked(apart)
    assert (code, "Nothing has changed. --record --max-rows 1 counts persons" in said) == (0, True)
    assert json.loads(asked(apart, "--max-rows", 7, "--json")[1])["rows"] == 7
    code, said = asked(apart, "--record", "--max-rows", 1)
    assert (code, "counts persons by column 'patient' from now on" in said) == (0, True)
    code, shown = ended("show", "--home", home)
    assert "one person" in shown
    assert "by column 'patient'; rows charged before count as groups of 1" in shown
    assert json.loads(ended("show", "--home", home, "--json")[1])["persons"]["rows_before"] == 1
    # The receipts name what was charged then, for one row.
    code, said = ended("verify", "--home", home)
    assert (code, "sound" in said) == (0, True), said
    code, said = asked(apart)
    assert (code, "counts one person, not rows" in said) == (int(ExitCode.REFUSED), True)


def test_help_imports_nothing_heavy():
    heavy = "('numpy', 'pydantic', 'cryptography', 'rich.table')"
    program = f"import sys; import edge_client.cli.ledger; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
