"""The contract: everything on which coordinator and member must agree to the byte.

`tacit.v1` is generated from the .proto files beside it. The modules here hold the rest: named tensors (`manifest`), job
documents (`job`), identities in certificates (`identity`), join tokens (`token`), reasons (`reason`), and the
translation of secure aggregation's messages to and from protobuf (`wire`).
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
