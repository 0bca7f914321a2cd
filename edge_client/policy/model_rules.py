"""The rules about a job's model: its architecture, its starting weights, its vocabulary, its shared parameters.

The rules are checked in the order of the tables.
"""

from typing import get_args

from edge_client.policy.document import PolicyDocument, Vocabulary
from edge_client.policy.verdicts import Finding, Offer, Rule, When, fits_any, in_words, listed
from learning.backbones.layout import BackboneInvalid, checked_config, layout_of
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PluginModel, PromptedModel, RvaeModel
from tacit.prompt import SOURCES
from tacit.reason import Reason

__all__ = ["MANIFEST", "MODEL"]

# How many of the policy's digests a refusal shows beside two of the job's.
_MAX_BESIDE_TWO = 3


# ---- the job document ---------------------------------------------------------------------------------


def _architectures(policy: PolicyDocument, offer: Offer) -> Finding:
    kind = offer.job.model.architecture
    does = "trains" if offer.job.question is None else "measures"
    says = f"the job {does} a {{job}}; the policy allows {{policy}}"
    return Finding(kind, listed(policy.architectures), fits_any(kind, policy.architectures), says)


def _tasks(policy: PolicyDocument, offer: Offer) -> Finding:
    allowed, model = listed(policy.tasks), offer.job.model
    if not isinstance(model, PromptedModel):
        return Finding("no task", allowed, True, "the job's model has {job}; the policy allows {policy}")
    says = "the task of the job's model is {job}; the policy allows {policy}"
    return Finding(model.task.name, allowed, fits_any(model.task.name, policy.tasks), says)


def _plugins(policy: PolicyDocument, offer: Offer) -> Finding:
    allowed, model = listed(policy.plugins, most=_MAX_BESIDE_TWO), offer.job.model
    if not isinstance(model, PluginModel):
        return Finding("no plugin", allowed, True, "the job's model comes from {job}; the policy allows {policy}")
    says = "the job's model is code of the installed plugin {job}; the policy allows {policy}"
    advice = "`edge_client models` prints the line that would allow it"
    own = policy.plugins.get(model.distribution)
    if own is not None:
        allowed = f"{model.distribution} {own.hex()}"
    return Finding(f"{model.distribution} {model.files.hex()}", allowed, own == model.files, says, advice)


def _base_models(policy: PolicyDocument, offer: Offer) -> Finding:
    admitted = in_words(policy.base_models)
    if not isinstance(offer.job, JobDocument):
        says = "the job's starting weights have {job}; the policy allows {policy}"
        return Finding("no digest until the bundle is made", admitted, None, says)
    # If private parameters start from numbers of the bundle, the operator chooses those as it chooses the shared ones:
    # with a public vocabulary it could write every row of the embedding.
    start = {"the weights": offer.job.weights}
    if offer.job.private is not None:
        start["the private weights"] = offer.job.private.weights
    if offer.job.base_tokenizer is not None:
        # It says which word gets which of these rows.
        start["the base's word pieces"] = offer.job.base_tokenizer
    if offer.job.frozen is not None:
        start["the frozen weights"] = offer.job.frozen.weights
    if isinstance(offer.job.model, PromptedModel) and offer.job.model.backbone is not None:
        start["the backbone"] = offer.job.model.backbone
        if offer.job.model.onnx is not None and offer.job.model.onnx.digest is not None:
            start["the ONNX backbone"] = offer.job.model.onnx.digest
    refused = {what: digest for what, digest in start.items() if digest not in policy.base_models}
    named = [f"{what} {digest.hex()}" for what, digest in (refused or start).items()]
    if len(named) > 1:
        # So that the sentence is not cut on its way to the coordinator.
        admitted = listed(map(in_words, policy.base_models), most=_MAX_BESIDE_TWO)
    says = "the job starts from {job}; the policy allows {policy}"
    return Finding(" and ".join(named), admitted, not refused, says)


def _backbones(policy: PolicyDocument, offer: Offer) -> Finding:
    admitted, model = listed(policy.backbones), offer.job.model
    if not isinstance(model, PromptedModel):
        return Finding("no backbone", admitted, True, "the job has {job}; the policy allows one from {policy}")
    # Only the bundle of a job file will tell whether the hub has the backbone.
    there = ("disk", "coordinator") if model.hub is None and model.base is None else SOURCES
    says = "the job's backbone may come from {job}; the policy allows {policy}"
    return Finding(listed(there), admitted, not set(there).isdisjoint(policy.backbones), says)


