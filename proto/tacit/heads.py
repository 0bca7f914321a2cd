"""The head of a hash chain: the newest entry's hash and number, kept apart from the chain.

A chain alone proves that its entries follow one another, unbroken, from its first one. It does not prove that no entry
is missing at the end, or that this is the original chain. Somebody who can write to the store can cut off the tail, or
replace the whole chain with another whose hashes match. Only a head kept where they cannot write reveals that.
"""

from dataclasses import dataclass

__all__ = ["KeptHead"]


@dataclass(frozen=True, slots=True)
class KeptHead:
    """A head that somebody kept. `number` is that of its entry, if known."""

    hash: bytes
    number: int | None = None

    @classmethod
    def read(cls, text: str) -> "KeptHead":
        """Reads HASH or HASH:NUMBER, as the commands print it.

        Raises:
            ValueError: the text has another form.
        """
        digest, colon, number = text.strip().partition(":")
        try:
            head = cls(bytes.fromhex(digest), int(number) if colon else None)
        except ValueError:
            head = cls(b"")
        if len(head.hash) != 32 or (head.number is not None and head.number < 1):
            raise ValueError(
                f"{text!r} is not a head; give the HASH:NUMBER that `verify` printed, or the 64 digits alone"
            )
        return head

    def __str__(self) -> str:
        return self.hash.hex() if self.number is None else f"{self.hash.hex()}:{self.number}"
