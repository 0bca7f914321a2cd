"""A backbone in pieces, with real processes: every side is interrupted, a disk rots, a store lies.

The member that downloads is behind a network that breaks on order. Two others have the backbone on their disks.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tacit.pieces import PIECE, list_bytes
from tacit.v1 import operator_pb2 as pb
from tests.support.bad_network import BadNetwork, Fault, Way
from tests.support.processes import EXAMPLES, Federation, behind, within_patience

pytestmark = pytest.mark.timeout(600)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# 12 pieces, of rows that no text uses.
WORDS = 90_000


def made_backbone(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    entries = [*SPECIAL, *(EXAMPLES / "words.txt").read_text().split()]
    entries = list(dict.fromkeys(entries))
    entries += [f"unused{number}" for number in range(WORDS - len(entries))]
    made = Tokenizer(models.WordPiece({entry: at for at, entry in enumerate(entries)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(SPECIAL)
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes)).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))


def created(federation: Federation, folder: Path, name: str, *, training: int) -> tuple[bytes, int]:
    """Creates a job of three members on the backbone in `folder`. Returns the digest and size of the backbone's file.

    Args:
        training: seconds that a member has to fetch it and to train.
    """
    labels = sorted({json.loads(line)["label"] for line in (EXAMPLES / "train.jsonl").open()})
    spec = folder / f"{name}.toml"
    spec.write_text(
        f'schema = 1\nname = "{name}"\nlabels = {json.dumps(labels)}\n[model]\narchitecture = "prompted"\n'
        f'base = {json.dumps(str(folder / "backbone"))}\nmax_tokens = 24\ntask = "head"\n'
        f"[rounds]\ncount = 1\nmin_members = 3\n[rounds.deadlines]\ntraining = {training}\nreconnect = 60\n"
    )
    federation.create(spec)
    files = json.loads((folder / f"bundle-{name}" / "bundle.json").read_text())["files"]
    size: int = files["backbone.safetensors"]["size"]
    assert files["backbone.pieces"]["size"] == list_bytes(size)
    return bytes.fromhex(files["backbone.safetensors"]["sha256"]), size


class Three:
    """A coordinator with three members: north and east have the backbone, south downloads it over a bad network."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        made_backbone(folder / "backbone")
        self.federation = Federation(folder)
        stack.callback(self.federation.close)
        self.federation.enrol("north", "east", "south")
        self.network = BadNetwork(self.federation.port)
        stack.callback(self.network.close)
        behind(self.network, self.federation.home("south"))
        self.digest, self.size = created(self.federation, folder, "large", training=300)
        assert list_bytes(self.size) == 12 * 32
        self.cached = self.federation.home("south") / "cache" / self.digest.hex()
        self.partial = self.cached.with_name(self.cached.name + ".pieces")

    def start_others(self) -> None:
        for name in ("north", "east"):
            self.federation.start(name, "--backbone", str(self.folder / "backbone"))

    @property
    def stored(self) -> Path:
        """The coordinator's file."""
        (found,) = (self.federation.dir / "store").rglob(f"blobs/*/{self.digest.hex()}")
        return found

    def pieces(self) -> set[int]:
        """The pieces that the member has."""
        if not self.partial.exists():
            return set()
        whole, have = self.stored.read_bytes(), self.partial.read_bytes()
        numbers = range(-(-self.size // PIECE))
        return {each for each in numbers if whole[each * PIECE :][:PIECE] == have[each * PIECE :][:PIECE]}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    with ExitStack() as stack:
        yield Three(tmp_path, stack)


def test_a_download_goes_on_after_every_kind_of_interruption(three: Three) -> None:
    federation, network = three.federation, three.network
    three.start_others()
    # The connection breaks in the middle, and then the network holds still.
    network.plan(Fault.CUT, Way.DOWN, after=3 * PIECE)
    member = federation.start("south")
    within_patience(network.struck.is_set)
    network.plan(Fault.STALL, Way.DOWN, after=5 * PIECE)
    within_patience(network.struck.is_set)
    first = three.pieces()
    assert first
    # The coordinator dies and comes back.
    federation.coordinator.kill()
    network.cut()
    network.release()
    network.plan(Fault.STALL, Way.DOWN, after=2 * PIECE + PIECE // 2)
    federation.serve()
    within_patience(network.struck.is_set)
    second = three.pieces()
    assert first <= second
    # The member dies. While it is down, its disk loses a byte.
    member.kill()
    second = three.pieces()
    rotten = min(second)
    with three.partial.open("r+b") as file:
        file.seek(rotten * PIECE + 5)
        file.write(b"\xff\xfe\xfd\xfc")
    assert rotten not in three.pieces()
    network.cut()
    network.release()
    before = network.carried[Way.DOWN]
    member = federation.start("south")
    member.wait_for("backbone_found", source="coordinator")
    # Only what was missing came, and the rotten piece again.
    came = network.carried[Way.DOWN] - before
    missing = three.size - (len(second) - 1) * PIECE
    assert missing <= came < missing + PIECE + 2 * 2**20
    with three.cached.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == three.digest
    assert not three.partial.exists()
    assert federation.finished("large").job.version_number == 1


def test_other_bytes_of_the_coordinator_are_never_trained_on(three: Three) -> None:
    """The attack: the coordinator's file has another value. It fails, and an honest file then ends well."""
    federation = three.federation
    whole = three.stored.read_bytes()
    changed = bytearray(whole)
    changed[7 * PIECE + 3] ^= 1
    three.stored.chmod(0o600)
    three.stored.write_bytes(changed)
    three.start_others()
    member = federation.start("south")
    for _ in range(3):
        assert member.wait_for("piece_damaged", "backbone_found")["event"] == "piece_damaged"
    assert (member.lines[-1]["piece"], member.lines[-1]["pieces"]) == (7, 12)
    # South declines, and the operator reads why.
    federation.wait_for("large", lambda detail: "piece 7 of 12" in detail.job.waiting)
    assert not three.cached.exists()
    assert federation.show("large").job.version_number == 0
    three.stored.write_bytes(whole)
    assert member.stop() == 0
    federation.start("south").wait_for("backbone_found", source="coordinator")
    with three.cached.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").digest() == three.digest
    assert federation.finished("large").job.status == pb.JOB_STATUS_FINISHED
