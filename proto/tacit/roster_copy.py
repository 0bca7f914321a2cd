"""A file with a copy of the roster log: what a member or a witness has seen, for others to verify and compare.

The file is JSON lines. The first names the federation and proves its authorities; each of the others holds an entry, a
signed head, a head that contradicts them, or a cosignature. Reading verifies all of it: the file proves itself to all
who know the federation's name. Comparing two files finds a split view, and the two signed heads are its proof.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_agg.transparency import Tree
from tacit.authorities import MAX_AUTHORITIES_BYTES, Authorities, AuthoritiesInvalid
from tacit.identity import Role
from tacit.limits import MAX_CERTIFICATE_BYTES
from tacit.roster import MAX_ENTRIES, Cosignature, Entry, Head, HeadInvalid, Kind, SignedHead
from toolkit.durable import durable_file

__all__ = ["Copy", "CopyInvalid", "NoCopy", "Split", "compare", "read_copy", "write_copy"]

_KIND = "tacit-roster-log"
_MAX_LINE = 2 * MAX_AUTHORITIES_BYTES + 1024
# Heads, contradictions and cosignatures in a file.
_MAX_OTHERS = 100_000


class CopyInvalid(ValueError):
    """The file does not hold. The sentence says why."""


class NoCopy(CopyInvalid):
    """There is no such file, or it is something else."""


class Split(Exception):
    """Two signed heads contradict each other. The sentence says where, and whose they are."""


@dataclass(frozen=True)
class Copy:
    """What somebody has seen of a federation's log.

    Args:
        what: how sentences name it.
        authorities: the federation's authorities, which certified the servers that signed the heads.
        entries: the entries from the first one on; a witness has none.
        heads: the heads that were accepted, the largest last.
        contradictions: signed heads that contradict the entries.
        cosignatures: others' signatures.
    """

    what: str
    authorities: Authorities
    entries: tuple[Entry, ...] = ()
    heads: tuple[SignedHead, ...] = ()
    contradictions: tuple[SignedHead, ...] = ()
    cosignatures: tuple[Cosignature, ...] = ()
    tree: Tree = field(default_factory=Tree, repr=False)

    @property
    def federation(self) -> bytes:
        """The federation's name, 32 bytes."""
        return self.authorities.federation

    @property
    def size(self) -> int:
        """Number of entries of the largest head; 0 without one."""
        return self.heads[-1].head.size if self.heads else 0

    def root(self, size: int) -> bytes | None:
        """The root of the first `size` entries; None if this copy does not know it."""
        if size <= len(self.tree):
            return self.tree.root(size)
        return next((each.head.root for each in self.heads if each.head.size == size), None)


def write_copy(path: Path, copy: Copy) -> None:
    """Writes a copy.

    Raises:
        OSError: the file cannot be written.
    """
    first = {"schema": 1, "kind": _KIND, "authorities": copy.authorities.canonical().hex()}
    lines: list[dict[str, Any]] = [first]
    for entry in copy.entries:
        fields = [entry.certificate.hex(), entry.key.hex(), entry.name, entry.role.value, entry.kind.value, entry.at_ms]
        lines.append({"entry": fields})
    lines += [{"head": _head_fields(each)} for each in copy.heads]
    lines += [{"contradiction": _head_fields(each)} for each in copy.contradictions]
    for each in copy.cosignatures:
        signed = [each.signer.hex(), each.size, each.root.hex(), each.at_ms, each.signature.hex()]
        lines.append({"cosignature": signed})
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    durable_file(path, text.encode("ascii"))


def _head_fields(signed: SignedHead) -> list[Any]:
    head = signed.head
    return [head.size, head.root.hex(), head.at_ms, signed.signature.hex(), signed.certificate.hex()]


def read_copy(path: Path, federation: bytes | None = None) -> Copy:
    """Reads a file and verifies all of it.

    Args:
        path: the file.
        federation: the name that its federation must have; None accepts any.

    Raises:
        NoCopy: it cannot be read, or is something else.
        CopyInvalid: it does not hold.
    """
    try:
        with path.open("rb") as file:
            return _read(file, path.name, federation)
    except OSError as error:
        raise NoCopy(f"{path} cannot be read: {error.strerror}; check the path") from error


def _read(lines: Iterable[bytes], what: str, federation: bytes | None) -> Copy:
    source = iter(lines)
    first = _line(next(source, b""), what)
    if first.get("kind") != _KIND or first.get("schema") != 1:
        raise NoCopy(f"{what} is no copy of a roster log; `edge_client members --export FILE` writes one")
    try:
        document = _bytes(first.get("authorities"), MAX_AUTHORITIES_BYTES)
        authorities = Authorities.from_json(document, what=what)
        authorities = Authorities.read(document, federation=federation or authorities.federation, what=what)
    except (ValueError, AuthoritiesInvalid) as error:
        raise CopyInvalid(f"{what}: {error}") from error
    entries: list[Entry] = []
    heads: list[SignedHead] = []
    contradictions: list[SignedHead] = []
    cosignatures: list[Cosignature] = []
    try:
        for raw in source:
            match list(_line(raw, what).items()):
                case [("entry", [certificate, key, str(name), role, kind, int(at_ms)])]:
                    entries.append(Entry(_bytes(certificate), _bytes(key), name, Role(role), Kind(kind), at_ms))
                case [("head", fields)]:
                    heads.append(_head(fields, authorities))
                case [("contradiction", fields)]:
                    contradictions.append(_head(fields, authorities))
                case [("cosignature", [signer, int(size), root, int(at_ms), signature])]:
                    made = (_bytes(signer), size, _bytes(root), at_ms, _bytes(signature))
                    cosignatures.append(Cosignature(*made))
                    cosignatures[-1].check(authorities.history)
                case _:
                    raise CopyInvalid(f"{what} holds a line of an unknown kind")
            if len(entries) > MAX_ENTRIES or len(heads) + len(contradictions) + len(cosignatures) > _MAX_OTHERS:
                raise CopyInvalid(f"{what} has more lines than any copy")
    except (ValueError, TypeError, OverflowError) as error:
        raise CopyInvalid(str(error) if isinstance(error, CopyInvalid) else f"{what} does not hold: {error}") from error
    tree = Tree(entry.leaf for entry in entries)
    heads.sort(key=lambda each: (each.head.size, each.head.at_ms))
    copy = Copy(what, authorities, tuple(entries), tuple(heads), tuple(contradictions), tuple(cosignatures), tree)
    for each in heads:
        if each.head.size <= len(tree) and tree.root(each.head.size) != each.head.root:
            raise CopyInvalid(
                f"{what}: its entries do not lead to its head of {each.head.size} entries; it was altered"
            )
    if entries and copy.size != len(entries):
        raise CopyInvalid(f"{what} has {len(entries)} entries and a head of {copy.size}; it was altered")
    return copy


def _line(raw: bytes, what: str) -> dict[str, Any]:
    if len(raw) > _MAX_LINE:
        raise CopyInvalid(f"{what} has a line of more than {_MAX_LINE} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CopyInvalid(f"{what} has a line that is not JSON") from error
    if not isinstance(found, dict):
        raise CopyInvalid(f"{what} has a line that is not an object")
    return found


def _bytes(text: object, most: int = MAX_CERTIFICATE_BYTES) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * most:
        raise ValueError("a digest, key or certificate is hexadecimal digits")
    return bytes.fromhex(text)


def _head(fields: object, authorities: Authorities) -> SignedHead:
    match fields:
        case [int(size), root, int(at_ms), signature, certificate]:
            head = Head(authorities.federation, size, _bytes(root), at_ms)
            signed = SignedHead(head, _bytes(signature), _bytes(certificate))
            signed.check(authorities.history)
            return signed
    raise HeadInvalid("a head is malformed")


def compare(one: Copy, other: Copy) -> str:
    """Compares what two have seen of the log.

    Returns:
        A sentence about two copies of one log.

    Raises:
        Split: they saw two logs, or one of them holds the proof of it.
        CopyInvalid: they are of two federations, or have nothing in common to compare.
    """
    if one.federation != other.federation:
        raise CopyInvalid(f"{one.what} and {other.what} are of two federations")
    small, large = sorted((one, other), key=lambda each: each.size)
    for each in (one, other):
        for signed in each.contradictions:
            known = each.root(signed.head.size)
            if known is not None and known != signed.head.root:
                raise Split(
                    f"SPLIT VIEW: {each.what} holds two heads of {signed.head.size} entries with different roots, both "
                    "signed by this federation's server. Both signatures are in the file"
                )
    sizes = {each.head.size for each in small.heads} | {each.head.size for each in large.heads}
    compared = 0
    for size in sorted(sizes):
        here, there = small.root(size), large.root(size)
        if here is None or there is None:
            continue
        compared += 1
        if here != there:
            raise Split(
                f"SPLIT VIEW: {small.what} and {large.what} show different logs of {size} entries, both signed by this "
                f"federation's server{_first_difference(small, large)}. Keep both files: the signatures are the proof"
            )
    if not compared:
        raise CopyInvalid(
            f"{one.what} and {other.what} share no size to compare; export both again, at least one of them by a member"
        )
    return f"{small.what} ({small.size} entries) and {large.what} ({large.size} entries) are of one log" + (
        "" if small.size == large.size else f"; {large.what} is newer"
    )


def _first_difference(one: Copy, other: Copy) -> str:
    for number, (here, there) in enumerate(zip(one.entries, other.entries, strict=False), start=1):
        if here != there:
            return f"; entry {number} is {here.kind} {here.name} in one and {there.kind} {there.name} in the other"
    return ""
