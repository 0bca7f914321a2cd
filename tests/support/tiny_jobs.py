"""Jobs of every kind of text classifier with a base of the library's, small enough to export in a second."""

import random
from pathlib import Path

import numpy as np
import torch

from export.bundle import make_job_bundle, read_job_bundle
from learning.backbones.stored import read_backbone
from learning.models.assembly import assembled
from learning.text.corpus import encoder_of
from tacit.job import JobSpec
from tests.support.tiny_models import saved, stored_in_halves

LABELS = ["good", "bad", "so `so` | ü"]
ENCODERS = {"bert": {}, "roberta": {}, "distilbert": {}}
CLOZE = {
    "name": "cloze",
    "template": "{text} It was {mask}.",
    "verbaliser": {LABELS[0]: ["great", "good"], LABELS[1]: "bad", LABELS[2]: "maybe"},
}
LORA = {"name": "lora", "rank": 2, "alpha": 3}
# Family, injection, task.
PROMPTED = {
    "prompt": ("bert", {"name": "prompt-tuning", "tokens": 4}, {"name": "head"}),
    "prompt-pairs": ("bert", {"name": "prompt-tuning", "tokens": 3}, {"name": "head", "pairs": True}),
    "prompt-roberta": ("roberta", {"name": "p-tuning", "tokens": 3, "hidden": 6}, {"name": "head", "pairs": True}),
    "prompt-electra": ("electra", {"name": "prompt-tuning", "tokens": 3}, {"name": "head"}),
    "cloze-bert": ("bert", {"name": "prompt-tuning", "tokens": 3}, CLOZE),
    "cloze-pairs": (
        "t5",
        {"name": "prefix-tuning", "tokens": 3},
        {**CLOZE, "template": "{text_b} ? {mask} , {text}"},
    ),
    "lora-bert": ("bert", LORA, CLOZE),
    "lora-roberta": ("roberta", LORA, CLOZE),
    "lora-distilbert": ("distilbert", LORA, CLOZE),
    "lora-t5": ("t5", LORA, CLOZE),
    "lora-t5-v1.1": ("t5-v1.1", LORA, CLOZE),
    "lora-head": ("bert", LORA, {"name": "head"}),
    "lora-pairs": ("electra", LORA, {"name": "head", "pairs": True}),
    "lora-all": (
        "bert",
        {**LORA, "matrices": ["query", "key", "value", "output", "up", "down"], "last_layers": 1},
        CLOZE,
    ),
    "lora-layers": ("roberta", {**LORA, "matrices": ["value", "up"]}, {"name": "head", "layers": [0, 1]}),
    "bitfit-head": ("distilbert", "bitfit", {"name": "head"}),
    "bitfit-layers": ("electra", {"name": "bitfit", "last_layers": 1}, {"name": "head", "layers": [1, 2]}),
    "none-layers": ("bert", "none", {"name": "head", "start": "labels"}),
    "none-pairs": ("roberta", "none", {"name": "head", "layers": [1, 2], "pairs": True}),
}


def random_texts(pairs: bool, count: int = 24) -> list:
    """Texts of random words of every length, and some that spell special tokens."""
    draw, words = random.Random(3), ["great", "bad", "good", "film", "movie", "is", "was", "it", "the", "zebra"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 9))) for _ in range(count)]
    texts += ["[MASK] film </s> <mask>", "  a  film ", "ü great!"]
    if not pairs:
        return [*texts, "film " * 60]
    return list(zip(texts, reversed(texts), strict=True))


class TinyJob:
    """A job, the folder of its base, and our own module with random weights.

    `halves`: the base of a prompted job is stored in bfloat16.
    """

    def __init__(self, name: str, folder: Path, *, halves: bool = False) -> None:
        if name in ENCODERS:
            spec = self._encoder(name, folder)
        else:
            kind, injection, task = PROMPTED[name]
            saved(folder / "base", kind)
            if halves:
                stored_in_halves(folder / "base")
            model = {"architecture": "prompted", "base": "base", "max_tokens": 24, "injection": injection, "task": task}
            spec = {"model": model}
        whole = {"schema": 1, "name": name.replace(".", "-"), "labels": LABELS, "seed": 2} | spec
        make_job_bundle(JobSpec.model_validate(whole), folder, folder / "bundle")
        self.name, self.folder, self.job = name, folder, read_job_bundle(folder / "bundle")
        document = self.document = self.job.document
        self.backbone = read_backbone(self.job.backbone, document.model.config) if self.job.backbone else None
        start = self.job.manifest.decode(self.job.weights)
        # Far from the start, where LoRA changes nothing.
        noise = np.random.default_rng(1).standard_normal(len(start)).astype(np.float32)
        self.weights = (start + 0.3 * noise).astype("<f4").tobytes()
        self.encoder = encoder_of(document, self.job.tokenizer)
        self.module, _ = assembled(
            document,
            self.encoder,
            self.job.manifest,
            self.job.manifest.decode(self.weights),
            {},
            self.backbone,
            self.job.frozen,
        )
        texts = random_texts(self.encoder.pairs)
        if self.encoder.pairs:
            # Of a pair that is too long, the tokenizers library keeps one token more or less of a text.
            texts = [text for text in texts if self.encoder.encode([text]).shape[1] < self.encoder.max_tokens]
        self.texts = texts

    @staticmethod
    def _encoder(kind: str, folder: Path) -> dict:
        saved(folder / "base", kind, words=60, tokenizer=False, **({"bare": True} if kind != "distilbert" else {}))
        words = [
            *"![]</>",
            "great",
            "bad",
            "good",
            "film",
            "movie",
            "is",
            "was",
            "it",
            "the",
            "yes",
            "no",
            "maybe",
            "s",
        ]
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
        pieces += [f"unused{number}" for number in range(60 - len(pieces))]
        (folder / "base" / "vocab.txt").write_text("\n".join(pieces) + "\n")
        (folder / "base" / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        return {
            "model": {"architecture": "transformer", "base": "base", "max_tokens": 20},
            "vocabulary": {"kind": "wordpiece", "file": "base/vocab.txt"},
        }

    def logits(self) -> np.ndarray:
        with torch.no_grad():
            found = [self.module(torch.from_numpy(self.encoder.encode([text]))) for text in self.texts]
        return torch.cat(found).numpy()
