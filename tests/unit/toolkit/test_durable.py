"""Only its owner can read a secret file, even if a killed process left a partial file that others can read."""

import stat

import pytest

from toolkit.durable import FILE_STEPS, durable_file, make_folder


def test_a_leftover_partial_file_does_not_widen_the_mode(tmp_path):
    partial = tmp_path / ".key.pem.partial"
    partial.write_bytes(b"longer than what comes now")
    partial.chmod(0o644)
    durable_file(tmp_path / "key.pem", b"secret")
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert (tmp_path / "key.pem").read_bytes() == b"secret"
    assert not partial.exists()


def test_a_folder_and_those_above_it_are_for_their_owner_and_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("toolkit.durable.sync_folder", flushed.append)
    for _ in range(2):
        make_folder(tmp_path / "noise" / "data")
    assert flushed == [tmp_path, tmp_path / "noise"]
    assert [stat.S_IMODE((tmp_path / path).stat().st_mode) for path in ("noise", "noise/data")] == [0o700, 0o700]


@pytest.mark.parametrize("step", FILE_STEPS)
def test_killed_at_any_step_the_file_is_the_old_or_the_new(tmp_path, step):
    path = tmp_path / "key.pem"
    durable_file(path, b"old")

    def killed(point: str) -> None:
        if point == f"file.{step}":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        durable_file(path, b"new", faults=killed)
    renamed = FILE_STEPS.index(step) >= FILE_STEPS.index("renamed")
    assert path.read_bytes() == (b"new" if renamed else b"old")
