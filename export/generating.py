"""Writes text with an exported causal model: uses onnxruntime, tokenizers and numpy, never the training stack.

Guarantees: every file is checked against its digest before text is returned; the tokens of a response depend on its own
dialogue, the sampling, the seed and the dialogue's place, and with several at once on nothing else but the last digits
of float32; two places share no random numbers; a stream yields text only once it is certain: whole characters, and
nothing that a stop string may begin with.

Order of a response: the prompt's ids, prefill in pieces of `_PIECE` tokens, then one token a step until the model ends
the response, a stop string appears, or the limit is reached. The cache's memory is allocated once and written in place.

Left to others: what the ids of a dialogue are (`learning.text.dialogue`).
"""

import io
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from export.causal_file import FileRefused, check_causal_file
from learning.text.dialogue import DialogueEncoder
from learning.text.turns import Dialogue
from tacit.bundle import CACHE_FILE, WEIGHTS_FILE, BundleInvalid, GeneratorFacts, read_bundle, read_index
from toolkit.several import check_several
from toolkit.whole import whole

# `Dialogue` is re-exported for commands, which may import from this package only.
__all__ = [
    "Cache",
    "Dialogue",
    "Generator",
    "ModelFailed",
    "PromptTooLong",
    "Response",
    "Sampling",
    "TextStream",
    "Writing",
    "empty_cache",
    "open_session",
]

# Tokens of a prompt that go through the model at once. More need memory, and are not faster.
_PIECE = 512
# So that a prompt that is too long is refused, and not cut.
_UNCUT = 1 << 40
# What a tokenizer writes for bytes that are no whole character.
_BROKEN = "\ufffd"

Ended = Literal["end", "stop", "length"]


class PromptTooLong(ValueError):
    """The model has no room for a response. The text says how long the prompt may be."""


class ModelFailed(RuntimeError):
    """The model gave no logits. The text says what to do."""


