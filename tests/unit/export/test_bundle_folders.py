"""Bundles are written whole or not at all, checked to the byte, and never replace other files."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tacit.bundle import (
    INDEX,
    Bundle,
    BundleInvalid,
    BundleKind,
    ModelFacts,
    backbone_folder,
    check_place,
    read_bundle,
    scratch_beside,
    write_backbone,
    write_bundle,
)

JOB = {"job.json": b"{}", "manifest.json": b"m", "weights.bin": b"\x00" * 8, "tokenizer.json": b"t"}
MODEL = {"model.onnx": b"o", "tokenizer.json": b"t", "labels.json": b"l"}
BACKBONE = {"backbone.onnx": b"o" * 5000, "tokenizer.json": b"t"}
PROMPT = {"prompt.safetensors": b"p", "labels.json": b"l"}
FACTS = ModelFacts(job="j", version=b"v" * 32, max_tokens=4, min_tokens=2, parity=0.0, texts=1)


def test_a_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    index = write_bundle(tmp_path / "new" / "bundle", "job", JOB)
    bundle = read_bundle(tmp_path / "new" / "bundle", "job")
    assert bundle == Bundle(tmp_path / "new" / "bundle", index, JOB)
    assert bundle.kind == "job"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bundle"]
    content = json.loads((tmp_path / "new" / "bundle" / INDEX).read_text(encoding="utf-8"))
    assert content["schema"] == 1
    assert content["files"]["weights.bin"]["size"] == 8


def test_the_same_files_give_the_same_index(tmp_path: Path) -> None:
    write_bundle(tmp_path / "a", "job", JOB)
    write_bundle(tmp_path / "b", "job", dict(reversed(JOB.items())))
    assert (tmp_path / "a" / INDEX).read_bytes() == (tmp_path / "b" / INDEX).read_bytes()


@pytest.mark.parametrize("name", JOB)
@pytest.mark.parametrize("data", [b"other", b""])
def test_the_file_that_differs_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    (tmp_path / "bundle" / name).write_bytes(data)
    with pytest.raises(BundleInvalid, match=f"{name} differs"):
        read_bundle(tmp_path / "bundle")


def test_one_changed_bit_is_found(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    (tmp_path / "bundle" / "weights.bin").write_bytes(b"\x00" * 7 + b"\x01")
    with pytest.raises(BundleInvalid, match=r"weights\.bin differs"):
        read_bundle(tmp_path / "bundle")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    (tmp_path / "bundle" / "tokenizer.json").unlink()
    with pytest.raises(BundleInvalid, match=r"tokenizer\.json is missing"):
        read_bundle(tmp_path / "bundle")


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleInvalid, match="does not exist"):
        read_bundle(tmp_path / "none")
    with pytest.raises(BundleInvalid, match=r"holds no bundle\.json"):
        read_bundle(tmp_path)
    write_bundle(tmp_path / "bundle", "job", JOB)
    with pytest.raises(BundleInvalid, match="is a job bundle where a model bundle is needed"):
        read_bundle(tmp_path / "bundle", "model")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema"),
        ({"extra": 1}, "unknown key"),
        ({"kind": "other"}, "kind"),
        ({"kind": "model"}, "a model bundle must list model.onnx"),
        ({"model": json.loads(FACTS.model_dump_json())}, "model and prompt bundles must have `model`, and no others"),
        ({"files": {}}, "files"),
        ({"files": {"../job.json": {"sha256": "00" * 32, "size": 1}}}, "files"),
        ({"files": {"a/b": {"sha256": "00" * 32, "size": 1}}}, "files"),
    ],
)
def test_an_invalid_index_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    index = tmp_path / "bundle" / INDEX
    index.write_text(json.dumps(json.loads(index.read_text(encoding="utf-8")) | change), encoding="utf-8")
    with pytest.raises(BundleInvalid, match=says):
        read_bundle(tmp_path / "bundle")


@pytest.mark.parametrize(
    ("kind", "files", "facts"),
    [
        ("job", {"job.json": b"{}"}, None),
        ("job", JOB | {"../x": b""}, None),
        ("job", JOB | {INDEX: b""}, None),
        ("job", JOB, FACTS),
        ("model", MODEL, None),
    ],
)
def test_an_invalid_bundle_is_not_written(
    tmp_path: Path, kind: BundleKind, files: dict[str, bytes], facts: ModelFacts | None
) -> None:
    with pytest.raises(BundleInvalid, match="would not be a valid bundle"):
        write_bundle(tmp_path / "bundle", kind, files, model=facts)
    assert not list(tmp_path.iterdir())


def test_an_older_bundle_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB | {"notes.txt": b"n"})
    write_bundle(tmp_path / "bundle", "model", MODEL, model=FACTS)
    assert read_bundle(tmp_path / "bundle").files == MODEL
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == sorted([*MODEL, INDEX])
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


# ---- a backbone, which prompts need ---------------------------------------------------------------------------------

ON_BACKBONE = FACTS.model_copy(update={"backbone": b"b" * 32})
KINDS: dict[BundleKind, tuple[dict[str, bytes], ModelFacts | None]] = {
    "job": (JOB, None),
    "model": (MODEL, FACTS),
    "prompt": (PROMPT, ON_BACKBONE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_and_other_bundles_never_replace_each_other(tmp_path: Path, kind: BundleKind) -> None:
    files, facts = KINDS[kind]
    folder, _, _ = write_backbone(tmp_path / "prompt", BACKBONE)
    with pytest.raises(BundleInvalid, match="is a backbone, which prompts beside it may need"):
        check_place(folder, kind)
    with pytest.raises(BundleInvalid, match="is a backbone"):
        write_bundle(folder, kind, files, model=facts)
    assert read_bundle(folder, "backbone").files == BACKBONE
    write_bundle(folder, "backbone", BACKBONE | {"tokenizer.json": b"other"})
    write_bundle(tmp_path / "theirs", kind, files, model=facts)
    with pytest.raises(BundleInvalid, match=f"is a {kind} bundle in the backbone's place; move it"):
        write_bundle(tmp_path / "theirs", "backbone", BACKBONE)
    assert read_bundle(tmp_path / "theirs").files == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([folder.name, "theirs"])


def test_a_whole_backbone_is_not_written_again(tmp_path: Path) -> None:
    folder, index, written = write_backbone(tmp_path / "one", BACKBONE)
    assert (folder, written) == (backbone_folder(tmp_path / "one", index.digest()), True)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert write_backbone(tmp_path / "two", BACKBONE) == (folder, index, False)
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    (folder / "backbone.onnx").write_bytes(b"damaged")
    assert write_backbone(tmp_path / "two", BACKBONE) == (folder, index, True)
    assert read_bundle(folder, "backbone").files == BACKBONE
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    with pytest.raises(BundleInvalid, match="is where the backbone belongs; name another folder for the prompt"):
        write_backbone(folder, BACKBONE)


# ---- several at once -----------------------------------------------------------------------------------------------


def at_once(*works: Callable[[], object]) -> list[object]:
    """Starts all calls together; returns the result or the error of each."""
    gate, found = threading.Barrier(len(works)), list[object](works)

    def run(number: int) -> None:
        gate.wait()
        try:
            found[number] = works[number]()
        except Exception as error:  # noqa: BLE001  compared with the expected error
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "damaged"])
def test_two_exports_onto_one_backbone_leave_it_whole(tmp_path: Path, before: str) -> None:
    for pair in range(60):
        place = tmp_path / str(pair)
        if before != "nothing":
            folder, _, _ = write_backbone(place / "reviews", BACKBONE)
            for path in folder.iterdir():
                if before == "an empty folder":
                    path.unlink()
                elif path.name != INDEX:
                    path.write_bytes(b"damaged")
        first, second = at_once(
            *(lambda each=each: write_backbone(each, BACKBONE) for each in (place / "reviews", place / "topics"))
        )
        assert isinstance(first, tuple), first
        assert isinstance(second, tuple), second
        assert first[:2] == second[:2]
        # Both may write over a damaged backbone. Otherwise the second one finds the first one's.
        assert first[2] + second[2] == 1 or before == "damaged"
        assert read_bundle(first[0], "backbone").files == BACKBONE
        assert [path.name for path in place.iterdir()] == [first[0].name]


def test_one_of_two_bundles_written_to_one_place_is_whole(tmp_path: Path) -> None:
    folder, kinds = tmp_path / "bundle", set()
    for turn in range(60):
        others = [JOB | {"weights.bin": bytes([turn, number])} for number in range(2)]
        found = at_once(
            *(lambda files=files: write_bundle(folder, "job", files) for files in others),
            lambda: write_bundle(folder, "model", MODEL, model=FACTS),
        )
        assert not [each for each in found if isinstance(each, Exception)]
        bundle = read_bundle(folder)
        assert bundle.files in [*others, MODEL]
        kinds.add(bundle.kind)
        assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_leftovers_of_a_killed_run_are_removed_once_they_are_old(tmp_path: Path) -> None:
    names = (".bundle.bundle-old00000", ".bundle.bundle-young000", ".other.bundle-old00000")
    for name in names:
        (tmp_path / name / "made").mkdir(parents=True)
        (tmp_path / name / "made" / "weights.bin").write_bytes(b"half")
        if "old" in name:
            os.utime(tmp_path / name, (1e9, 1e9))
    write_bundle(tmp_path / "bundle", "job", JOB)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["bundle", *names[1:]])


def test_a_scratch_folder_is_swept_like_a_bundle_once_its_run_was_killed(tmp_path: Path) -> None:
    script = f"""
