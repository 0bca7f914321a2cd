"""The contract: what coordinator and member must agree on to the byte.

`tacit.v1` is generated from the .proto files beside it. The modules here are what is not protobuf: named tensors
(`manifest`), job documents (`job`), identities in certificates (`identity`), join tokens (`token`), reasons
(`reason`) and the way protocol messages travel (`wire`).
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
