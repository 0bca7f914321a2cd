"""Named tensors, and the flat vector in which they travel.

A manifest lists the shared parameters in order: name, shape, dtype. A version of a model is the flat vector of all of
them in that order, float32 little-endian; its name is the SHA-256 of those bytes. The server only ever sees manifests
and flat vectors. Frozen parameters, and the start of private ones, have manifests of their own.
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

# An alias, because Manifest has a property named `bytes`.
Blob = bytes
Buffer = bytes | bytearray | memoryview

MAX_VALUES = 2**31  # In one model: what a uint32-indexed vector of a few GiB can hold.


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
        """Number of values."""
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
            raise ValueError("two tensors have the same name")
        if sum(tensor.size for tensor in tensors) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        return tensors

    @classmethod
    def of(cls, tensors: Mapping[str, NDArray[np.float32]]) -> "Manifest":
        """Describes these arrays in the mapping's order."""
        return cls(tensors=tuple(Tensor(name=name, shape=array.shape) for name, array in tensors.items()))

    @property
    def values(self) -> int:
        """Length d of the flat vector."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Size of a version in bytes."""
        return 4 * self.values

    def flatten(self, tensors: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """Flattens named arrays into one vector of shape (d,).

        Raises:
            DocumentInvalid: a name is missing or unknown, or a shape or dtype differs.
        """
        expected = {tensor.name for tensor in self.tensors}
        if tensors.keys() != expected:
            missing, surplus = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
            raise DocumentInvalid(f"parameters differ from the manifest: missing {missing}, unknown {surplus}")
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
        """Returns named views of a vector of shape (d,).

        Raises:
            DocumentInvalid: the vector has another length.
        """
        if flat.shape != (self.values,):
            raise DocumentInvalid(f"the vector has shape {flat.shape}; the manifest has {self.values} values")
        tensors = {}
        at = 0
        for tensor in self.tensors:
            tensors[tensor.name] = flat[at : at + tensor.size].reshape(tensor.shape)
            at += tensor.size
        return tensors

    def decode(self, data: Buffer) -> NDArray[np.float32]:
        """Reads a version's bytes as a vector of shape (d,), a read-only view.

        Raises:
            DocumentInvalid: the length is wrong, or a value is not finite.
        """
        if len(data) != self.bytes:
            raise DocumentInvalid(f"the version has {len(data)} bytes; the manifest has {self.bytes}")
        flat = np.frombuffer(data, dtype="<f4")
        if not np.isfinite(flat).all():
            raise DocumentInvalid("the version holds a value that is not finite")
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
        """Encodes a vector of shape (d,) as a version's bytes."""
        return np.ascontiguousarray(flat, dtype="<f4").tobytes()