import os, pathlib, signal
from tacit.bundle import scratch_beside
with scratch_beside(pathlib.Path({str(tmp_path / "new" / "bundle")!r})) as folder:
    (folder / "model.safetensors").write_bytes(b"weights")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    (left,) = (tmp_path / "new").iterdir()
    assert (left / "model.safetensors").read_bytes() == b"weights"
    assert left.stat().st_mode & 0o777 == 0o700
    with scratch_beside(tmp_path / "new" / "bundle") as young:
        assert sorted((tmp_path / "new").iterdir()) == sorted([left, young])
    os.utime(left, (1e9, 1e9))
    write_bundle(tmp_path / "new" / "bundle", "job", JOB)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["bundle"]


def test_a_failed_replacement_restores_the_older_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    real, turns = Path.rename, []

    def rename(path: Path, target: Path) -> Path:
        turns.append(path.name)
        if turns == ["made", "bundle", "made"]:
            raise OSError(5, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(BundleInvalid, match="Input/output error"):
        write_bundle(tmp_path / "bundle", "model", MODEL, model=FACTS)
    assert read_bundle(tmp_path / "bundle").files == JOB
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


PRIVATE = FACTS.model_copy(update={"private": True})


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777], ids=oct)
@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a model of everybody's"])
def test_only_the_owner_can_read_a_members_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, before: str
) -> None:
    folder, made = tmp_path / "bundle", []
    if before == "an empty folder":
        folder.mkdir(mode=0o755)
    elif before != "nothing":
        write_bundle(folder, "model", MODEL, model=FACTS)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        made.append((modes(path), modes(path.parent)))

    real_chmod = Path.chmod

    def chmod(path: Path, mode: int) -> None:
        # The folder was private from its creation, so others could never write into it.
        assert modes(path) & 0o077 == 0
        real_chmod(path, mode)

    monkeypatch.setattr("tacit.bundle.os.fsync", fsync)
    monkeypatch.setattr(Path, "chmod", chmod)
    was = os.umask(umask)
    try:
        write_bundle(folder, "model", MODEL, model=PRIVATE)
    finally:
        os.umask(was)
    assert modes(folder) == 0o700
    assert {path.name: modes(path) for path in folder.iterdir()} == dict.fromkeys([*MODEL, INDEX], 0o600)
    # At no moment could others open it.
    assert made == [(0o600, 0o700)] * 4
    assert read_bundle(folder).files == MODEL


