"""Tests of where a member gets a backbone: sources in order, by digest, once for all jobs."""

import asyncio
import errno
import hashlib
import shutil
from pathlib import Path

import pytest
import structlog

from edge_client.downloads.backbones import SOURCES, BackboneMissing, Backbones, Wanted, named_folders
from edge_client.downloads.cache import BlobCache
from learning.backbones.checkpoint import CheckpointInvalid
from learning.backbones.layout import BackboneInvalid, checked_config, layout_of
from learning.backbones.stored import digest_of, folder_config, write_backbone
from tacit.blobs import BlobNotThere
from tacit.pieces import PIECE
from tacit.prompt import PromptedModel
from tests.support.tiny_models import saved

HUB = f"people/bert@{'a1' * 20}"


class Coordinator:
    """A coordinator that serves one file by digest and counts the requests."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.limits = path, []

    async def __call__(self, digest: bytes, into: Path, limit: int) -> None:
        self.limits.append(limit)
        if self.path is None or digest_of(self.path) != digest:
            raise BlobNotThere(f"no job has a blob {digest.hex()[:12]}")
        assert self.path.stat().st_size <= limit
        shutil.copyfile(self.path, into)


class Hub:
    """A hub that serves one folder's files and counts the requests."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.asked = folder, []

    def __call__(self, name: str, into: Path, max_bytes: int) -> None:
        self.asked.append(name)
        if self.folder is None:
            raise CheckpointInvalid(f"{name} is no folder here, and the hub did not give it")
        shutil.copytree(self.folder, into, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Saves two models of the same sizes and one of another kind."""
    root = tmp_path_factory.mktemp("models")
    saved(root / "right", "bert", tokenizer=False)
    saved(root / "other", "bert", tokenizer=False, seed=9)
    saved(root / "roberta", "roberta", tokenizer=False)
    return root


@pytest.fixture(scope="module")
def wanted(models):
    config = folder_config(models / "right")
    return Wanted(write_backbone(models / "right", config, models / "file"), config, HUB)


@pytest.fixture
def cache(tmp_path):
    return BlobCache(tmp_path / "cache")


def opened(backbones: Backbones, wanted: Wanted, fetch) -> object:
    return asyncio.run(backbones.open(wanted, fetch))


def kept(cache: BlobCache, wanted: Wanted) -> set[str]:
    return {path.name for path in cache.path(wanted.digest).parent.iterdir() if not path.name.endswith(".pin")}


def test_a_folder_with_the_backbone_comes_before_hub_and_coordinator(models, wanted, cache):
    hub, coordinator = Hub(models / "right"), Coordinator(models / "file")
    backbones = Backbones(cache, folders=[models / "right"], hub=hub)
    found = opened(backbones, wanted, coordinator)
    assert found.config["model_type"] == "bert"  # type: ignore[attr-defined]
    assert (hub.asked, coordinator.limits) == ([], [])
    assert kept(cache, wanted) == {wanted.digest.hex()}
    # All jobs of the process share one, and then all processes share the file.
    assert opened(backbones, wanted, coordinator) is found
    opened(Backbones(cache, allowed=()), wanted, coordinator)
    assert coordinator.limits == []


def test_a_canonical_file_is_accepted_as_a_source(models, wanted, cache):
    opened(Backbones(cache, folders=[models / "file"], allowed=["disk"]), wanted, Coordinator(None))
    assert kept(cache, wanted) == {wanted.digest.hex()}


def test_a_folder_with_other_values_is_skipped_and_logged(models, wanted, cache):
    hub, coordinator = Hub(models / "right"), Coordinator(None)
    backbones = Backbones(cache, folders=[models / "other", models / "roberta", models / "nowhere"], hub=hub)
    with structlog.testing.capture_logs() as logs:
        opened(backbones, wanted, coordinator)
    assert hub.asked == [HUB]
    told = [line for line in logs if line["event"] == "backbone_differs"]
    config = folder_config(models / "other")
    other = write_backbone(models / "other", config, models / "other-file").hex()
    assert other in told[0]["why"]
    assert wanted.digest.hex() in told[0]["why"]
    assert "its model_type is 'roberta', the job's 'bert'" in told[1]["why"]
    assert "does not exist" in told[2]["why"]
    assert kept(cache, wanted) == {wanted.digest.hex()}


def test_a_hub_with_other_values_is_skipped(models, wanted, cache):
    coordinator = Coordinator(models / "file")
    opened(Backbones(cache, hub=Hub(models / "other")), wanted, coordinator)
    # The member takes at most the config's canonical file.
    assert coordinator.limits == [layout_of(wanted.config).size]


def test_a_head_that_the_job_does_not_need_is_ignored(models, cache, tmp_path):
    bare = saved(tmp_path / "bare", "bert", tokenizer=False, bare=True)
    config = folder_config(bare)
    needed = Wanted(write_backbone(bare, config, tmp_path / "file"), config)
    whole = saved(tmp_path / "whole", "bert", tokenizer=False)
    with pytest.raises(BackboneMissing, match="same sizes, different values"):
        # The values differ because random numbers were drawn in another order. The point is that they are compared.
        opened(Backbones(cache, folders=[whole], allowed=["disk"]), needed, Coordinator(None))
    wants_head = Wanted(bytes(32), folder_config(whole))
    with pytest.raises(BackboneMissing, match="its masked_lm is False, the job's True"):
        opened(Backbones(cache, folders=[bare], allowed=["disk"]), wants_head, Coordinator(None))


def test_when_no_source_has_it_each_says_why(models, wanted, cache):
    coordinator = Coordinator(None)
    backbones = Backbones(cache, folders=[models / "other"], hub=Hub(None))
    with pytest.raises(BackboneMissing) as error:
        opened(backbones, wanted, coordinator)
    said = str(error.value)
    for part in ("disk: ", "same sizes, different values", f"hub: {HUB} is no folder", "coordinator: no job has"):
        assert part in said
    assert kept(cache, wanted) == set()
    # The folder is not read again, a gigabyte for the same result. The coordinator may have the backbone by now.
    shutil.copyfile(models / "file", models / "late")
    coordinator.path = models / "late"
    (models / "other").rename(models / "away")
    try:
        opened(backbones, wanted, coordinator)
    finally:
        (models / "away").rename(models / "other")


@pytest.mark.parametrize("allowed", [(source,) for source in SOURCES], ids=SOURCES)
def test_the_policy_decides_which_sources_are_asked(models, wanted, cache, allowed):
    hub, coordinator = Hub(models / "right"), Coordinator(models / "file")
    opened(Backbones(cache, folders=[models / "right"], allowed=allowed, hub=hub), wanted, coordinator)
    assert (len(hub.asked), len(coordinator.limits)) == (allowed == ("hub",), allowed == ("coordinator",))


def test_without_allowed_sources_only_the_cache_is_used(models, wanted, cache):
    hub, coordinator = Hub(models / "right"), Coordinator(models / "file")
    with pytest.raises(BackboneMissing, match="hub: this member's policy does not name it"):
        opened(Backbones(cache, folders=[models / "right"], allowed=(), hub=hub), wanted, coordinator)
    assert (hub.asked, coordinator.limits) == ([], [])


def test_the_hub_is_not_asked_if_the_job_names_nothing_there(models, wanted, cache):
    hub = Hub(models / "right")
    unnamed = Wanted(wanted.digest, wanted.config)
    opened(Backbones(cache, hub=hub), unnamed, Coordinator(models / "file"))
    assert hub.asked == []


def test_a_damaged_file_in_the_cache_is_fetched_again(models, wanted, cache):
    path = cache.path(wanted.digest)
    data = bytearray((models / "file").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    coordinator = Coordinator(models / "file")
    opened(Backbones(cache), wanted, coordinator)
    assert coordinator.limits == [len(data)]
    assert digest_of(path) == wanted.digest


def test_an_error_about_the_jobs_config_names_no_folder(models, wanted, cache, tmp_path):
    wrong = Wanted(wanted.digest, {**wanted.config, "masked_lm": False})
    with pytest.raises(BackboneInvalid) as error:
        opened(Backbones(cache, folders=[models / "file"], allowed=["coordinator"]), wrong, _any(models / "file"))
    assert str(tmp_path) not in str(error.value)
    # The pin was released.
    cache.clear(bytes(32))
    assert kept(cache, wanted) == set()


def _any(path: Path):
    async def fetch(digest: bytes, into: Path, limit: int) -> None:
        shutil.copyfile(path, into)

    return fetch


def test_a_backbone_is_pinned_while_a_job_has_it_open(models, wanted, tmp_path):
    backbones = Backbones(BlobCache(tmp_path / "cache"))
    opened(backbones, wanted, Coordinator(models / "file"))
    cache = BlobCache(tmp_path / "cache", 10)
    cache.trim()
    assert not cache.clear(bytes(32))
    assert kept(cache, wanted) == {wanted.digest.hex()}
    backbones.release(wanted.digest)
    backbones.release(wanted.digest)
    cache.trim()
    assert kept(cache, wanted) == set()


def test_two_jobs_at_once_fetch_a_backbone_once(models, wanted, cache):
    coordinator = Coordinator(models / "file")
    backbones = Backbones(cache)

    async def both():
        return await asyncio.gather(backbones.open(wanted, coordinator), backbones.open(wanted, coordinator))

    one, two = asyncio.run(both())
    assert one is two
    assert len(coordinator.limits) == 1


def test_a_full_disk_makes_room_by_deleting_old_versions(models, wanted, cache):
    old = cache.path(hashlib.sha256(b"old").digest())
    old.write_bytes(b"old")
    coordinator = Coordinator(models / "file")

    async def fetch(digest: bytes, into: Path, limit: int) -> None:
        if old.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        await coordinator(digest, into, limit)

    opened(Backbones(cache), wanted, fetch)
    assert kept(cache, wanted) == {wanted.digest.hex()}


def test_a_full_disk_with_nothing_to_delete_says_so(wanted, cache):
    async def fetch(digest: bytes, into: Path, limit: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        opened(Backbones(cache), wanted, fetch)


def test_a_jobs_document_names_its_backbone(wanted):
    task = {"name": "cloze", "verbaliser": {"a": "x", "b": "y"}}
    table = {"config": dict(wanted.config), "backbone": wanted.digest.hex(), "hub": HUB, "task": task}
    assert Wanted.of(PromptedModel.model_validate(table)) == wanted
    with pytest.raises(BackboneInvalid, match="make a job bundle of it"):
        Wanted.of(PromptedModel.model_validate({"base": "x", "task": task}))
    table["config"]["hidden_size"] = 10**9
    with pytest.raises(BackboneInvalid, match="hidden_size"):
        Wanted.of(PromptedModel.model_validate(table))


def test_folders_are_named_by_option_and_environment():
    assert named_folders([], {}) == ()
    assert named_folders([Path("a")], {"TACIT_BACKBONES": "b::a"}) == (Path("a"), Path("b"))
    assert named_folders([], {"TACIT_BACKBONES": "~/models"}) == (Path.home() / "models",)


def test_a_backbone_beyond_the_cache_is_not_asked_for(models, wanted, tmp_path):
    """The disk would have taken it, down to its last byte."""
    small, coordinator = BlobCache(tmp_path / "small", layout_of(wanted.config).size - 1), Coordinator(models / "file")
    with pytest.raises(BackboneMissing, match="bytes do not fit into this member's cache, which may hold"):
        opened(Backbones(small, allowed=["coordinator"]), wanted, coordinator)
    assert coordinator.limits == []
    enough = BlobCache(tmp_path / "enough", layout_of(wanted.config).size)
    opened(Backbones(enough, allowed=["coordinator"]), wanted, coordinator)
    assert len(coordinator.limits) == 1


def test_a_large_backbone_without_a_list_of_its_pieces_is_refused():
    """One stream of any bytes would fill the disk before its digest tells."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    config = {"model_type": "bert", "masked_lm": True, "vocab_size": 3000, "max_position_embeddings": 512, **sizes}
    whole = checked_config(config)
    assert layout_of(whole).size > PIECE
    model = {"architecture": "prompted", "max_tokens": 24, "task": "head", "config": whole, "backbone": "11" * 32}
    with pytest.raises(BackboneInvalid, match=r"model\.pieces: a backbone of .* bytes needs the list"):
        Wanted.of(PromptedModel.model_validate(model))
    listed = PromptedModel.model_validate({**model, "pieces": "22" * 32})
    assert Wanted.of(listed).pieces == bytes.fromhex("22" * 32)
    small = PromptedModel.model_validate({**model, "config": checked_config({**config, "vocab_size": 300})})
    assert Wanted.of(small).pieces is None
