"""How to install a missing part of Tacit, in the one form that every error uses.

Nothing is released yet, so a part is installed from the source folder. A package index would install a stranger's
package.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["DISTRIBUTION", "extra_with", "install_with", "naming_extra"]

DISTRIBUTION = "tacit-federation"

# The extra that brings a module, for each program: a member trains with `edge`, an operator's machine with `export`.
_OF_THE_SERVER: Final = (
    "alembic", "fsspec", "grpc_health", "grpc_reflection", "prometheus_client", "sqlalchemy",
)  # fmt: skip
_OF_MODELS: Final = (
    "huggingface_hub", "onnxruntime", "opacus", "safetensors", "scipy", "tokenizers", "torch", "transformers",
)  # fmt: skip
_OF_EXPORTS: Final = ("gguf", "onnx", "onnxscript", "peft", "rapidfuzz", "sacrebleu")
_OTHERS: Final = {
    "aiobotocore": "s3",
    "botocore": "s3",
    "matplotlib": "plots",
    "opentelemetry": "traces",
    "pandas": "notebook",
    "psycopg": "coordinator-postgres",
    "pyarrow": "arrow",
    "ray": "ray",
    "s3fs": "s3",
    "tensorboard": "tensorboard",
}


def install_with(*extras: str) -> str:
    """Returns the command that adds these extras: `pip install '.[edge,export]'` in Tacit's source folder.

    uv and pipx keep an environment of their own for the two programs, into which plain pip would not install.
    """
    how = "pip install"
    if Path(sys.prefix, "uv-receipt.toml").exists():
        how = f"uv pip install --python {sys.prefix}"
    elif Path(sys.prefix, "pipx_metadata.json").exists():
        how = f"pipx runpip {DISTRIBUTION} install"
    wanted = f"'.[{','.join(extras)}]'" if extras else "."
    return f"`{how} {wanted}` in Tacit's source folder"


@contextmanager
def naming_extra(what: str, extra: str) -> Iterator[None]:
    """Says which extra to install if an import inside finds a module missing that extras bring.

    Args:
        what: What needs the module: `tacit.simulate`.
        extra: All that it needs.

    Raises:
        ModuleNotFoundError: A module is missing; the text has the command to type.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or extra_with(error.name, member=False) is None:
            raise
        raise ModuleNotFoundError(
            f"{what} needs {error.name}, which is not installed; {install_with(extra)}", name=error.name
        ) from error


def extra_with(module: str, *, member: bool) -> str | None:
    """Returns the extra that brings a module which is not installed.

    Args:
        module: The module, or one inside it: `sqlalchemy`, `google.protobuf`.
        member: Whether a member's program needs it.

    Returns:
        The extra; None if every installation has the module, or none is known to bring it.
    """
    name = module.partition(".")[0]
    if member and name in (*_OF_MODELS, "prometheus_client"):
        return "edge"
    if name in _OF_THE_SERVER:
        return "coordinator"
    return "export" if name in (*_OF_MODELS, *_OF_EXPORTS) else _OTHERS.get(name)