def test_a_public_bundle_has_the_modes_of_the_umask(tmp_path: Path) -> None:
    was = os.umask(0o027)
    try:
        write_bundle(tmp_path / "bundle", "model", MODEL, model=PRIVATE)
        write_bundle(tmp_path / "bundle", "model", MODEL, model=FACTS)
    finally:
        os.umask(was)
    assert modes(tmp_path / "bundle") == 0o750
    assert {modes(path) for path in (tmp_path / "bundle").iterdir()} == {0o640}


def modes(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", "job", JOB)
    assert read_bundle(tmp_path / "bundle").files == JOB


@pytest.mark.parametrize("bundled", [True, False])
def test_a_folder_with_other_files_is_unchanged(tmp_path: Path, bundled: bool) -> None:
    folder = tmp_path / "bundle"
    if bundled:
        write_bundle(folder, "job", JOB)
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("mine", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BundleInvalid, match=r"holds other files \(thesis\.txt\)"):
        write_bundle(folder, "job", JOB)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_or_link_in_the_way_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(BundleInvalid, match="is not a folder"):
            write_bundle(tmp_path / name, "job", JOB)
    with pytest.raises(BundleInvalid, match="cannot be written"):
        write_bundle(tmp_path / "file" / "below", "job", JOB)


def test_a_run_that_fails_leaves_the_older_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB)
    monkeypatch.setattr(
        "tacit.bundle.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(BundleInvalid, match="No space left on device"):
        write_bundle(tmp_path / "bundle", "job", JOB | {"weights.bin": b"new"})
    assert read_bundle(tmp_path / "bundle").files == JOB
    monkeypatch.undo()
    write_bundle(tmp_path / "bundle", "job", JOB | {"weights.bin": b"new"})
    assert read_bundle(tmp_path / "bundle").files["weights.bin"] == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
