"""The bytes of a job over a pretrained encoder: what one member sends in a round, and what it fetches once.

Sizes are those of a real bundle, and what is sent is what a real training step leaves. docs/pretrained-vocabularies.md
gives MiniLM's.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.library.minilm import PACKAGE, minilm
from edge_client.agent.dry_run import Plan
from export.bundle import JobBundle, make_job_bundle, read_job_bundle
from learning.mechanisms.protection import protection_of
from learning.text.corpus import EncodedExamples
from learning.text.encoder import wordpiece_tokenizer
from learning.text.examples import Example
from learning.training.start import first_private
from learning.training.update import train_update
from secure_agg import pack_in_place, packed_size
from tacit.job import JobSpec
from tacit.vector import layout_of
from tests.support.places import ROOT
from tests.support.sum_fleet import SeededRandom

PAGE = ROOT / "docs" / "pretrained-vocabularies.md"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "city", "man"]
OWN = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "what", "is", "a", "ci", "##ty", "man", "w", "##h"]
EXAMPLES = [Example("what is a city", "a"), Example("is a man", "b"), Example("what man", "b")] * 4
WIDTH, INNER, LAYERS, PLACES, RANK = 8, 12, 2, 16, 3
LORA = {"name": "lora", "rank": RANK}
# What members share, by its name in the page's table.
SHARED: dict[str, tuple[str, Any]] = {
    "everything (`fedavg`)": ("fedavg", None),
    "encoder and head (`fedvocab`)": ("fedvocab", None),
    "LoRA of rank 8 and head": ("fedvocab", {"name": "lora", "rank": 8}),
    'the same with `train = "up"`': ("fedvocab", {"name": "lora", "rank": 8, "train": "up"}),
    "head": ("fedvocab", "none"),
}


def bundle_of(base: Path, out: Path, method: str, injection: Any, *, own: bool = False, **more: Any) -> JobBundle:
    """A job of two labels over a base: of its own pieces or of members'."""
    model: dict[str, Any] = {"architecture": "transformer", "base": str(base), "max_tokens": 16}
    if injection is not None:
        model["injection"] = injection
    vocabulary = {"vocabulary": {"kind": "wordpiece", "size": 100}} if own else {}
    said = {"schema": 1, "name": "desk", "labels": ["a", "b"], "method": method, "model": model}
    make_job_bundle(JobSpec.model_validate(said | vocabulary | more), out.parent, out)
    return read_job_bundle(out)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random BERT, as transformers saves it."""
    import torch
    from transformers import AutoModel, BertConfig

    folder = tmp_path_factory.mktemp("base") / "bert"
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": INNER, "num_attention_heads": 2}
    torch.manual_seed(1)
    AutoModel.from_config(BertConfig(vocab_size=len(PIECES), max_position_embeddings=PLACES, **sizes)).save_pretrained(
        folder
    )
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return folder


def sent(bundle: JobBundle) -> int:
    """The bytes that one member sends after a real local training, in a cohort of three; the keys are not counted."""
    job = bundle.document
    tokenizer = wordpiece_tokenizer(OWN) if bundle.tokenizer is None else bundle.tokenizer
    protection = protection_of(job, len(EXAMPLES))
    update = train_update(
        job=job,
        manifest=bundle.manifest,
        corpus=EncodedExamples(EXAMPLES, job, tokenizer),
        base=bundle.weights,
        protection=protection,
        private=first_private(job, tokenizer, bundle.private, None, base_tokenizer=bundle.base_tokenizer),
        frozen=bundle.frozen,
        random=SeededRandom("training"),
        seed=1,
        device="cpu",
        progress=lambda *_: None,
        cancelled=lambda: False,
    )
    moved = bundle.manifest.unflatten(update.change.astype(np.float32))
    # A head that stood still, or a matrix, would be bytes for nothing. LoRA's `down` follows once `up` has moved.
    assert all(each.any() for name, each in moved.items() if ".down." not in name and "bias" not in name)
    vector = protection.encode(job, update, 3, SeededRandom("rounding"))
    return len(pack_in_place(vector, layout_of(job, 3).bits))


@pytest.mark.parametrize("own", [False, True], ids=["same", "own"])
@pytest.mark.parametrize(
    ("injection", "changes", "kept"),
    [(LORA, 2 * WIDTH, 0), (LORA | {"train": "up"}, WIDTH, WIDTH), ("none", 0, 0)],
    ids=["both", "up", "head"],
)
@pytest.mark.parametrize("mechanism", ["none", "gaussian-update"])
def test_a_member_sends_what_the_injection_trains_and_fetches_the_rest_once(
    base: Path, tmp_path: Path, injection: Any, changes: int, kept: int, own: bool, mechanism: str
) -> None:
    """changes, kept: values of a matrix's change, for each rank, that are sent and that stay as they are drawn."""
    noise: Any = {"name": mechanism, "noise_multiplier": 16.0, "lot": 100} if mechanism != "none" else mechanism
    if noise != "none" and injection == LORA:
        injection = LORA | {"train": "both"}
    training = {"learning_rate": 0.05, "batch": 4, "epochs": 4}
    bundle = bundle_of(base, tmp_path / "bundle", "fedvocab", injection, own=own, mechanism=noise, training=training)
    job, head = bundle.document, 2 * WIDTH + 2
    # Queries and values of each layer.
    assert job.values == 2 * LAYERS * RANK * changes + head
    # Each layer: four attention matrices, the two beside them, and two norms. Before them: places, segments, a norm.
    layer = 4 * (WIDTH + 1) * WIDTH + 2 * INNER * WIDTH + INNER + WIDTH + 4 * WIDTH
    encoder = LAYERS * layer + (PLACES + 2) * WIDTH + 2 * WIDTH
    assert job.frozen is not None
    assert job.frozen.values == encoder + 2 * LAYERS * RANK * kept
    assert job.frozen.values == sum(each.size for each in bundle.frozen.values())
    layout = layout_of(job, 3)
    assert sent(bundle) == packed_size(layout.values, layout.bits)
    # Weight, loss, right answers and rows go beside the change, if nothing is noised.
    assert layout.values == job.values + (4 if mechanism == "none" else 0)
    told = Plan(job, bundle.manifest, ()).as_json()
    assert told["bytes_a_round"] == sent(bundle)
    assert told["frozen"] == job.frozen.values
    # A version has no more than a member's change.
    assert len(bundle.weights) == 4 * job.values


def page_rows() -> dict[str, list[str]]:
    """The cells of the page's table of bytes, by the first one."""
    text = PAGE.read_text(encoding="utf-8").split("\n## Bytes\n", 1)[1].split("\n## ", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    return {first: others for first, *others in cells[2:]}


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason="the package with the pretrained encoder is not installed")
def test_the_page_gives_the_bytes_of_minilm(tmp_path: Path) -> None:
    written = page_rows()
    assert written.keys() == SHARED.keys()
    kept = set()
    for row, (method, injection) in SHARED.items():
        bundle = bundle_of(minilm(), tmp_path / method / str(len(kept)) / "bundle", method, injection)
        job, layout = bundle.document, layout_of(bundle.document, 10)
        found = [job.values, packed_size(layout.values, layout.bits)]
        frozen = "" if job.frozen is None else f"{job.frozen.values:,}"
        assert written[row] == [*(f"{each:,}" for each in found), frozen], row
        if bundle.private is not None:
            kept.add(bundle.private[0].values)
    # "The member keeps 11.7 million values of the embedding with the base's 30,522 pieces, or 384 for each entry".
    assert kept == {30_522 * 384}
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "keeps 11.7 million values of the embedding with the base's 30,522 pieces, or 384 for each entry" in page
