"""One bad row stops a member. Told to skip bad rows, the member names them and trains on the others."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.processes import PATIENCE, command, running_federation

MEMBERS = ("aster", "birch", "cedar")


def test_a_member_told_to_skip_bad_rows_trains_on_the_others(tmp_path):
    with running_federation(tmp_path, *MEMBERS) as federation:
        data, home = federation.data("aster"), federation.home("aster")
        rows = data.read_bytes().splitlines(keepends=True)
        data.write_bytes(b"".join([*rows[:5], b'{"text": "\xff", "label": "a"}\n', *rows[5:], b"{}\n"]))
        words = ("edge_client", "run", "--home", home, "--data", data)
        stopped = command(*words)
        assert stopped.returncode == 2
        assert "line 6: not UTF-8" in stopped.stderr
        assert stopped.stderr.endswith("; or skip such rows with --skip-invalid\n")

        federation.job("desk", count=2)
        looked = command(*words, "--dry-run", "--skip-invalid")
        assert looked.stdout.startswith("skipped 2 of 62 rows: line 6: not UTF-8; ")
        assert "desk: 60 examples here" in looked.stdout

        # The same rows as Parquet, and nothing else about them.
        parquet = tmp_path / "aster.parquet"
        table = [json.loads(row) for row in rows]
        pq.write_table(pa.Table.from_pylist([*table[:5], {}, *table[5:], {}]), parquet)
        shown = command("edge_client", "run", "--home", home, "--data", parquet, "--dry-run", "--skip-invalid")
        assert shown.stdout.startswith("skipped 2 of 62 rows: row 6: no text in column 'text'")
        assert shown.stdout.partition("\n")[2] == looked.stdout.partition("\n")[2]

        for name in MEMBERS[1:]:
            federation.start(name, "--until-finished")
        member = federation.start("aster", "--until-finished", "--skip-invalid")
        told = member.wait_for("rows_skipped")
        assert (told["skipped"], told["kept"]) == (2, 60)
        assert [each.partition(":")[0] for each in told["first"]] == ["line 6", "line 62"]
        federation.finished("desk")
        for round_ in (1, 2):
            assert member.wait_for("ready", round=round_)["examples"] == 60
        assert member.process.wait(timeout=PATIENCE) == 0
