"""Language models with two layers and tokenizers with a few hundred entries, in folders as transformers saves them."""

import functools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("bert", "roberta", "distilbert", "electra", "t5", "t5-v1.1")
# One of each family of tokenizers.
FAMILIES = ("bert", "roberta", "t5")

_SENTENCES = (
    "a great film, it was good and terrible, great and bad",
    "the movie is bad. It was great? Yes, no, maybe! no",
    "Premise and hypothesis: yes or no. word word word",
) * 8
# Whole words of the two vocabularies defined here.
_PIECES = "great,bad,good,terrible,film,movie,is,was,it,the,yes,no,and,word,mask,first,second,maybe"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@functools.cache
def tokenizer_of(family: str) -> bytes:
    """A tokenizer.json with everything that the library writes into one."""
    made = {"bert": _word_pieces, "roberta": _byte_pairs, "t5": _unigram}[family]()
    return made.to_str().encode()


def _word_pieces() -> Tokenizer:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,?!:[]{}<>/_", *_PIECES.split(",")]
    pieces += [*_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    made = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", pieces.index("[CLS]")), ("[SEP]", pieces.index("[SEP]"))]
    )
    return made


def _byte_pairs() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        show_progress=False,
    )
    made.train_from_iterator(_SENTENCES, trainer)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


def _unigram() -> Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(f"▁{word}", -4.0 - at / 8) for at, word in enumerate(_PIECES.split(","))]
    pieces += [("great", -7.0), (".", -4.0), (",", -4.0), ("?", -5.0), *((letter, -8.0) for letter in _LETTERS)]
    pieces += [(f"<extra_id_{number}>", 0.0) for number in reversed(range(4))]
    made = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    made.add_special_tokens(["<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in range(4))])
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return made


def library_model(kind: str, *, words: int = 420, bare: bool = False, seed: int = 3):
    """A random model of the library. With `bare`, an encoder without the language model's head."""
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    if kind.startswith("t5"):
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} if kind == "t5-v1.1" else {}
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=words, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, **gated)
        )
    elif kind == "distilbert":
        config = AutoConfig.for_model(
            kind, dim=16, n_layers=2, n_heads=4, hidden_dim=24, vocab_size=words, max_position_embeddings=64
        )
        model = AutoModelForMaskedLM.from_config(config)
    else:
        config = AutoConfig.for_model(
            kind,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            vocab_size=words,
            max_position_embeddings=64,
            **({"embedding_size": 12} if kind == "electra" else {}),
        )
        model = (AutoModel if bare else AutoModelForMaskedLM).from_config(config)
    with torch.no_grad():
        # Give biases and normalisations values that differ from the defaults.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@functools.cache
def _files(kind: str, max_shard_size: str, **how) -> dict[str, bytes]:
    """A saved model's files. Many tests start from the same one, and making it costs 40 ms of CPU."""
    with tempfile.TemporaryDirectory() as folder:
        library_model(kind, **how).save_pretrained(folder, max_shard_size=max_shard_size)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def saved(folder: Path, kind: str, *, tokenizer: bool = True, max_shard_size: str = "1GB", **how) -> Path:
    """Saves a model and its tokenizer to the folder, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in _files(kind, max_shard_size, **how).items():
        (folder / name).write_bytes(data)
    # As the first call does, whose files these are.
    torch.manual_seed(how.get("seed", 3))
    if tokenizer:
        family = {"distilbert": "bert", "electra": "bert", "t5-v1.1": "t5"}.get(kind, kind)
        (folder / "tokenizer.json").write_bytes(tokenizer_of(family))
    return folder


def stored_in_halves(folder: Path) -> None:
    """Stores a saved model in bfloat16, as many published ones are."""
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: each.bfloat16() for name, each in load_file(file).items()}, file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))


def changed(tokenizer: bytes, *keys: str, value: object) -> bytes:
    """A tokenizer.json with one value replaced."""
    whole = json.loads(tokenizer)
    inner = whole
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(whole).encode()
