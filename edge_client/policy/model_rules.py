"""What each key of a policy asks of a job's model: its kind, what it starts from, whose its words are, what of it is
shared.

Order in a table is the order of asking.
"""

from edge_client.policy.document import PolicyDocument
from edge_client.policy.verdicts import Finding, Offer, Rule, When, fits_any, in_words, listed
from tacit.job import JobDocument
from tacit.manifest import Manifest
from tacit.model import PromptedModel, RvaeModel
from tacit.prompt import SOURCES
from tacit.reason import Reason

__all__ = ["MANIFEST", "MODEL"]

# Digests of the policy's that are shown beside two of the job's.
_MAX_BESIDE_TWO = 3


# ---- the job document ---------------------------------------------------------------------------------


def _architectures(policy: PolicyDocument, offer: Offer) -> Finding:
    kind = offer.job.model.architecture
    says = "the job trains a {job}, the policy admits {policy}"
    return Finding(kind, listed(policy.architectures), fits_any(kind, policy.architectures), says)


def _base_models(policy: PolicyDocument, offer: Offer) -> Finding:
    admitted = in_words(policy.base_models)
    if not isinstance(offer.job, JobDocument):
        says = "the job's starting weights have {job}, the policy admits {policy}"
        return Finding("no digest before the bundle is made", admitted, None, says)
    # Where private parameters start from numbers of the bundle, those are the operator's choice like the shared ones:
    # with a public vocabulary it would write every row of the embedding.
    start = {"the weights": offer.job.weights}
    if offer.job.private is not None:
        start["the private weights"] = offer.job.private.weights
    if isinstance(offer.job.model, PromptedModel) and offer.job.model.backbone is not None:
        start["the backbone"] = offer.job.model.backbone
    refused = {what: digest for what, digest in start.items() if digest not in policy.base_models}
    named = [f"{what} {digest.hex()}" for what, digest in (refused or start).items()]
    if len(named) > 1:
        # So that both and the policy's fit into what travels.
        admitted = listed(map(in_words, policy.base_models), most=_MAX_BESIDE_TWO)
    says = "the job starts from {job}, the policy admits {policy}"
    return Finding(" and ".join(named), admitted, not refused, says)


def _backbones(policy: PolicyDocument, offer: Offer) -> Finding:
    admitted, model = listed(policy.backbones), offer.job.model
    if not isinstance(model, PromptedModel):
        return Finding("no backbone", admitted, True, "the job has {job}; the policy would take one from {policy}")
    # Of a job file the bundle says whether the hub has it.
    there = ("disk", "coordinator") if model.hub is None and model.base is None else SOURCES
    says = "the job's backbone may come from {job}, the policy takes it from {policy}"
    return Finding(listed(there), admitted, not set(there).isdisjoint(policy.backbones), says)


def _vocabularies(policy: PolicyDocument, offer: Offer) -> Finding:
    # Own alone keeps from the operator which vector stands for which word: where members build the list, rows start
    # from a secret of theirs, or from a table that they chose, and a document that says so names neither words nor
    # rows. Any other job brings the words itself (a list, a base's, a backbone's), and whoever made it knows the rows.
    own, model = offer.job.own_vocabulary, offer.job.model
    whose = "own" if own else "public"
    says = "the job's vocabulary is {job}, the policy admits {policy}"
    if own:
        advice = "a job whose [vocabulary] names a file has one for all members"
    elif isinstance(model, PromptedModel | RvaeModel):
        advice = f"jobs of architecture {model.architecture} have no other"
    else:
        advice = "members build their own in a job of method fedvocab whose [vocabulary] names no file"
    return Finding(whose, listed(policy.vocabularies), whose in policy.vocabularies, says, advice)


# Among the job's rules, in this order.
MODEL: tuple[Rule[Offer], ...] = (
    Rule("architectures", When.JOB, Reason.REASON_POLICY_JOB_KIND, _architectures),
    Rule("base_models", When.JOB, Reason.REASON_POLICY_BASE_MODEL, _base_models, lambda p: not p.base_models),
    Rule("backbones", When.JOB, Reason.REASON_POLICY_BASE_MODEL, _backbones),
    Rule(
        "vocabularies",
        When.JOB,
        Reason.REASON_POLICY_JOB_KIND,
        _vocabularies,
        lambda p: len(set(p.vocabularies)) == 2,
    ),
)


# ---- the manifest ---------------------------------------------------------------------------------


def _shared_parameters(policy: PolicyDocument, manifest: Manifest) -> Finding:
    names = [tensor.name for tensor in manifest.tensors]
    kept = [name for name in names if not fits_any(name, policy.shared_parameters)]
    says = "the job would share {job}, the policy shares {policy} only"
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
