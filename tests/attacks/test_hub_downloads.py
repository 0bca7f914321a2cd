"""A job names a repository on the hub and makes members download it, whatever it holds and however large it is.

The hub is a small HTTP server on this machine. The baseline is the hub's own download of a repository, which members
used before: it takes everything and keeps it in its own cache, which nothing trims.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from edge_client.downloads import cache as caches
from edge_client.downloads.backbones import BackboneMissing, Backbones, Wanted
from edge_client.downloads.cache import BlobCache
from edge_client.policy.policy import Policy
from learning.backbones.checkpoint import FILES, CheckpointInvalid
from learning.backbones.hub_fetch import MAX_SMALL_BYTES, fetch_checkpoint
from learning.backbones.stored import digest_of, folder_config, write_backbone
from tacit.blobs import BlobNotThere
from tests.support.small_hub import COMMIT, small_hub
from tests.support.tiny_models import saved

NAME = f"people/bert@{COMMIT}"
HUGE = 10**15
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What a repository may hold besides the files of a backbone.
BESIDE = dict.fromkeys(
    (
        *(
            "pytorch_model.bin",
            "tf_model.h5",
            "flax_model.msgpack",
            "rust_model.ot",
            "modeling_bert.py",
            ".gitattributes",
        ),
        *("README.md", "tokenizer.json", "vocab.txt", "onnx/model.onnx", "extra.safetensors", "sub/model.safetensors"),
    ),
    b"of no use",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("hub") / "model", "bert", tokenizer=False)


@pytest.fixture(scope="module")
def wanted(model, tmp_path_factory) -> Wanted:
    config = folder_config(model)
    return Wanted(write_backbone(model, config, tmp_path_factory.mktemp("file") / "file"), config, NAME)


@pytest.fixture
def files(model) -> dict[str, bytes]:
    """The repository: the model, and whatever else a repository holds."""
    return {path.name: path.read_bytes() for path in model.iterdir()} | BESIDE


async def nowhere(digest: bytes, into: Path, limit: int) -> None:
    raise BlobNotThere(f"no job has a blob {digest.hex()[:12]}")


def opened(cache: BlobCache, wanted: Wanted, hub, allowed=("hub",)):
    backbones = Backbones(cache, allowed=allowed, hub=partial(fetch_checkpoint, endpoint=hub.address))
    return asyncio.run(backbones.open(wanted, nowhere))


def refused(tmp_path: Path, wanted: Wanted, hub, **changes) -> str:
    with pytest.raises(BackboneMissing) as raised:
        opened(BlobCache(tmp_path / "cache", **changes), wanted, hub)
    # Nothing of it stays.
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".pin"] == []
    return str(raised.value)


def test_the_hubs_own_download_takes_everything(tmp_path, files):
    stated = {WEIGHTS: HUGE}
    with small_hub(files, stated=stated) as hub:
        found = Path(
            snapshot_download(
                "people/bert",
                revision=COMMIT,
                cache_dir=tmp_path / "theirs",
                endpoint=hub.address,
                allow_patterns=list(FILES),
            )
        )
        assert (found / WEIGHTS).read_bytes() == files[WEIGHTS]
        # Including files that belong to no backbone.
        assert {WEIGHTS, "extra.safetensors", "tokenizer.json"} <= set(hub.fetched)


def test_a_huge_repository_is_refused_before_a_file_is_requested(tmp_path, wanted, files):
    with small_hub(files, stated={WEIGHTS: HUGE}) as hub:
        said = refused(tmp_path, wanted, hub)
        assert hub.fetched == []
    assert f"the hub has {HUGE:,} bytes of {WEIGHTS}, and the limit is {2 * wanted.size:,}" in said


def test_many_parts_of_moderate_size_count_together(tmp_path, wanted, files):
    parts = [f"model-{number:05}-of-00003.safetensors" for number in range(3)]
    index = json.dumps({"weight_map": {f"tensor{at}": part for at, part in enumerate(parts)}}).encode()
    files = {name: content for name, content in files.items() if name != WEIGHTS}
    files |= {INDEX: index} | dict.fromkeys(parts, b"")
    with small_hub(files, stated=dict.fromkeys(parts, wanted.size)) as hub:
        assert f"the hub has {3 * wanted.size:,} bytes of weights" in refused(tmp_path, wanted, hub)
        assert hub.fetched == [INDEX]


@pytest.mark.parametrize("file", ["config.json", WEIGHTS])
def test_a_server_that_sends_more_than_announced_is_cut_off(tmp_path, model, files, file):
    with small_hub(files, endless={file}) as hub:
        (into := tmp_path / "into").mkdir()
        with pytest.raises(
            CheckpointInvalid, match=f"more than the {len(files[file]):,} bytes that it stated for {file}"
        ):
            fetch_checkpoint(NAME, into, 10**6, endpoint=hub.address)
        assert (into / file).stat().st_size <= len(files[file])


def test_a_lying_server_leaves_nothing_in_the_cache(tmp_path, wanted, files):
    with small_hub(files, endless={WEIGHTS}) as hub:
        assert "the hub sent more than" in refused(tmp_path, wanted, hub)


def test_a_server_that_sends_less_than_announced_is_noticed(tmp_path, wanted, files):
    size = len(files[WEIGHTS])
    with small_hub(files, stated={WEIGHTS: size + 1}) as hub:
        assert f"the hub sent {size:,} of the {size + 1:,} bytes" in refused(tmp_path, wanted, hub)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stated": {WEIGHTS: None}}, f"does not state the size of {WEIGHTS}"),
        ({"stated": {WEIGHTS: -1}}, f"does not state the size of {WEIGHTS}"),
        ({"stated": {"config.json": MAX_SMALL_BYTES + 1}}, "bytes of config.json, and the limit is"),
        ({"sha": "b2" * 20}, f"the hub answered for commit {'b2' * 20} in place of people/bert@{COMMIT}"),
    ],
)
def test_a_missing_size_or_another_commit_is_refused(tmp_path, wanted, files, changes, said):
    with small_hub(files, **changes) as hub:
        assert said in refused(tmp_path, wanted, hub)
        assert WEIGHTS not in hub.fetched


def test_an_index_may_only_name_parts_of_its_own_folder(tmp_path, wanted, files):
    files = {name: content for name, content in files.items() if name != WEIGHTS}
    for part in ("../config.json", "sub/model.safetensors", "pytorch_model.bin", "modeling_bert.py"):
        files[INDEX] = json.dumps({"weight_map": {"tensor": part}}).encode()
        with small_hub(files) as hub:
            assert "which is not a file of weights" in refused(tmp_path, wanted, hub)
            assert hub.fetched == [INDEX]


def test_weights_that_do_not_fit_into_the_cache_are_not_requested(tmp_path, wanted, files):
    with small_hub(files) as hub:
        said = refused(tmp_path, wanted, hub, max_bytes=wanted.size + 2 * MAX_SMALL_BYTES)
        assert hub.asked == []
    assert "do not fit into this member's cache" in said


def test_room_is_made_first_by_removing_other_files(tmp_path, wanted, files):
    room = 3 * wanted.size + 2 * MAX_SMALL_BYTES
    cache = BlobCache(tmp_path / "cache", max_bytes=room)
    old = cache.path(b"\1" * 32)
    old.write_bytes(bytes(1000))
    with small_hub(files) as hub:
        opened(cache, wanted, hub)
    assert not old.exists()
    assert cache.path(wanted.digest).exists()


def test_the_next_trim_removes_what_a_killed_process_left(tmp_path):
    cache = BlobCache(tmp_path / "cache")
    left = tmp_path / "cache" / f"{'cd' * 32}.abc"
    left.mkdir()
    (left / WEIGHTS).write_bytes(bytes(1000))
    with cache.pin(b"\xcd" * 32):
        cache.trim()
        assert caches._size(left) == 1000
    cache.trim()
    assert not left.exists()


@pytest.mark.parametrize("shards", [None, "8KB"])
def test_only_files_of_a_backbone_are_fetched_and_without_a_token(tmp_path, wanted, shards, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret")
    folder = saved(
        tmp_path / "model", "bert", tokenizer=False, **({} if shards is None else {"max_shard_size": shards})
    )
    files = {path.name: path.read_bytes() for path in folder.iterdir()} | BESIDE
    cache = BlobCache(tmp_path / "cache")
    with small_hub(files) as hub:
        found = opened(cache, wanted, hub)
        made = {path.name for path in folder.iterdir() if path.suffix == ".safetensors" or path.name == INDEX}
        assert sorted(hub.fetched) == sorted({"config.json", *made})
        assert hub.authorised == []
    assert digest_of(cache.path(wanted.digest)) == wanted.digest
    assert found.config["model_type"] == "bert"
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_the_hub_is_not_asked_by_default(tmp_path, wanted, files):
    assert "hub" not in Policy().backbones
    with small_hub(files) as hub:
        with pytest.raises(BackboneMissing, match="hub: this member's policy does not name it"):
            opened(BlobCache(tmp_path / "cache"), wanted, hub, allowed=Policy().backbones)
        assert hub.asked == []


FETCH = """
import sys
from pathlib import Path
from learning.backbones.hub_fetch import fetch_checkpoint
fetch_checkpoint(sys.argv[1], Path(sys.argv[2]), 10**6)
"""


def test_the_hubs_own_cache_stays_empty(tmp_path, files):
    for name in ("theirs", "into", "home"):
        (tmp_path / name).mkdir()
    with small_hub(files) as hub:
        changed = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "theirs"), "HOME": str(tmp_path / "home")}
        subprocess.run(
            [sys.executable, "-c", FETCH, NAME, str(tmp_path / "into")], env=os.environ | changed, check=True
        )
    assert {path.name for path in (tmp_path / "into").iterdir()} == {"config.json", WEIGHTS}
    assert list((tmp_path / "theirs").rglob("*")) == []
    assert list((tmp_path / "home").rglob("*")) == []


def test_a_name_without_a_commit_is_never_requested(tmp_path, files):
    with small_hub(files) as hub:
        for name in ("people/bert", "people/bert@main", f"people/bert@{COMMIT[:-1]}"):
            with pytest.raises(CheckpointInvalid, match="names no commit"):
                fetch_checkpoint(name, Path(tempfile.gettempdir()), 10**6, endpoint=hub.address)
        assert hub.asked == []
