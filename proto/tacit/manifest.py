"""Named tensors and the one flat vector they travel as.

A manifest lists the shared parameters in their order: name, shape, dtype. A version of a model is the flat vector of
all of them, float32 little-endian, back to back in that order; its name is the SHA-256 of those bytes. The server
never sees anything but manifests and flat vectors. Frozen parameters, and the start of private ones, have manifests of
their own.
"""

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from tacit.documents import AtMost, Document, DocumentInvalid, Part
from tacit.limits import MAX_TENSORS

__all__ = ["Manifest", "Tensor"]

# `bytes` is a property of Manifest.
Blob = bytes
Buffer = bytes | bytearray | memoryview

MAX_VALUES = 2**31  # Of one model: what a uint32-indexed vector of a few GiB can hold.


class Tensor(Part):
    """One named tensor."""

    name: str = Field(min_length=1, max_length=512)
    shape: Annotated[tuple[Annotated[int, Field(le=2**31)], ...], AtMost(16)]
    dtype: Literal["float32"] = "float32"

    @field_validator("shape")
    @classmethod
    def _positive(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if any(size <= 0 for size in shape):
            raise ValueError("every dimension must be at least 1")
        return shape

    @property
    def size(self) -> int:
        """How many values."""
        return math.prod(self.shape)


class Manifest(Document):
    """The shared parameters of a model, in the order in which they are flattened."""

    max_bytes: ClassVar[int] = 2 * 1024 * 1024

    tensors: Annotated[tuple[Tensor, ...], AtMost(MAX_TENSORS)] = Field(min_length=1)

    @field_validator("tensors")
    @classmethod
    def _distinct(cls, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        names = [tensor.name for tensor in tensors]
        if len(set(names)) != len(names):
            raise ValueError("a tensor's name stands twice")
        if sum(tensor.size for tensor in tensors) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        return tensors

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[np.float32]]) -> "Manifest":
        """The manifest of these arrays, in the mapping's order."""
        return cls(tensors=tuple(Tensor(name=name, shape=array.shape) for name, array in tensors.items()))

    @property
    def values(self) -> int:
        """Length d of the flat vector."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Size of a version."""
        return 4 * self.values

    def flatten(self, tensors: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """One vector of shape (d,) from named arrays.

        Raises:
            DocumentInvalid: a name missing or too many, a shape or dtype that differs.
        """
        expected = {tensor.name for tensor in self.tensors}
        if tensors.keys() != expected:
            missing, surplus = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
            raise DocumentInvalid(f"parameters differ from the manifest: missing {missing}, not in it {surplus}")
        flat = np.empty(self.values, dtype="<f4")
        at = 0
        for tensor in self.tensors:
            array = tensors[tensor.name]
            if array.shape != tensor.shape or array.dtype != np.float32:
                raise DocumentInvalid(
                    f"{tensor.name} is {array.dtype}{list(array.shape)}; the manifest has float32{list(tensor.shape)}"
                )
            flat[at : at + tensor.size] = array.reshape(-1)
            at += tensor.size
        return flat

    def unflatten(self, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        """Named views into a vector of shape (d,).

        Raises:
            DocumentInvalid: the vector has another length.
        """
        if flat.shape != (self.values,):
            raise DocumentInvalid(f"a vector of {flat.shape} for a manifest of {self.values} values")
        tensors = {}
        at = 0
        for tensor in self.tensors:
            tensors[tensor.name] = flat[at : at + tensor.size].reshape(tensor.shape)
            at += tensor.size
        return tensors

    def decode(self, data: Buffer) -> NDArray[np.float32]:
        """The vector in a version's bytes, finite and of the right length (a read-only view).

        Raises:
            DocumentInvalid: wrong length, or a value that is not finite.
        """
        if len(data) != self.bytes:
            raise DocumentInvalid(f"a version of {len(data)} bytes for a manifest of {self.bytes}")
        flat = np.frombuffer(data, dtype="<f4")
        if not np.isfinite(flat).all():
            raise DocumentInvalid("a version holds a value that is not finite")
        return flat

    def check_apart(self, frozen: "Manifest") -> None:
        """Checks that this manifest, of what is shared, lists nothing that the job freezes.

        Raises:
            DocumentInvalid: it does; the sentence names one.
        """
        if both := {tensor.name for tensor in self.tensors} & {tensor.name for tensor in frozen.tensors}:
            raise DocumentInvalid(
                f"the manifest shares {min(both)}, which the job freezes; make the bundle again with `coordinator job "
                "bundle`"
            )

    @staticmethod
    def encode(flat: NDArray[np.float32]) -> Blob:
        """A version's bytes."""
        return np.ascontiguousarray(flat, dtype="<f4").tobytes()
