"""Reasons: one enum in the contract, one word for logs and metric labels, one sentence for people.

`Reason` is the protobuf enum. Its entries for secure aggregation have the names of `secure_agg.Reason`, so the two are
mapped by name and neither depends on the other's numbers.
"""

from typing import cast

import secure_agg
from tacit.v1.reason_pb2 import Reason

__all__ = ["FINISHED", "Reason", "from_word", "of_protocol", "sentence", "word"]

# A job that ends for one of these is finished: all its rounds are done, or its versions no longer improve.
FINISHED = frozenset({Reason.REASON_JOB_FINISHED, Reason.REASON_NO_IMPROVEMENT})

_PREFIX = "REASON_"

_SENTENCES: dict[str, str] = {
    "unspecified": "No reason was given.",
    "client_certificate_missing": "No client certificate was shown; enrol this machine with `edge_client enrol`.",
    "client_certificate_unknown": "This federation did not issue the certificate, or no longer knows its holder.",
    "client_certificate_revoked": "The operator has revoked this member; ask for a new invitation.",
    "client_role_wrong": "This service needs a certificate with another role.",
    "protocol_version_unsupported": "Member and coordinator speak different protocol versions; upgrade the older one.",
    "session_replaced": "The same member opened another session; only one is kept.",
    "coordinator_stopping": "The coordinator is stopping; members reconnect by themselves when it is back.",
    "coordinator_restarted": "The coordinator was restarted during the attempt; the round is opened again.",
    "coordinator_stands_by": "The coordinator stands by for another one; use that one's address.",
    "clock_skew": "The clocks of the two sides are too far apart; correct them.",
    "member_too_frequent": "The member sends more than the coordinator accepts; update it, and run it only once.",
    "token_unknown": "The join token is not one of this coordinator's; ask the operator for a new one.",
    "token_used": "The join token was used before; ask the operator for a new one.",
    "token_expired": "The join token has expired; ask the operator for a new one.",
    "token_secret_wrong": "The join token's secret is wrong; copy the whole token or ask the operator for a new one.",
    "key_unsuitable": "The key is not RSA of 3072 to 8192 bits with exponent 65537, or did not sign the request.",
    "name_taken": "A member of that name is already enrolled; choose another name or revoke the old one.",
    "enrolment_too_frequent": "Too many requests to enrol came from this network; wait the stated time and try again.",
    "certificate_awaited": "The certificate waits for the authority, whose key is on another machine; ask again later.",
    "job_not_admitted": "The member does not admit this job.",
    "data_unsuitable": "The member's data does not fit the job.",
    "policy_mechanism": "The member's policy does not allow the job's privacy mechanism.",
    "policy_cohort": "The cohort is smaller than the member's policy allows.",
    "policy_corruption": "The attempt assumes fewer corrupt members than the member's policy does.",
    "policy_two_party_sum": "A sum of two members shows each the other's input; the member's policy does not allow it.",
    "policy_second_sum": "Without noise, a member sends one update and confirms one sum for each version.",
    "budget_spent": "The next release would pass the privacy budget that the member has set for its data.",
    "privacy_unaccountable": "The member's ledger has no formula for what the job's mechanism would release.",
    "ledger_rolled_back": "The member's privacy ledger is older than one that was seen before; its own log says which.",
    "ledger_failing": "The member cannot write its privacy ledger; its own log says why.",
    "policy_job_kind": "The member's policy does not admit this kind of job.",
    "policy_base_model": "The member's policy does not admit the weights that the job starts from.",
    "policy_parameters": "The job would share parameters that the member's policy keeps private.",
    "policy_authority": "The member's policy does not trust the authority of this federation.",
    "policy_peers": "The roster has more members unknown to the member's policy than the attempt assumes corrupt.",
    "policy_member_age": "More members of the roster are younger than the member's policy allows than the attempt "
    "assumes corrupt.",
    "policy_witnesses": "Too few witnesses have signed the roster log with every certificate of the roster.",
    "approval_awaited": "Too few of the member's stewards have approved the job; the member goes on by itself once "
    "they have.",
    "approval_declined": "A steward of the member declined the job.",
    "log_head_invalid": "The head of the roster log is missing, badly signed, out of date, or from the future.",
    "log_rolled_back": "The roster log is shorter than the member has seen it; the operator brings the newer one back.",
    "log_split": "The roster log contradicts what the member has seen of it; compare heads with the other members.",
    "log_withheld": "The member could not get the entries of the roster log that the attempt names.",
    "log_certificate_unknown": "A certificate of the roster is not in the roster log, or was revoked there.",
    "log_failing": "The member cannot read or write its copy of the roster log; its own log says why.",
    "policy_conditions": "The member's policy does not let it train now; it continues when its conditions hold again.",
    "policy_noise": "The job's privacy numbers are weaker than the member's policy demands.",
    "private_state_unusable": "The member cannot use what it keeps of this job's model; its own log says why.",
    "members_declined": "Too few members are left, because others declined the job for good; `coordinator member list` "
    "says why each did.",
    "no_improvement": "The job stopped early, because by its members' estimates its versions no longer improve.",
    "training_diverged": "The training diverged; lower the learning rate in a new job.",
    "context_unexpected": "The attempt's numbers are not those the member trained under.",
    "training_failed": "Training failed on the member's machine.",
    "bundle_unsuitable": "This member cannot use what the coordinator serves for this job.",
    "member_restarted": "The member's process was restarted; its secrets for the attempt are gone.",
    "ready_stale": "The update was trained for a round or version that is over.",
    "attempt_stale": "The message belongs to an attempt that is over.",
    "too_few_ready": "Fewer members are ready than the job needs.",
    "attempts_exhausted": "The round used up its attempts.",
    "job_paused": "The operator paused the job.",
    "job_aborted": "The operator aborted the job.",
    "job_finished": "The job has done all its rounds.",
    "upload_incomplete": "The masked vector is incomplete.",
    "upload_closed": "This attempt accepts no more masked vectors.",
    "result_invalid": "The opened sum cannot be a sum of valid inputs.",
    "rounds_failing": "Too many rounds in a row were abandoned; see the rounds' reasons, then resume the job.",
    "corpus_not_wanted": "The job accepts no synthetic text from this member: it orders none, or is not finished.",
    "corpus_invalid": "The file of synthetic text does not match its statement or the job's order.",
    "policy_corpus": "The member's policy does not allow the synthetic text that the job orders.",
    "member_withdrew": "The member withdrew from this job, or from all; that cannot be taken back.",
    "withdrawal_invalid": "The withdrawal is not what the calling member signed; the detail says what differs.",
    "internal": "The software failed; its log says where.",
}


def word(reason: Reason) -> str:
    """The reason as logs and metric labels show it, e.g. `token_used`."""
    return Reason.Name(reason).removeprefix(_PREFIX).lower()


def from_word(text: str) -> Reason:
    """The reason that a word names; `REASON_UNSPECIFIED` for a word that only newer software knows."""
    name = _PREFIX + text.upper()
    return cast(Reason, Reason.Value(name)) if name in set(Reason.keys()) else Reason.REASON_UNSPECIFIED


def of_protocol(reason: secure_agg.Reason) -> Reason:
    """The contract's enum value for a reason of secure aggregation."""
    return cast(Reason, Reason.Value(_PREFIX + reason.name))


def sentence(reason: Reason) -> str:
    """Says what happened and, if there is something to do, what to do."""
    text = word(reason)
    found = _SENTENCES.get(text)
    return found if found is not None else secure_agg.Reason[text.upper()].sentence
