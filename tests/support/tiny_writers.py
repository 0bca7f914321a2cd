"""Tokenizers of models that write, as published files have them, with a few hundred entries."""

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.random_causal import random_causal

# One of each form.
FORMS = ("gpt2", "smollm2", "llama3", "qwen", "llama2", "mistral")
SPECIALS = {
    "gpt2": ("<|endoftext|>",),
    "smollm2": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama2": ("<unk>", "<s>", "</s>"),
    "mistral": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
}
# The built-in template that a base of this form was trained with.
TEMPLATE_OF = {
    "gpt2": "plain",
    "smollm2": "chatml",
    "llama3": "llama3",
    "qwen": "chatml",
    "llama2": "plain",
    "mistral": "mistral",
}
_SENTENCES = (
    "What is the capital of France? The capital is Paris.",
    "the restaurant is near the river, and the food is good",
    "12 people came at 1,234 o'clock; they're late! user assistant system",
) * 8
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS = {"llama3": r"\p{N}{1,3}", "qwen": r"\p{N}"}


@functools.cache
def writer_tokenizer(form: str) -> bytes:
    """A tokenizer.json with everything that the library writes into one."""
    made = _pieces(form) if form in ("llama2", "mistral") else _bytes(form)
    return made.to_str().encode()


def _bytes(form: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    match form:
        case "gpt2":
            made.pre_tokenizer = level
        case "smollm2":
            made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
        case _:
            pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_DIGITS[form]}|{_REST}"
            made.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
    if form == "qwen":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    made.train_from_iterator(_SENTENCES, trainer)
    made.add_special_tokens(list(SPECIALS[form]))
    if form == "llama3":
        made.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A",
            special_tokens=[("<|begin_of_text|>", made.token_to_id("<|begin_of_text|>"))],
        )
        whole = json.loads(made.to_str())
        whole["model"]["ignore_merges"] = True
        made = Tokenizer.from_str(json.dumps(whole))
    return made


def _pieces(form: str) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    trained.train_from_iterator(_SENTENCES, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learnt = json.loads(trained.to_str())["model"]
    entries = [*SPECIALS[form], *(f"<0x{number:02X}>" for number in range(256)), *learnt["vocab"]]
    vocabulary = {entry: at for at, entry in enumerate(entries)}
    merges = [tuple(pair) for pair in learnt["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if form == "llama2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(list(SPECIALS[form]))
    return made


def saved_writer(folder: Path, form: str = "smollm2", family: str = "llama", *, seed: int = 0, spare: int = 0) -> Path:
    """A random model of two layers with this tokenizer, in a folder as transformers saves it.

    `spare` rows of its table have no entry.
    """
    tokenizer = writer_tokenizer(form)
    words = 1 + spare + max(Tokenizer.from_buffer(tokenizer).get_vocab(with_added_tokens=True).values())
    random_causal(family, words=words, seed=seed).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder
