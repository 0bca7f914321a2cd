"""One list of reasons: why a member is dropped, why a member refuses, why an attempt is abandoned.

Guarantees: every outcome of the protocol except "the sum was opened" carries exactly one `Reason`, and every reason has
one sentence for people. The names are part of the contract with other packages, which map them one to one: a reason may
be added, but never renamed.

On the server, misbehaviour of a member is data (`Dropped`), and so is an attempt that cannot be finished (`Abandoned`).
On the member, refusing to continue is an exception (`Refusal`), because nothing can follow it. Detail strings name
members, counts and limits, never keys, shares or values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from secure_agg.identity import MemberId

__all__ = ["Abandoned", "Dropped", "Phase", "Reason", "Refusal"]


class Phase(StrEnum):
    """The five phases, in order, under the names of the phase table in docs/secure-aggregation.md."""

    ADVERTISE = "advertise"
    SHARE = "share"
    MASK = "mask"
    CONFIRM = "confirm"
    UNMASK = "unmask"


class Reason(StrEnum):
    """One word for one cause. `reason.sentence` explains it to a person."""

    # Any phase, seen by the server.
    PHASE_DEADLINE = "phase_deadline"
    DISCONNECTED = "disconnected"
    MEMBER_REFUSED = "member_refused"
    SENDER_NOT_EXPECTED = "sender_not_expected"
    MESSAGE_NOT_EXPECTED = "message_not_expected"
    MESSAGE_CONFLICTING = "message_conflicting"
    MESSAGE_MALFORMED = "message_malformed"

    # Advertise, seen by the server.
    ADVERTISEMENT_IDENTITY_MISMATCH = "advertisement_identity_mismatch"
    ADVERTISEMENT_SIGNATURE_INVALID = "advertisement_signature_invalid"
    ADVERTISEMENT_KEY_INVALID = "advertisement_key_invalid"
    ADVERTISEMENT_KEY_DUPLICATE = "advertisement_key_duplicate"
    ADVERTISEMENT_CERTIFICATE_DUPLICATE = "advertisement_certificate_duplicate"

    # Share, seen by the server.
    DEALING_RECEIVERS_WRONG = "dealing_receivers_wrong"
    DEALING_SIGNATURE_INVALID = "dealing_signature_invalid"

    # Mask, seen by the server.
    MASKED_INPUT_LENGTH_WRONG = "masked_input_length_wrong"
    MASKED_INPUT_DIGEST_MISMATCH = "masked_input_digest_mismatch"
    MASKED_INPUT_SIGNATURE_INVALID = "masked_input_signature_invalid"
    MASKED_INPUT_INCOMPLETE = "masked_input_incomplete"
    MASKED_INPUT_OUT_OF_RING = "masked_input_out_of_ring"

    # On a dealing that a receiver cannot open, seen by the server and by the dealer.
    COMPLAINT_INVALID = "complaint_invalid"
    COMPLAINT_UNANSWERED = "complaint_unanswered"
    COMPLAINTS_TOO_MANY = "complaints_too_many"
    OPENING_INVALID = "opening_invalid"
    DEALER_CONVICTED = "dealer_convicted"
    DEALER_SILENT = "dealer_silent"

    # Confirm, seen by the server.
    CONFIRMATION_SIGNATURE_INVALID = "confirmation_signature_invalid"

    # Unmask, seen by the server.
    UNMASKING_DEALERS_WRONG = "unmasking_dealers_wrong"
    UNMASKING_BOTH_SHARES = "unmasking_both_shares"
    UNMASKING_SHARE_MISMATCH = "unmasking_share_mismatch"
    DEALER_SEED_INCONSISTENT = "dealer_seed_inconsistent"
    DEALER_ROOT_INCONSISTENT = "dealer_root_inconsistent"
    DEALER_PAIR_SEED_INCONSISTENT = "dealer_pair_seed_inconsistent"

    # On a group of the cohort, seen by the server and, in the roster, by the member.
    GROUP_TOO_SMALL = "group_too_small"

    # Why an attempt is abandoned.
    THRESHOLD_LOST = "threshold_lost"
    RECONSTRUCTION_FAILED = "reconstruction_failed"
    CANCELLED = "cancelled"

    # Before the protocol starts, seen by the member.
    CONTEXT_INVALID = "context_invalid"
    POLICY_REFUSED = "policy_refused"
    ATTEMPT_REPLAYED = "attempt_replayed"

    # On the roster, seen by the member.
    ROSTER_MALFORMED = "roster_malformed"
    ROSTER_TOO_SMALL = "roster_too_small"
    ROSTER_TOO_LARGE = "roster_too_large"
    ROSTER_MEMBER_DUPLICATE = "roster_member_duplicate"
    ROSTER_KEY_DUPLICATE = "roster_key_duplicate"
    ROSTER_KEY_INVALID = "roster_key_invalid"
    ROSTER_CERTIFICATE_DUPLICATE = "roster_certificate_duplicate"
    ROSTER_CERTIFICATE_MISSING = "roster_certificate_missing"
    ROSTER_KEYS_MISSING = "roster_keys_missing"
    ROSTER_IDENTITY_MISMATCH = "roster_identity_mismatch"
    ROSTER_SIGNATURE_INVALID = "roster_signature_invalid"
    ROSTER_OWN_ENTRY_MISSING = "roster_own_entry_missing"
    ROSTER_OWN_ENTRY_ALTERED = "roster_own_entry_altered"
    SECOND_ROSTER = "second_roster"

    # On what was dealt, seen by the member.
    DEALINGS_MALFORMED = "dealings_malformed"
    DEALINGS_TOO_FEW = "dealings_too_few"
    DEALINGS_DUPLICATE = "dealings_duplicate"
    DEALINGS_FOREIGN_DEALER = "dealings_foreign_dealer"
    DEALINGS_SIGNATURE_INVALID = "dealings_signature_invalid"
    SECOND_DEALINGS = "second_dealings"

    # On its own vector, seen by the member.
    VECTOR_INVALID = "vector_invalid"
    SECOND_MASKING = "second_masking"

    # On U3, seen by the member.
    SURVIVORS_DUPLICATE = "survivors_duplicate"
    SURVIVORS_WITHOUT_SELF = "survivors_without_self"
    SURVIVORS_NOT_DEALT = "survivors_not_dealt"
    SURVIVORS_TOO_FEW = "survivors_too_few"
    SECOND_SURVIVORS = "second_survivors"

    # On the confirmations and the request to unmask, seen by the member.
    CONFIRMATIONS_DUPLICATE = "confirmations_duplicate"
    CONFIRMATIONS_FOREIGN_MEMBER = "confirmations_foreign_member"
    CONFIRMATIONS_SIGNATURE_INVALID = "confirmations_signature_invalid"
    CONFIRMATIONS_TOO_FEW = "confirmations_too_few"
    SECOND_UNMASK_REQUEST = "second_unmask_request"

    @property
    def sentence(self) -> str:
        """One sentence that explains this reason to a person."""
        return _SENTENCES[self]


_SENTENCES: dict[Reason, str] = {
    Reason.PHASE_DEADLINE: "The member did not answer before the phase was closed.",
    Reason.DISCONNECTED: "The member's connection was lost.",
    Reason.MEMBER_REFUSED: "The member checked what it was sent and refused to continue.",
    Reason.SENDER_NOT_EXPECTED: "The sender is not one of those who may answer in this phase.",
    Reason.MESSAGE_NOT_EXPECTED: "The message does not belong to this phase.",
    Reason.MESSAGE_CONFLICTING: "The member sent two different messages where the protocol allows one.",
    Reason.MESSAGE_MALFORMED: "A field of the message has the wrong length or names another sender.",
    Reason.ADVERTISEMENT_IDENTITY_MISMATCH: "The certificate in the advertisement names another member.",
    Reason.ADVERTISEMENT_SIGNATURE_INVALID: (
        "The advertisement's certificate or its signature over keys, nonce and context is not valid."
    ),
    Reason.ADVERTISEMENT_KEY_INVALID: "A key in the advertisement is not a usable hybrid public key.",
    Reason.ADVERTISEMENT_KEY_DUPLICATE: "A key or nonce in the advertisement was already advertised.",
    Reason.ADVERTISEMENT_CERTIFICATE_DUPLICATE: (
        "The certificate in the advertisement, or its key, already belongs to another member of the cohort."
    ),
    Reason.DEALING_RECEIVERS_WRONG: "The dealing does not hold exactly one message for every receiver.",
    Reason.DEALING_SIGNATURE_INVALID: "The dealer's signature over its commitments is not valid.",
    Reason.MASKED_INPUT_LENGTH_WRONG: "The masked vector does not have the length that the context names.",
    Reason.MASKED_INPUT_DIGEST_MISMATCH: "The uploaded vector is not the one whose digest the member signed.",
    Reason.MASKED_INPUT_SIGNATURE_INVALID: "The signature over the masked vector's digest is not valid.",
    Reason.MASKED_INPUT_INCOMPLETE: "The upload of the masked vector broke off before its end.",
    Reason.MASKED_INPUT_OUT_OF_RING: "The masked vector holds a value outside the ring of the context.",
    Reason.COMPLAINT_INVALID: (
        "A complaint is not signed by the receiver it names, or is not about what the dealer dealt to it."
    ),
    Reason.COMPLAINT_UNANSWERED: (
        "The dealer that the member complained about does not answer or is gone, so the member cannot mask."
    ),
    Reason.COMPLAINTS_TOO_MANY: "More receivers complained about one dealer than the attempt assumes corrupt.",
    Reason.OPENING_INVALID: "An opening answers no complaint, is not signed by its dealer, or does not open.",
    Reason.DEALER_CONVICTED: "What the dealer sealed and what it opened are not what it committed to.",
    Reason.DEALER_SILENT: "The dealer did not open in time what a receiver had complained about.",
    Reason.CONFIRMATION_SIGNATURE_INVALID: ("The signature over the survivors, model and context is not valid."),
    Reason.UNMASKING_DEALERS_WRONG: "The answer does not hold exactly one share for every dealer.",
    Reason.UNMASKING_BOTH_SHARES: "The answer holds both shares of one dealer.",
    Reason.UNMASKING_SHARE_MISMATCH: "A revealed share is not the one that its dealer committed to.",
    Reason.DEALER_SEED_INCONSISTENT: "The dealer's shares do not rebuild the self-mask seed it committed to.",
    Reason.DEALER_ROOT_INCONSISTENT: "The dealer's shares do not rebuild the root of the seed key it advertised.",
    Reason.DEALER_PAIR_SEED_INCONSISTENT: (
        "The seed that the member chose for a pair is not the one it committed to, so the pair's mask stays in the sum."
    ),
    Reason.GROUP_TOO_SMALL: "Fewer members of the group are left than its sum needs.",
    Reason.THRESHOLD_LOST: "Fewer members are left than the phase needs.",
    Reason.RECONSTRUCTION_FAILED: "A secret needed to open the sum could not be rebuilt from correct shares.",
    Reason.CANCELLED: "The attempt was stopped from outside the protocol.",
    Reason.CONTEXT_INVALID: "The numbers of the attempt contradict each other.",
    Reason.POLICY_REFUSED: "The attempt is weaker than the member's own policy allows.",
    Reason.ATTEMPT_REPLAYED: "The member has already taken part in this or a later round and attempt.",
    Reason.ROSTER_MALFORMED: "A field of a roster entry has the wrong length or is empty.",
    Reason.ROSTER_TOO_SMALL: "The roster names fewer members than the phase needs.",
    Reason.ROSTER_TOO_LARGE: "The roster names more members than the cohort that the context fixes.",
    Reason.ROSTER_MEMBER_DUPLICATE: "The roster names a member twice.",
    Reason.ROSTER_KEY_DUPLICATE: "Two roster entries share a key or a nonce.",
    Reason.ROSTER_KEY_INVALID: "A roster entry holds a key that is not a usable hybrid public key.",
    Reason.ROSTER_CERTIFICATE_DUPLICATE: "Two roster entries share a certificate or a certificate's key.",
    Reason.ROSTER_CERTIFICATE_MISSING: (
        "A roster entry names its certificate by a digest, and no certificate with that digest could be obtained."
    ),
    Reason.ROSTER_KEYS_MISSING: (
        "A roster entry names a neighbour's keys by a digest, and no keys with that digest could be obtained."
    ),
    Reason.ROSTER_IDENTITY_MISMATCH: "A roster entry names one member and its certificate another.",
    Reason.ROSTER_SIGNATURE_INVALID: ("A roster entry's certificate or signature is not valid for this context."),
    Reason.ROSTER_OWN_ENTRY_MISSING: "The roster does not name the member it was sent to.",
    Reason.ROSTER_OWN_ENTRY_ALTERED: "The roster's entry for this member is not what this member sent.",
    Reason.SECOND_ROSTER: "The keys advertised were already used with a roster.",
    Reason.DEALINGS_MALFORMED: "A dealt message has fields of the wrong length or number.",
    Reason.DEALINGS_TOO_FEW: "Fewer members dealt shares than the phase needs.",
    Reason.DEALINGS_DUPLICATE: "The same dealer appears twice among the messages dealt.",
    Reason.DEALINGS_FOREIGN_DEALER: ("A message claims to be dealt by someone who may not deal to this member."),
    Reason.DEALINGS_SIGNATURE_INVALID: ("A dealer's signature does not cover the commitments that were passed on."),
    Reason.SECOND_DEALINGS: "The messages dealt were already accepted once in this session.",
    Reason.VECTOR_INVALID: "The vector to mask has the wrong type, length or range.",
    Reason.SECOND_MASKING: "The masks of this session were already used on a vector.",
    Reason.SURVIVORS_DUPLICATE: "The list of survivors names a member twice.",
    Reason.SURVIVORS_WITHOUT_SELF: "The list of survivors leaves out the member it was sent to.",
    Reason.SURVIVORS_NOT_DEALT: "The list of survivors names a member whose dealing never arrived here.",
    Reason.SURVIVORS_TOO_FEW: "The list of survivors is shorter than the phase needs.",
    Reason.SECOND_SURVIVORS: "This member already signed a list of survivors in this session.",
    Reason.CONFIRMATIONS_DUPLICATE: "The same member appears twice among the confirmations.",
    Reason.CONFIRMATIONS_FOREIGN_MEMBER: ("A confirmation comes from a member that is not among the survivors."),
    Reason.CONFIRMATIONS_SIGNATURE_INVALID: (
        "A confirmation is not a valid signature over the survivors, model and context this member confirmed."
    ),
    Reason.CONFIRMATIONS_TOO_FEW: "Fewer survivors confirmed than the phase needs.",
    Reason.SECOND_UNMASK_REQUEST: "This member already revealed its shares once in this session.",
}


class Refusal(Exception):
    """An honest member refuses to continue. The state that raised it is unchanged.

    `reason` says why. `member` names the other member whose entry or message was at fault; it is None if the fault is
    in the message as a whole, which is the coordinator's. `detail` adds numbers.
    """

    def __init__(self, reason: Reason, member: MemberId | None = None, detail: str = "") -> None:
        self.reason = reason
        self.member = member
        self.detail = detail
        about = f" [{member}]" if member is not None else ""
        super().__init__(f"{reason.value}{about}: {detail or reason.sentence}")


@dataclass(frozen=True, slots=True)
class Dropped:
    """The server no longer relies on a member, and why. Data, not an exception, because misbehaviour is expected."""

    member: MemberId
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The sum of an attempt can no longer be opened. `dropped` lists all members lost so far, in order."""

    phase: Phase
    reason: Reason
    detail: str = ""
    dropped: tuple[Dropped, ...] = ()