# ---- choosing a token ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from its logits.

    Args:
        temperature: what logits are divided by; 0: the token with the largest logit.
        top_k: choose among this many tokens with the largest logits. None: among all.
        top_p: choose among the fewest tokens whose probabilities reach this sum. None: among all.
        seed: of the random numbers, of which each response has its own by its place.

    Raises:
        ValueError: a value is out of bounds.

    Source: Holtzman et al. 2020 (top-p).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature is {self.temperature:g}; choose one from 0 (no chance) to 100")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; choose at least 1, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p:g}; choose one above 0 and up to 1, or leave it out")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; choose one from 0 to 2^64 - 1")

    def random(self, place: int = 0) -> np.random.Generator:
        """The random numbers of the response at a place among prompts that are answered together, from 0.

        Responses at different places share none: otherwise figures over prompts would be those of one draw.
        """
        return np.random.Generator(np.random.Philox(key=np.array([self.seed, place], dtype=np.uint64)))

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """(V,) The probability of each token, for a temperature above 0."""
        away = logits.astype(np.float64)
        # From the largest: no temperature, however low, makes that one infinite.
        with np.errstate(over="ignore"):
            scaled = (away - away.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(scaled):
            least = np.partition(scaled, -self.top_k)[-self.top_k]
            scaled[scaled < least] = -np.inf
        odds = np.exp(scaled)
        odds /= odds.sum()
        if self.top_p is not None and self.top_p < 1:
            order = np.argsort(-odds, kind="stable")
            # A token is kept while those before it do not reach the sum.
            before = np.cumsum(odds[order]) - odds[order]
            odds[order[before >= self.top_p]] = 0
            odds /= odds.sum()
        return np.asarray(odds)

    def choose(self, logits: NDArray[np.float32], random: np.random.Generator) -> int:
        """The next token.

        Args:
            logits: (V,).
            random: from `random`; it moves on by one number unless the temperature is 0.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        bounds = np.cumsum(self.probabilities(logits))
        found = int(np.searchsorted(bounds, random.random() * bounds[-1], side="right"))
        return min(found, len(bounds) - 1)


# ---- text as it becomes certain --------------------------------------------------------------------------------


class TextStream:
    """Turns tokens into text piece by piece. All pieces together are the decoded response, up to a stop string."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        """Starts a response.

        Args:
            decode: the text of a row of tokens. Rows joined must have the texts joined, except inside a character.
            stop: strings at which the response ends; they are no part of it.

        Raises:
            ValueError: a stop string is empty, or one string is given for a list.
        """
        check_several(stop, "stop")
        if "" in stop:
            raise ValueError("a stop string is empty; give at least one character, or leave it out")
        self._decode, self._stop = decode, tuple(stop)
        # Tokens whose text may depend on the next one.
        self._pending: list[int] = []
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token, and returns the text that is now certain."""
        self._pending.append(token)
        text = self._decode(self._pending)
        # The next token may complete the character.
        return "" if text.endswith(_BROKEN) else self._take(text)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        found = self._take(self._decode(self._pending))
        if self.stopped:
            return found
        rest, self._held = self._held, ""
        return found + rest

    def _take(self, text: str) -> str:
        self._pending.clear()
        self._held += text
        if self.stopped:
            return ""
        places = [place for place in map(self._held.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            certain, self._held = self._held[: min(places)], ""
            return certain
        kept = max((_overlap(self._held, each) for each in self._stop), default=0)
        certain = self._held[: len(self._held) - kept]
        self._held = self._held[len(self._held) - kept :]
        return certain


def _overlap(text: str, stop: str) -> int:
    """How many characters at the text's end may be the beginning of a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)


# ---- the model -------------------------------------------------------------------------------------------------


class Cache:
    """The model with the memory of one batch's cache."""

    def __init__(self, session: Any, start: Mapping[str, NDArray[np.float32]], batch: int, room: int) -> None:
        """Allocates the cache.

        Args:
            session: the model.
            start: keys and values (1, heads, P, size) with which every row begins, by the graph's names.
            batch: number of rows.
            room: positions of each row.

        Raises:
            ModelFailed: there is not so much memory.
        """
        self._session, self._begins = session, next(iter(start.values())).shape[2]
        self._memory = {}
        for name, values in start.items():
            _, heads, count, size = values.shape
            try:
                memory = self._memory[name] = np.zeros((batch, heads, room, size), dtype=np.float32)
            except (MemoryError, ValueError) as error:
                raise ModelFailed(
                    f"there is no memory for {batch * room:,} positions; write fewer tokens, or fewer responses at once"
                ) from error
            memory[:, :, :count] = values
        self._vocabulary = session.get_outputs()[0].shape[-1]
        self.lengths = np.full(batch, self._begins, dtype=np.int64)
        self._whole = self._bound(slice(0, batch))

    def read(self, row: int, ids: Sequence[int], *, every: bool = False) -> NDArray[np.float32]:
        """Reads a row's new tokens. Returns logits (1, V) of the last, or (S, V) of all."""
        bound, rows = self._bound(slice(row, row + 1)), slice(row, row + 1)
        found = []
        for first in range(0, len(ids), _PIECE):
            piece = np.array([ids[first : first + _PIECE]], dtype=np.int64)
            self.lengths[row] += piece.shape[1]
            wanted = np.arange(piece.shape[1]) if every else np.array([piece.shape[1] - 1])
            found.append(self._run(bound, piece, self.lengths[rows], wanted[None])[0])
        return np.concatenate(found) if every else found[-1]

    def step(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Reads one new token of each row, (B,), and returns logits (B, V)."""
        self.lengths += 1
        places = np.zeros((len(tokens), 1), dtype=np.int64)
        return self._run(self._whole, tokens[:, None], self.lengths, places)[:, 0]

    def _bound(self, rows: slice) -> Any:
        from onnxruntime import OrtValue

        bound = self._session.io_binding()
        for name, memory in self._memory.items():
            # Rows of a batch are whole pieces of memory, so a row's own prefill writes into the batch's.
            shared = OrtValue.ortvalue_from_numpy(memory[rows])
            bound.bind_ortvalue_input(name, shared)
            bound.bind_ortvalue_output(name.replace("past.", "present."), shared)
        return bound

    def _run(
        self, bound: Any, ids: NDArray[np.int64], lengths: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        from onnxruntime import OrtValue

        logits = np.empty((*wanted.shape, self._vocabulary), dtype=np.float32)
        given = {"ids": ids, "lengths": lengths, "wanted": wanted}
        for name, values in given.items():
            bound.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values, dtype=np.int64)))
        bound.bind_ortvalue_output("logits", OrtValue.ortvalue_from_numpy(logits))
        try:
            self._session.run_with_iobinding(bound)
        except Exception as error:
            # onnxruntime's own errors have no common base.
            raise ModelFailed("onnxruntime cannot run the model on this text; export the model again") from error
        if not np.isfinite(logits).all():
            raise ModelFailed("the model's logits are not numbers; export another version")
        return logits


@dataclass(frozen=True, slots=True)
class Response:
    """What the model wrote.

    Args:
        text: the response.
        ended: `end`: the model ended it; `stop`: a stop string came; `length`: it reached the limit.
        prompt_tokens: tokens of the prompt.
        tokens: tokens that the model wrote, without the end.
    """

    text: str
    ended: Ended
    prompt_tokens: int
    tokens: int


class Writing:
    """A response as it is written: iterate over its pieces of text. `response` is there once the iteration ends.

    Iterating again goes on where it stopped.
    """

    def __init__(self, row: "_Row", step: Callable[[int], NDArray[np.float32]], logits: NDArray[np.float32]) -> None:
        """Starts after the prefill. logits: (V,) of the first new token."""
        self._row = row
        self._said: list[str] = []
        # One for all iterations. It holds no reference to this object, which would keep the cache's memory from being
        # freed at once.
        self._pieces = _pieces_of(row, step, logits, self._said)

    @property
    def response(self) -> Response:
        """What was written so far."""
        return self._row.response("".join(self._said))

    def __iter__(self) -> Iterator[str]:
        """The pieces of text that were not taken yet, as they become certain."""
        return self._pieces


def _pieces_of(
    row: "_Row", step: Callable[[int], NDArray[np.float32]], logits: NDArray[np.float32], said: list[str]
) -> Iterator[str]:
    while True:
        piece = row.take(logits)
        if piece:
            said.append(piece)
            yield piece
        if row.ended is not None:
            return
        logits = step(row.last)


class _Row:
    """A response that is being written."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        end_ids: frozenset[int],
        prompt_tokens: int,
        limit: int,
        sampling: Sampling,
        stop: Sequence[str],
        place: int = 0,
    ) -> None:
        self._stream, self._end_ids, self._prompt_tokens = TextStream(decode, stop), end_ids, prompt_tokens
        self._limit, self._sampling, self._random = limit, sampling, sampling.random(place)
        self._tokens = self.last = 0
        self._begun = False
        self.ended: Ended | None = None

    def take(self, logits: NDArray[np.float32]) -> str:
        """Chooses the next token from logits (V,), and returns the text that is now certain.

        Some templates have a space before a response. It is no part of the text.
        """
        piece = self._certain(logits)
        if not self._begun:
            piece = piece.lstrip(" ")
            self._begun = bool(piece)
        return piece

    def _certain(self, logits: NDArray[np.float32]) -> str:
        self.last = self._sampling.choose(logits, self._random)
        if self.last in self._end_ids:
            self.ended = "end"
            return self._rest()
        self._tokens += 1
        piece = self._stream.push(self.last)
        if self._stream.stopped:
            self.ended = "stop"
        elif self._tokens == self._limit:
            self.ended = "length"
            piece += self._rest()
        return piece

    def _rest(self) -> str:
        found = self._stream.finish()
        if self._stream.stopped:
            self.ended = "stop"
        return found

    def response(self, text: str) -> Response:
        """The response with this text."""
        return Response(text, self.ended or "length", self._prompt_tokens, self._tokens)


class Generator:
    """A loaded model that writes. `facts` names its job and version."""

    def __init__(
        self,
        session: Any,
        encoder: DialogueEncoder,
        facts: GeneratorFacts,
        start: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """Joins the parts. start: as for a cache, keys and values of the soft prompt's positions."""
        self._session, self._encoder, self.facts, self._start = session, encoder, facts, start

    @classmethod
    def load(cls, folder: Path, *, threads: int = 0, once: bool = False) -> Self:
        """Reads and checks a bundle.

        Args:
            folder: the bundle.
            threads: threads of one step; 0: one for each core.
            once: for one response. Matrices of float32 are then used as they are in the file, so that the first token
                comes sooner, in half of the memory, and each further one takes a tenth longer.

        Raises:
            BundleInvalid: the folder is no such bundle, is damaged, or its files do not fit together.
        """
        stated = read_index(folder, "generator").generator
        # int8 without its packed form takes twenty times as long.
        packed = not once or stated is None or stated.precision != "float32"
        with ThreadPoolExecutor(1) as other:
            # Loaded while the files are checked, and not used before.
            opening = other.submit(open_session, folder / "model.onnx", threads, packed=packed)
            bundle = read_bundle(folder, "generator", unread=(WEIGHTS_FILE,))
            facts = bundle.index.generator
            if facts is None:  # The index has checked this; for the type checker.
                raise BundleInvalid(f"{folder} does not say where its model came from; export it again")
            try:
                encoder = DialogueEncoder(bundle.files["tokenizer.json"], facts.template, _UNCUT)
            except ValueError as error:
                raise BundleInvalid(f"{folder} cannot be used: {error}; export the model again") from error
            session = opening.result()
        words = _vocabulary(folder, session)
        if encoder.vocabulary_size > words or max(facts.end_ids) >= words:
            raise BundleInvalid(f"{folder} has tokens that its model does not know; export the model again")
        start = _starting_cache(folder, session, facts.soft, bundle.files.get(CACHE_FILE))
        return cls(session, encoder, facts, start)

    def prompt_ids(self, dialogue: Dialogue) -> list[int]:
        """The ids of a prompt, up to where the response begins.

        Raises:
            PromptTooLong: there is no room for one token of a response.
        """
        ids = self._encoder.prompt_ids(dialogue)
        if len(ids) >= (room := self.facts.room):
            raise PromptTooLong(
                f"the prompt has {len(ids):,} tokens, and this model has room for {room - 1:,} and a response; shorten "
                "the prompt"
            )
        return ids

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """(S, V) The logits after each of the ids: row t scores the token at t + 1.

        Raises:
            PromptTooLong: there are more ids than the model has positions.
            ModelFailed: the model gives no logits.
        """
        if len(ids) > self.facts.room:
            raise PromptTooLong(f"there are {len(ids):,} tokens, and this model has room for {self.facts.room:,}")
        cache = Cache(self._session, self._start, 1, self.facts.soft + len(ids))
        return cache.read(0, ids, every=True)

    def answer(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        system: str | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> str:
        """The whole response to one question.

        Args:
            question: what the user says.
            sampling, max_new_tokens, stop: as for `write`.
            system: what the system says before it.

        Raises:
            PromptTooLong, ModelFailed, ValueError: as for `write`.
        """
        dialogue = Dialogue.of(question, system=system)
        return "".join(self.write(dialogue, sampling, max_new_tokens=max_new_tokens, stop=stop))

    def write(
        self,
        dialogue: Dialogue,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Writing:
        """Starts a response, whose pieces are then iterated over.

        Args:
            dialogue: the prompt.
            sampling: None: as the bundle says.
            max_new_tokens: the most tokens to write, at least 1. None: as the bundle says. Less if there is less room.
            stop: strings at which the response ends.

        Raises:
            PromptTooLong: the model has no room for a response.
            ModelFailed: the model gives no logits, now or as it is iterated over.
            ValueError: a stop string is empty or `stop` one string, or the template has no turn of a role.
        """
        ids = self.prompt_ids(dialogue)
        row = self._row(ids, sampling, max_new_tokens, stop)
        cache = Cache(self._session, self._start, 1, self._positions([ids], max_new_tokens))
        first = cache.read(0, ids)[0]
        return Writing(row, lambda token: cache.step(np.array([token], dtype=np.int64))[0], first)

    def write_all(
        self,
        dialogues: Sequence[Dialogue],
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        batch: int = 8,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Response]:
        """Writes responses in the order of the dialogues, several at once.

        What is drawn for a prompt depends on the seed and its place among the dialogues, and neither on `batch` nor on
        the dialogues after it. The first draws what `write` would.

        Args:
            dialogues: the prompts.
            sampling, max_new_tokens, stop: as for `write`.
            batch: how many are written at once.
            cancelled: asked before every token. True ends the iteration; responses that are not finished are dropped.

        Raises:
            PromptTooLong, ValueError, ModelFailed: as for `write`; or `batch` is not 1 or more. Prompts are checked
                before anything is written.
        """
        whole(batch, "batch", 1)
        prompts = []
        for number, each in enumerate(dialogues, start=1):
            try:
                prompts.append(self.prompt_ids(each))
            except ValueError as error:
                raise type(error)(f"prompt {number} of {len(dialogues)}: {error}") from error
        for first in range(0, len(prompts), batch):
            these = prompts[first : first + batch]
            rows = [
                self._row(ids, sampling, max_new_tokens, stop, place=place)
                for place, ids in enumerate(these, start=first)
            ]
            yield from self._together(rows, these, max_new_tokens, cancelled)
            if cancelled():
                return

    def _together(
        self,
        rows: Sequence[_Row],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        cancelled: Callable[[], bool],
    ) -> list[Response]:
        texts = ["" for _ in rows]
        cache = Cache(self._session, self._start, len(rows), self._positions(prompts, max_new_tokens))
        first = []
        for number, ids in enumerate(prompts):
            if cancelled():
                return []
            first.append(cache.read(number, ids))
        logits = np.concatenate(first)
        while True:
            if cancelled():
                return []
            for number, row in enumerate(rows):
                if row.ended is None:
                    texts[number] += row.take(logits[number])
            if all(row.ended is not None for row in rows):
                return [row.response(text) for row, text in zip(rows, texts, strict=True)]
            for number, row in enumerate(rows):
                if row.ended is not None:
                    # Its cache is written, and nobody reads it.
                    cache.lengths[number] = self.facts.soft
            logits = cache.step(np.array([row.last for row in rows], dtype=np.int64))

    def _row(
        self,
        ids: Sequence[int],
        sampling: Sampling | None,
        max_new_tokens: int | None,
        stop: Sequence[str],
        *,
        place: int = 0,
    ) -> _Row:
        decode, ends, limit = self._encoder.decode, frozenset(self.facts.end_ids), self._limit(ids, max_new_tokens)
        return _Row(decode, ends, len(ids), limit, sampling or self.sampling, stop, place)

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen if nobody says otherwise."""
        facts = self.facts
        return Sampling(facts.temperature, facts.top_k, facts.top_p)

    def _limit(self, ids: Sequence[int], max_new_tokens: int | None) -> int:
        wanted = self.facts.max_new_tokens if max_new_tokens is None else max_new_tokens
        if wanted < 1:
            raise ValueError(f"max_new_tokens is {wanted}; choose at least 1")
        return min(wanted, self.facts.room - len(ids))

    def _positions(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | None) -> int:
        return self.facts.soft + max(len(ids) + self._limit(ids, max_new_tokens) for ids in prompts)


def open_session(path: Path, threads: int = 0, *, packed: bool = True) -> Any:
    """Loads the model, whose weights are in the file beside it.

    Args:
        path: model.onnx.
        threads: threads of one step; 0: one for each core.
        packed: whether matrices are copied into the form that computes fastest, which takes longer than a first token.

    Raises:
        BundleInvalid: this onnxruntime cannot run it.
    """
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # Errors are raised.
    # Where the weights are, since onnxruntime is given the bytes that were checked.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        data = path.read_bytes()
        check_causal_file(data)
        return InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except OSError as error:
        raise BundleInvalid(f"{path} cannot be read: {error.strerror}") from error
    except FileRefused as error:
        raise BundleInvalid(f"{path} is not a model that `export` wrote: {error}; export the model again") from error
    except Exception as error:
        # onnxruntime's own errors have no common base.
        raise BundleInvalid(
            f"this onnxruntime cannot run {path}; install onnxruntime 1.22 or newer, or export the model again"
        ) from error


def empty_cache(session: Any) -> dict[str, NDArray[np.float32]]:
    """Keys and values of no positions, (1, heads, 0, size), by the graph's names."""
    given = [each for each in session.get_inputs() if each.name.startswith("past.")]
    return {each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), dtype=np.float32) for each in given}


def _vocabulary(folder: Path, session: Any) -> int:
    """The number of logits of a graph whose inputs and outputs are those of `export.causal_graph`.

    Raises:
        BundleInvalid: they are others.
    """
    given, made = session.get_inputs(), session.get_outputs()
    past = [each.name for each in given[3:]]
    sized = all(_sized(each.shape, 4, (1, 3)) and each.type == "tensor(float)" for each in (*given[3:], *made[1:]))
    if (
        [each.name for each in given[:3]] != ["ids", "lengths", "wanted"]
        or any(each.type != "tensor(int64)" for each in given[:3])
        or [each.name for each in made] != ["logits", *(name.replace("past.", "present.") for name in past)]
        or not past
        or not all(name.startswith("past.") for name in past)
        or not sized
        or not _sized(made[0].shape, 3, (2,))
    ):
        raise BundleInvalid(
            f"{folder / 'model.onnx'} has other inputs than a model that writes; export the model again"
        )
    return int(made[0].shape[2])


def _sized(shape: Sequence[int | str | None], axes: int, fixed: Sequence[int]) -> bool:
    return len(shape) == axes and all(isinstance(shape[axis], int) for axis in fixed)


def _starting_cache(folder: Path, session: Any, soft: int, data: bytes | None) -> dict[str, NDArray[np.float32]]:
    """The cache with which every dialogue begins: `soft` positions.

    Raises:
        BundleInvalid: the file is no such cache of this model.
    """
    empty = empty_cache(session)
    if data is None:
        return empty
    shapes = {name: (1, each.shape[1], soft, each.shape[3]) for name, each in empty.items()}
    try:
        return _arrays_of(data, shapes)
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise BundleInvalid(f"{folder / CACHE_FILE} is not a cache of this model; export the model again") from error


def _arrays_of(data: bytes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Reads exactly these arrays from the bytes of an .npz file, never more memory than they need.

    Raises:
        ValueError, or an error of zipfile: it holds others.
    """
    found: dict[str, NDArray[np.float32]] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sorted(archive.namelist()) != sorted(f"{name}.npy" for name in shapes):
            raise ValueError("other names")
        for name, shape in shapes.items():
            listed = archive.getinfo(f"{name}.npy")
            # Packed values may be short and unpack to any length.
            if listed.compress_type != zipfile.ZIP_STORED:
                raise ValueError("packed values")
            entry = archive.read(listed)
            if (header := _header(shape).match(entry)) is None:
                raise ValueError("another shape")
            values = np.frombuffer(entry, dtype="<f4", offset=header.end()).reshape(shape)
            if not np.isfinite(values).all():
                raise ValueError("no numbers")
            found[name] = values
    return found


def _header(shape: tuple[int, ...]) -> re.Pattern[bytes]:
    """How numpy begins an array of that shape in a file. numpy would read any expression of Python."""
    told = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    return re.compile(rb"\x93NUMPY\x01\x00.." + re.escape(told.encode()) + rb" *\n", re.DOTALL)