def _max_backbone_mib(policy: PolicyDocument, offer: Offer) -> Finding:
    admitted, model = in_words(policy.max_backbone_mib), offer.job.model
    says = "the job's backbone has {job} MiB; the policy allows at most {policy}"
    if not isinstance(model, PromptedModel):
        return Finding("0", admitted, True, says)
    if model.config is None:
        return Finding("unknown", admitted, None, "the job's backbone has no config until the bundle is made")
    try:
        size = layout_of(checked_config(model.config)).size
    except BackboneInvalid:
        # Nothing of it is written: preparation refuses it before it asks anybody, and says what is wrong.
        return Finding("unknown", admitted, True, says)
    if model.onnx is not None and model.onnx.size is not None:
        # What a member without torch fetches in its place.
        size = max(size, model.onnx.size)
    mib = -(-size // 2**20)
    return Finding(
        in_words(mib),
        admitted,
        mib <= policy.max_backbone_mib,
        says,
        "raise max_backbone_mib if this machine has room for it",
    )


def _vocabularies(policy: PolicyDocument, offer: Offer) -> Finding:
    # Only "own" keeps the operator from knowing which vector belongs to which word. If members build the list, its rows
    # start from a secret of theirs or from a table that they chose, and the job document names neither words nor rows.
    # With "own-from-base" the list is the member's secret, but a word's vector starts from those of pieces that the
    # operator knows. Any other job brings the words itself (a list, or those of a base model or a backbone), so its
    # maker knows the rows.
    whose, model = offer.job.whose_vocabulary, offer.job.model
    says = "the job's vocabulary is {job}; the policy allows {policy}"
    if whose == "own-from-base":
        advice = 'its rows start from a base model; with vocabulary.start = "random" they start from a secret'
    elif whose == "own":
        advice = "a job has a public one if its [vocabulary] names a file"
    elif isinstance(model, PromptedModel | RvaeModel):
        advice = f"jobs of architecture {model.architecture} have no other"
    else:
        advice = "members build their own in a job of method fedvocab whose [vocabulary] names no file"
    return Finding(whose, listed(policy.vocabularies), whose in policy.vocabularies, says, advice)


# Part of `rules.JOB`, in this order.
MODEL: tuple[Rule[Offer], ...] = (
    Rule("architectures", When.JOB, Reason.REASON_POLICY_JOB_KIND, _architectures),
    Rule("tasks", When.JOB, Reason.REASON_POLICY_JOB_KIND, _tasks),
    Rule("plugins", When.JOB, Reason.REASON_POLICY_JOB_KIND, _plugins),
    Rule("base_models", When.JOB, Reason.REASON_POLICY_BASE_MODEL, _base_models, lambda p: not p.base_models),
    Rule("backbones", When.JOB, Reason.REASON_POLICY_BASE_MODEL, _backbones),
    Rule("max_backbone_mib", When.JOB, Reason.REASON_POLICY_BASE_MODEL, _max_backbone_mib),
    Rule(
        "vocabularies",
        When.JOB,
        Reason.REASON_POLICY_JOB_KIND,
        _vocabularies,
        lambda p: len(set(p.vocabularies)) == len(get_args(Vocabulary)),
    ),
)


# ---- the manifest ---------------------------------------------------------------------------------


def _shared_parameters(policy: PolicyDocument, manifest: Manifest) -> Finding:
    names = [tensor.name for tensor in manifest.tensors]
    kept = [name for name in names if not fits_any(name, policy.shared_parameters)]
    says = "the job would share {job}; the policy allows only {policy}"
    return Finding(listed(kept or names), listed(policy.shared_parameters), not kept, says)


MANIFEST: tuple[Rule[Manifest], ...] = (
    Rule(
        "shared_parameters",
        When.MANIFEST,
        Reason.REASON_POLICY_PARAMETERS,
        _shared_parameters,
        lambda p: "*" in p.shared_parameters,
    ),
)
