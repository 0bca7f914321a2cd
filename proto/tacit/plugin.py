"""A model that an installed distribution registers, as a job states it: what is meant, and no path to code.

`learning.plugins` finds it in the entry point group `tacit.models`, and docs/own-models.md says who vouches for it.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StringConstraints, model_validator

from tacit.documents import AtMost, Digest, Part

__all__ = ["DistributionName", "PluginModel"]

# A distribution's normalised name (PEP 503), so that one distribution has one name in jobs and policies.
DistributionName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
_Version = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.!+-]{0,62}$")]
# The name of an entry point, which is no path of a module.
_EntryName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
_Key = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]
_Whole = Annotated[StrictInt, Field(ge=-(2**53), le=2**53)]
_Setting = StrictBool | _Whole | StrictFloat | Annotated[str, StringConstraints(max_length=200)]

# Keys of a plugin's own table.
_MAX_SETTINGS = 64


class PluginModel(Part):
    """An architecture of one's own. Its embedding is like that of the other architectures; the rest is the plugin's."""

    architecture: Literal["plugin"] = "plugin"
    # The distribution, as `edge_client models` prints it, with the digest of its files.
    distribution: DistributionName
    version: _Version
    files: Digest
    # Which of its entry points in the group `tacit.models`.
    name: _EntryName
    # The plugin's own table. The plugin checks it.
    settings: Annotated[dict[_Key, _Setting], AtMost(_MAX_SETTINGS)] = Field(default={})
    embedding: int = Field(default=64, ge=1, le=4096)
    embedding_std: float = Field(default=0.15, gt=0, le=100)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    freeze_embedding: bool = False
    max_tokens: int = Field(default=64, ge=1, le=4096)
    # How a text is cut, which must be what the plugin registers: tokens of the shortest sequence, and whether texts are
    # put between [CLS] and [SEP].
    min_tokens: int = Field(default=1, ge=1, le=4096)
    frame: bool = False

    @model_validator(mode="after")
    def _room(self) -> Self:
        least = self.min_tokens + (2 if self.frame else 0)
        if self.max_tokens < least:
            raise ValueError(f"max_tokens must be at least {least}, because min_tokens is {self.min_tokens}")
        return self
