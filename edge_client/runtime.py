"""What a member trains with: torch, or numpy and onnxruntime alone for jobs that train a head (docs/devices.md).

Both run the same session, policy, ledger, noise and masking, from the same home. They differ in who computes the
features of a head, and in which jobs they can join.
"""

from importlib.util import find_spec
from typing import Literal

from tacit.job import JobDocument
from tacit.measurement import Measurement
from tacit.prompt import PromptedModel
from toolkit.install import install_with

__all__ = ["Runtime", "RuntimeUnavailable", "cannot_train", "pick_runtime"]

Runtime = Literal["torch", "device"]

# What each runtime imports, besides what every member has.
_NEEDS: dict[Runtime, tuple[str, ...]] = {"torch": ("torch", "transformers"), "device": ("onnxruntime", "tokenizers")}
_EXTRAS: dict[Runtime, str] = {"torch": "edge", "device": "device"}


class RuntimeUnavailable(RuntimeError):
    """The runtime is not installed here; the text says what to install."""


def pick_runtime(name: str = "auto") -> Runtime:
    """The runtime of that name; `auto` is torch where it is installed, and else the device's.

    Raises:
        RuntimeUnavailable: It is not installed, or there is none of that name.
    """
    if name == "auto":
        name = "device" if _missing("torch") else "torch"
    if name not in _NEEDS:
        raise RuntimeUnavailable(f"{name!r} is not a runtime; choose auto, torch or device")
    runtime: Runtime = name
    if missing := _missing(runtime):
        needed, how = " and ".join(missing), install_with(_EXTRAS[runtime])
        raise RuntimeUnavailable(f"--runtime {runtime} needs what is not installed here ({needed}): {how}")
    return runtime


def cannot_train(job: JobDocument, runtime: Runtime) -> str | None:
    """Why this runtime cannot train the job, or measure its version; None if it can. Says nothing about the data."""
    # Surveys count, and need no model.
    measures = isinstance(job.question, Measurement)
    if runtime == "torch" or (job.question is not None and not measures):
        return None
    model = job.model
    if not isinstance(model, PromptedModel) or not model.caches_features:
        does = "measures only versions" if measures else "trains only jobs"
        return f"this member runs without torch, and {does} of a head over a frozen encoder"
    if model.onnx is None:
        return "this member runs without torch, and the job has no ONNX backbone (model.onnx in the job file)"
    return None


def _missing(runtime: Runtime) -> list[str]:
    found = []
    for each in _NEEDS[runtime]:
        try:
            there = find_spec(each) is not None
        except ValueError:  # The module is blocked.
            there = False
        if not there:
            found.append(each)
    return found
