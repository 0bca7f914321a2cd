"""Bundles: whole or not at all, checked to the byte, and nobody's files are replaced by them."""

import json
from pathlib import Path

import pytest

from tacit.bundle import INDEX, Bundle, BundleInvalid, BundleKind, ModelFacts, read_bundle, write_bundle

JOB = {"job.json": b"{}", "manifest.json": b"m", "weights.bin": b"\x00" * 8, "tokenizer.json": b"t"}
MODEL = {"model.onnx": b"o", "tokenizer.json": b"t", "labels.json": b"l"}
FACTS = ModelFacts(job="j", version=b"v" * 32, max_tokens=4, min_tokens=2, parity=0.0, texts=1)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
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


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
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
        ({"kind": "model"}, "a model bundle without model.onnx"),
        ({"model": json.loads(FACTS.model_dump_json())}, "belongs to a model bundle"),
        ({"files": {}}, "files"),
        ({"files": {"../job.json": {"sha256": "00" * 32, "size": 1}}}, "files"),
        ({"files": {"a/b": {"sha256": "00" * 32, "size": 1}}}, "files"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
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
def test_what_would_be_no_bundle_is_not_written(
    tmp_path: Path, kind: BundleKind, files: dict[str, bytes], facts: ModelFacts | None
) -> None:
    with pytest.raises(BundleInvalid, match="would not be a bundle"):
        write_bundle(tmp_path / "bundle", kind, files, model=facts)
    assert not list(tmp_path.iterdir())


def test_an_older_bundle_is_replaced_whole(tmp_path: Path) -> None:
    write_bundle(tmp_path / "bundle", "job", JOB | {"notes.txt": b"n"})
    write_bundle(tmp_path / "bundle", "model", MODEL, model=FACTS)
    assert read_bundle(tmp_path / "bundle").files == MODEL
    assert sorted(path.name for path in (tmp_path / "bundle").iterdir()) == sorted([*MODEL, INDEX])
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", "job", JOB)
    assert read_bundle(tmp_path / "bundle").files == JOB


@pytest.mark.parametrize("bundled", [True, False])
def test_a_folder_with_other_files_is_left_as_it_is(tmp_path: Path, bundled: bool) -> None:
    folder = tmp_path / "bundle"
    if bundled:
        write_bundle(folder, "job", JOB)
    folder.mkdir(exist_ok=True)
    (folder / "thesis.txt").write_text("mine", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BundleInvalid, match=r"holds other files \(thesis\.txt\)"):
        write_bundle(folder, "job", JOB)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_file_or_a_link_in_the_way_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(BundleInvalid, match="is not a folder"):
            write_bundle(tmp_path / name, "job", JOB)
    with pytest.raises(BundleInvalid, match="cannot be written"):
        write_bundle(tmp_path / "file" / "below", "job", JOB)


def test_a_run_that_dies_leaves_the_older_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
