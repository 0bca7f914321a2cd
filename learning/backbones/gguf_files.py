"""Makes a checkpoint folder of a GGUF file, the form in which llama.cpp keeps language models.

Values become float32: those of a quantised file are the ones that it computes with, so nothing is lost that the file
still has. The file is mapped, and one tensor is in memory at a time. Names, and the order in which llama.cpp stores a
head's rows, are put back into transformers' own. Config and tokenizer are read by transformers (`gguf_file=`).

Guarantees: nothing of the file is run. Its head is checked before a library reads it
(`learning.backbones.gguf_header`), and a tensor's shape before its values are read. Files beside it have no effect. A
tensor that is not known here, is missing, or has another shape than the config says, is refused, since a model without
it would compute something else.

Leaves to others: where the folder goes and whether there is room (`learning.backbones.collection`).
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from learning.backbones.checkpoint import WEIGHTS
from learning.backbones.gguf_header import check_header
from learning.backbones.layout import BackboneInvalid, Shape, checked_config, layout_of
from learning.causal.config import CausalConfigInvalid, flat_config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Gguf", "read_gguf"]

# The families by their names in a GGUF file. Mistral's models are "llama" there.
ARCHITECTURES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
_LINK = "model.gguf"
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LLAMA = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Gguf:
    """An opened GGUF file.

    Attributes:
        path: The file.
        config: The backbone's config, as in a job's document.
        size: Bytes of the checkpoint that is made of it.
    """

    path: Path
    config: Mapping[str, Any]
    size: int
    _reader: Any
    _library: Any

    def write(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """Writes config.json, the tokenizer's files and model.safetensors into an empty folder.

        Args:
            folder: The folder.
            progress: Called with bytes written so far, and all.

        Raises:
            BackboneInvalid: A tensor is missing, unknown or of an unknown type, or the tokenizer cannot be read.
            OSError: The disk refused a write.
        """
        self._library.save_pretrained(folder)
        self._write_tokenizer(folder)
        layout = layout_of(self.config)
        begins = {name: place - len(layout.header) for name, place in layout.places.items()}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        entries |= json.loads(layout.header[8:])
        head = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        lacking, written = set(layout.shapes), 0
        with (folder / WEIGHTS).open("xb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name, values in self._tensors(layout.shapes):
                lacking.discard(name)
                file.seek(8 + len(head) + begins[name])
                file.write(values.astype("<f4", order="C", copy=False).data)
                progress(written := written + values.nbytes, self.size)
        if lacking:
            raise BackboneInvalid(f"{self.path} lacks {len(lacking)} tensors, {min(lacking)} first; get the file again")

    def _tensors(self, shapes: Mapping[str, Shape]) -> "Iterator[tuple[str, NDArray[np.float32]]]":
        """Yields each tensor by transformers' name. It has one of these shapes, and no name comes twice."""
        import gguf

        for tensor in self._reader.tensors:
            name = self._name(tensor.name)
            if name not in shapes:
                raise BackboneInvalid(f"{self.path} has a tensor that its config does not need, {name}; choose another")
            # llama.cpp names the fastest dimension first.
            shape = tuple(int(each) for each in reversed(tensor.shape))
            if self._is_transposed(tensor.name, len(shape)):
                shape = shape[::-1]
            if shape != shapes[name]:
                raise BackboneInvalid(
                    f"{name} in {self.path} has shape {shape}, and the config needs {shapes[name]}; choose another"
                )
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise BackboneInvalid(
                    f"{tensor.name} in {self.path} is quantised as {tensor.tensor_type.name}, which the installed gguf "
                    "cannot read; choose a file in F16, BF16, Q8_0, Q4_K_M or another common type"
                ) from None
            yield name, self._turned(tensor.name, values)

    def _name(self, stored: str) -> str:
        gpt2 = self.config["model_type"] == "gpt2"
        block = _BLOCK.fullmatch(stored)
        if block is not None and (part := (_GPT2_BLOCK if gpt2 else _LLAMA_BLOCK).get(block[2])) is not None:
            return f"{'transformer.h' if gpt2 else 'model.layers'}.{block[1]}.{part}.{block[3]}"
        owner, _, kind = stored.rpartition(".")
        if (found := (_GPT2 if gpt2 else _LLAMA).get(owner)) is not None and kind in ("weight", "bias"):
            return f"{found}.{kind}"
        raise BackboneInvalid(
            f"{self.path} has a tensor that is not known here, {stored[:60]!r}, so the model would compute something "
            "else; choose another, or a folder that save_pretrained wrote"
        )

    def _is_transposed(self, stored: str, dimensions: int) -> bool:
        # GPT-2 of transformers multiplies from the right.
        name, _, last = stored.rpartition(".")
        matrix = last == "weight" and name.startswith("blk.") and dimensions == 2
        return matrix and self.config["model_type"] == "gpt2"

    def _turned(self, stored: str, values: "NDArray[np.float32]") -> "NDArray[np.float32]":
        if self._is_transposed(stored, values.ndim):
            return values.T
        name = stored.rpartition(".")[0]
        if self.config["model_type"] not in ("llama", "mistral") or not name.endswith((".attn_q", ".attn_k")):
            return values
        # llama.cpp stores the rows that a rotation pairs next to each other; transformers in two halves of the head.
        heads = self.config["num_attention_heads" if name.endswith("attn_q") else "num_key_value_heads"]
        pairs = values.reshape(heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _write_tokenizer(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            with _alone(self.path) as beside:
                tokenizer = AutoTokenizer.from_pretrained(beside, gguf_file=_LINK, local_files_only=True)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # From a dozen converters: they have no common class.
            # The library also says with an OSError what is wrong with a file, and that one has no number.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise BackboneInvalid(
                f"the tokenizer in {self.path} cannot be read ({_one_line(error)}); get the file again, or save the "
                "model it came from with save_pretrained and add that folder"
            ) from error
        if not (folder / "tokenizer.json").is_file():
            raise BackboneInvalid(
                f"the tokenizer in {self.path} cannot be written as tokenizer.json; choose another model"
            )


def read_gguf(path: Path) -> Gguf:
    """Opens a GGUF file, reads its config and looks at no value.

    Raises:
        BackboneInvalid: It is no GGUF file, it is cut short, or its architecture, config or a type in it is not known.
        ImportError: The package gguf is not installed.
        OSError: The file cannot be opened.
    """
    import gguf

    check_header(path)
    try:
        reader = gguf.GGUFReader(path)
        named = reader.get_field("general.architecture")
        architecture = str(named.contents()) if named is not None else "not named"
    except Exception as error:  # Whatever a damaged file makes its reader do.
        if isinstance(error, OSError):
            raise
        if "GGMLQuantizationType" in str(error):
            raise BackboneInvalid(
                f"{path} is quantised in a type that the installed gguf does not know ({_one_line(error)}); choose a "
                "file in F16, BF16, Q8_0, Q4_K_M or another common type"
            ) from error
        raise BackboneInvalid(f"{path} is damaged or cut short ({_one_line(error)}); get the file again") from error
    if architecture not in ARCHITECTURES:
        raise BackboneInvalid(
            f"{path} has the architecture {architecture[:40]!r}, which is not supported; choose one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    library = _library_config(path, architecture, reader)
    raw = library.to_dict()
    try:
        config = checked_config(flat_config(raw) | {"vocab_size": raw.get("vocab_size")})
    except (CausalConfigInvalid, BackboneInvalid) as error:
        raise BackboneInvalid(f"{path}: {str(error).removeprefix('backbone: ')}") from None
    return Gguf(path, config, layout_of(config).size, reader, library)


def _library_config(path: Path, architecture: str, reader: Any) -> Any:
    from transformers import AutoConfig

    try:
        with _alone(path) as beside:
            library: Any = AutoConfig.from_pretrained(beside, gguf_file=_LINK, local_files_only=True)
        library.dtype = "float32"
        # transformers leaves these two as they are by default.
        width = reader.get_field(f"{architecture}.attention.key_length")
        if width is not None and library.model_type != "gpt2":
            library.head_dim = int(width.contents())
        if library.model_type == "gpt2" and (context := reader.get_field("gpt2.context_length")) is not None:
            library.n_positions = int(context.contents())
    except Exception as error:  # As above.
        raise BackboneInvalid(f"the config in {path} cannot be read ({_one_line(error)}); choose another") from error
    return library


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """A folder with `_LINK` to the file and nothing else: the library prefers a tokenizer that lies beside it."""
    with tempfile.TemporaryDirectory(prefix="tacit-gguf-") as made:
        (Path(made) / _LINK).symlink_to(path.absolute())
        yield Path(made)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
