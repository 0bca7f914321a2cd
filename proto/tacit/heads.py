"""The head of a hash chain, as somebody keeps it away from the chain: the newest entry's hash and number.

What a chain alone proves: the entries that are there follow one another, unbroken, from the first one on. It does not
prove that these are all, or the first ones that there were. Somebody who can write the store can cut off the tail, or
replace the whole chain by another with good hashes. Only a head that was kept where they cannot write tells.
"""

from dataclasses import dataclass

__all__ = ["KeptHead"]


@dataclass(frozen=True, slots=True)
class KeptHead:
    """A head that was kept. `number`: of its entry, where it is known."""

    hash: bytes
    number: int | None = None

    @classmethod
    def read(cls, text: str) -> "KeptHead":
        """From HASH or HASH:NUMBER, as the commands print it.

        Raises:
            ValueError: the text is something else.
        """
        digest, colon, number = text.strip().partition(":")
        try:
            head = cls(bytes.fromhex(digest), int(number) if colon else None)
        except ValueError:
            head = cls(b"")
        if len(head.hash) != 32 or (head.number is not None and head.number < 1):
            raise ValueError(f"{text!r} is no head; give the HASH:NUMBER that `verify` printed, or the 64 digits alone")
        return head

    def __str__(self) -> str:
        return self.hash.hex() if self.number is None else f"{self.hash.hex()}:{self.number}"
