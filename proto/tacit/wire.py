"""Converts messages to protobuf and back.

Parsing checks only the form: a message is present, numbers are in range, names are well formed. The phase that receives
a message checks its meaning. A message that cannot be parsed raises `WireInvalid`, and nothing has changed.

Before a message is decoded, `tacit.fields` cleans its free text and refuses malformed identifiers.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

import secure_agg
from secure_agg import ContextInvalid, Graph, GroupedGraph, RoundContext, SparseGraph
from tacit import messages
from tacit.attempt import AttemptId
from tacit.authorities import MAX_AUTHORITIES_BYTES
from tacit.fields import TextInvalid, admit
from tacit.limits import ENDED_AT_ONCE, MAX_GROUP, MAX_MEMBERS, MAX_NEIGHBOURS, MAX_PATH, MAX_ROSTER_PATH
from tacit.messages import AttemptMessage, CoordinatorPayload, FromCoordinator, FromMember, MemberPayload
from tacit.reason import Reason
from tacit.roster import HeadInvalid, SignedHead
from tacit.roster_wire import head_from_pb, head_to_pb
from tacit.v1 import federation_pb2 as pb

__all__ = [
    "WireInvalid",
    "attempt_from_pb",
    "attempt_to_pb",
    "evidence_from_bytes",
    "evidence_to_bytes",
    "from_coordinator",
    "from_member",
    "masked_input_from_pb",
    "masked_input_to_pb",
    "to_coordinator",
    "to_member",
]


_MAX_PATTERNS = 64


class WireInvalid(ValueError):
    """A message is malformed."""


def _admit(message: Message) -> None:
    try:
        admit(message, max_items=MAX_MEMBERS)
    except TextInvalid as error:
        raise WireInvalid(str(error)) from error


def attempt_to_pb(attempt: AttemptId) -> pb.AttemptRef:
    """Encodes an attempt."""
    return pb.AttemptRef(job=attempt.job, round=attempt.round, attempt=attempt.attempt)


def attempt_from_pb(ref: pb.AttemptRef) -> AttemptId:
    """Decodes an attempt.

    Raises:
        WireInvalid: it is incomplete or malformed.
    """
    _admit(ref)
    return _attempt(ref)


def _attempt(ref: pb.AttemptRef) -> AttemptId:
    if not ref.job or not ref.round or not ref.attempt:
        raise WireInvalid("a message names no attempt")
    return AttemptId(ref.job, ref.round, ref.attempt)


def masked_input_to_pb(message: secure_agg.MaskedInput) -> pb.MaskedInput:
    """Encodes a masked input for the header of an upload."""
    return pb.MaskedInput(
        member=message.member, digest=message.digest, length=message.length, signature=message.signature
    )


def masked_input_from_pb(message: pb.MaskedInput) -> secure_agg.MaskedInput:
    """Decodes a masked input from the header of an upload.

    Raises:
        WireInvalid: it is malformed.
    """
    _admit(message)
    return secure_agg.MaskedInput(
        member=message.member, digest=message.digest, length=message.length, signature=message.signature
    )


def evidence_to_bytes(evidence: secure_agg.Evidence) -> bytes:
    """Encodes what convicts a dealer."""
    return pb.Evidence(
        session=evidence.session,
        dealing=_received_to_pb(evidence.dealing),
        index=evidence.index,
        count=evidence.count,
        opening=_opening_to_pb(evidence.opening),
    ).SerializeToString(deterministic=True)


def evidence_from_bytes(data: bytes) -> secure_agg.Evidence:
    """Decodes what may convict a dealer; `secure_agg.convicts` checks it.

    Raises:
        WireInvalid: it is malformed.
    """
    message = pb.Evidence()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise WireInvalid(f"this is no evidence: {error}") from error
    _admit(message)
    return secure_agg.Evidence(
        session=_digest(message.session),
        dealing=_received_from_pb(message.dealing),
        index=message.index,
        count=message.count,
        opening=_opening_from_pb(message.opening),
    )


# ---- member to coordinator ----------------------------------------------------------------------------------------


def to_coordinator(message: FromMember) -> pb.MemberMessage:
    """Encodes a member's message."""
    match message:
        case messages.Hello():
            hello = pb.Hello(
                protocol_version=message.protocol_version,
                software_version=message.software_version,
                admits=message.admits,
                process=message.process,
                ledger=_ledger_to_pb(message.ledger),
            )
            return pb.MemberMessage(hello=hello)
        case messages.Decline():
            decline = pb.Decline(job=message.job, round=message.round, reason=message.reason, detail=message.detail)
            return pb.MemberMessage(decline=decline)
        case messages.Ready():
            report = message.privacy
            ready = pb.Ready(
                job=message.job,
                round=message.round,
                version=message.version,
                privacy=None if report is None else pb.PrivacyReport(epsilon=report.epsilon, delta=report.delta),
                ledger=_ledger_to_pb(message.ledger),
                approvals=message.approvals,
            )
            return pb.MemberMessage(ready=ready)
        case AttemptMessage():
            return _member_attempt_to_pb(attempt_to_pb(message.attempt), message.payload)


def _member_attempt_to_pb(ref: pb.AttemptRef, payload: MemberPayload) -> pb.MemberMessage:
    match payload:
        case secure_agg.Advertisement():
            advertisement = _advertisement_to_pb(payload)
            advertisement.ref.CopyFrom(ref)
            return pb.MemberMessage(advertisement=advertisement)
        case secure_agg.Dealing():
            dealing = pb.Dealing(
                ref=ref,
                dealer=payload.dealer,
                seed_commitment=payload.seed_commitment,
                shares=map(_dealt_to_pb, payload.shares),
                signature=payload.signature,
            )
            return pb.MemberMessage(dealing=dealing)
        case secure_agg.Complaints():
            complaints = pb.Complaints(ref=ref, complaints=map(_complaint_to_pb, payload.complaints))
            return pb.MemberMessage(complaints=complaints)
        case secure_agg.Opening():
            opening = _opening_to_pb(payload)
            opening.ref.CopyFrom(ref)
            return pb.MemberMessage(opening=opening)
        case secure_agg.Confirmation():
            confirmation = pb.Confirmation(ref=ref, member=payload.member, signature=payload.signature)
            return pb.MemberMessage(confirmation=confirmation)
        case secure_agg.Unmasking():
            unmasking = pb.Unmasking(
                ref=ref,
                member=payload.member,
                seed_shares=(_revealed_to_pb(share) for share in payload.seed_shares),
                root_shares=(_revealed_to_pb(share) for share in payload.root_shares),
            )
            return pb.MemberMessage(unmasking=unmasking)
        case messages.AttemptRefusal():
            refusal = pb.AttemptRefusal(ref=ref, reason=payload.reason, detail=payload.detail, member=payload.member)
            return pb.MemberMessage(refusal=refusal)


def from_member(message: pb.MemberMessage) -> FromMember:
    """Decodes a member's message.

    Raises:
        WireInvalid: it is empty, names no attempt, or holds a malformed identifier.
    """
    _admit(message)
    match message.WhichOneof("message"):
        case "hello":
            hello = message.hello
            return messages.Hello(
                protocol_version=hello.protocol_version,
                software_version=hello.software_version,
                process=hello.process,
                admits=_patterns(hello.admits),
                ledger=_ledger_from_pb(hello),
            )
        case "decline":
            decline = message.decline
            return messages.Decline(decline.job, decline.round, _reason(decline.reason), decline.detail)
        case "ready":
            ready = message.ready
            report = _report_from_pb(ready)
            return messages.Ready(
                ready.job, ready.round, ready.version, report, _ledger_from_pb(ready), ready.approvals
            )
        case None:
            raise WireInvalid("a message with nothing in it; the member's software may be newer than this")
        case kind:
            payload = getattr(message, kind)
            return AttemptMessage(_attempt(payload.ref), _member_payload(message))


def _ledger_to_pb(ledger: messages.LedgerCounter | None) -> pb.LedgerCounter | None:
    return None if ledger is None else pb.LedgerCounter(id=ledger.id, sequence=ledger.sequence)


def _ledger_from_pb(message: pb.Hello | pb.Ready) -> messages.LedgerCounter | None:
    if not message.HasField("ledger"):
        return None
    ledger = message.ledger
    if len(ledger.id) != 16 or ledger.sequence >= 2**63:
        raise WireInvalid("a ledger is named by 16 bytes, and its records are numbered below 2^63")
    return messages.LedgerCounter(ledger.id, ledger.sequence)


def _report_from_pb(message: pb.Ready) -> messages.PrivacyReport | None:
    if not message.HasField("privacy"):
        return None
    report = message.privacy
    if not (0 <= report.epsilon <= 1e9 and 0 <= report.delta <= 1):
        raise WireInvalid("an epsilon is a number from 0 to 1e9, a delta a number from 0 to 1")
    return messages.PrivacyReport(report.epsilon, report.delta)


def _member_payload(message: pb.MemberMessage) -> MemberPayload:
    match message.WhichOneof("message"):
        case "advertisement":
            return _advertisement_from_pb(message.advertisement)
        case "dealing":
            dealing = message.dealing
            return secure_agg.Dealing(
                dealer=dealing.dealer,
                seed_commitment=dealing.seed_commitment,
                shares=tuple(map(_dealt_from_pb, _few(dealing.shares, MAX_NEIGHBOURS, "shares"))),
                signature=dealing.signature,
            )
        case "complaints":
            said = _few(message.complaints.complaints, 2 * MAX_NEIGHBOURS, "complaints")
            return secure_agg.Complaints(tuple(map(_complaint_from_pb, said)))
        case "opening":
            return _opening_from_pb(message.opening)
        case "confirmation":
            return secure_agg.Confirmation(message.confirmation.member, message.confirmation.signature)
        case "unmasking":
            unmasking = message.unmasking
            return secure_agg.Unmasking(
                member=unmasking.member,
                seed_shares=_all_revealed(unmasking.seed_shares),
                root_shares=_all_revealed(unmasking.root_shares),
            )
        case "refusal":
            refusal = message.refusal
            return messages.AttemptRefusal(_reason(refusal.reason), refusal.detail, refusal.member)
        case kind:
            raise WireInvalid(f"a message of an unknown kind: {kind}")


# ---- coordinator to member ----------------------------------------------------------------------------------------


def to_member(message: FromCoordinator) -> pb.CoordinatorMessage:
    """Encodes a coordinator's message."""
    match message:
        case messages.Welcome():
            welcome = pb.Welcome(
                protocol_version=message.protocol_version,
                software_version=message.software_version,
                federation=message.federation,
                server_time_ms=message.server_time_ms,
                ledger_sequence=message.ledger_sequence,
            )
            return pb.CoordinatorMessage(welcome=welcome)
        case messages.Goodbye():
            return pb.CoordinatorMessage(goodbye=pb.Goodbye(reason=message.reason, detail=message.detail))
        case messages.Standby():
            return pb.CoordinatorMessage(standby=pb.Standby(detail=message.detail))
        case messages.AuthoritiesChanged():
            return pb.CoordinatorMessage(authorities_changed=pb.AuthoritiesChanged(authorities=message.document))
        case messages.Assignment():
            assignment = pb.Assignment(
                job=message.job,
                round=message.round,
                job_document=message.job_document,
                version=message.version,
                version_number=message.version_number,
                window_ms=message.window_ms,
            )
            return pb.CoordinatorMessage(assignment=assignment)
        case messages.JobEnded():
            return pb.CoordinatorMessage(job_ended=_ended_to_pb(message))
        case messages.JobsEnded():
            return pb.CoordinatorMessage(jobs_ended=pb.JobsEnded(jobs=map(_ended_to_pb, message.jobs)))
        case AttemptMessage():
            return _coordinator_attempt_to_pb(attempt_to_pb(message.attempt), message.payload)


def _coordinator_attempt_to_pb(ref: pb.AttemptRef, payload: CoordinatorPayload) -> pb.CoordinatorMessage:
    match payload:
        case messages.AttemptOpened():
            opened = _context_to_pb(ref, payload.context)
            if isinstance(payload.log_head, SignedHead):
                opened.log_head.CopyFrom(head_to_pb(payload.log_head))
            return pb.CoordinatorMessage(attempt_opened=opened)
        case secure_agg.Roster():
            roster = pb.Roster(ref=ref, advertisements=map(_advertisement_to_pb, payload.advertisements))
            return pb.CoordinatorMessage(roster=roster)
        case secure_agg.DigestRoster():
            entries = map(_digest_advertisement_to_pb, payload.advertisements)
            return pb.CoordinatorMessage(digest_roster=pb.DigestRoster(ref=ref, advertisements=entries))
        case secure_agg.GroupRoster():
            of_group = pb.GroupRoster(
                ref=ref,
                names=payload.names,
                advertisements=map(_digest_advertisement_to_pb, payload.advertisements),
                paths=map(b"".join, payload.paths),
            )
            return pb.CoordinatorMessage(group_roster=of_group)
        case secure_agg.ReceivedDealings():
            message = pb.CoordinatorMessage(received_dealings=pb.ReceivedDealings(ref=ref))
            # A thousand members get a hundred of these each. Made in their places, they take a seventh of the time of
            # messages that are made first and copied.
            for dealing in payload.dealings:
                _fill_received(message.received_dealings.dealings.add(), dealing)
            return message
        case secure_agg.Complaint():
            complaint = _complaint_to_pb(payload)
            complaint.ref.CopyFrom(ref)
            return pb.CoordinatorMessage(complaint=complaint)
        case secure_agg.Openings():
            openings = pb.Openings(ref=ref, openings=map(_opening_to_pb, payload.openings))
            return pb.CoordinatorMessage(openings=openings)
        case secure_agg.Survivors():
            return pb.CoordinatorMessage(survivors=pb.Survivors(ref=ref, members=payload.members))
        case secure_agg.Confirmations():
            confirmations = (
                pb.Confirmation(member=item.member, signature=item.signature) for item in payload.confirmations
            )
            return pb.CoordinatorMessage(confirmations=pb.Confirmations(ref=ref, confirmations=confirmations))
        case messages.AttemptEnded():
            ended = pb.AttemptEnded(
                ref=ref,
                published=payload.published,
                reason=payload.reason,
                detail=payload.detail,
                result=payload.result,
                new_version=payload.new_version,
            )
            return pb.CoordinatorMessage(attempt_ended=ended)


def from_coordinator(message: pb.CoordinatorMessage) -> FromCoordinator:
    """Decodes a coordinator's message.

    A context whose numbers are missing or contradict each other raises nothing here: `AttemptOpened` reports it.

    Raises:
        WireInvalid: it is empty, names no attempt, or holds a malformed identifier.
    """
    _admit(message)
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            return messages.Welcome(
                protocol_version=welcome.protocol_version,
                software_version=welcome.software_version,
                federation=welcome.federation,
                server_time_ms=welcome.server_time_ms,
                ledger_sequence=welcome.ledger_sequence,
            )
        case "goodbye":
            return messages.Goodbye(_reason(message.goodbye.reason), message.goodbye.detail)
        case "standby":
            return messages.Standby(message.standby.detail)
        case "authorities_changed":
            if len(message.authorities_changed.authorities) > MAX_AUTHORITIES_BYTES:
                raise WireInvalid(f"the list of authorities has more than {MAX_AUTHORITIES_BYTES} bytes")
            return messages.AuthoritiesChanged(message.authorities_changed.authorities)
        case "assignment":
            assignment = message.assignment
            return messages.Assignment(
                job=assignment.job,
                round=assignment.round,
                job_document=_digest(assignment.job_document),
                version=_digest(assignment.version),
                version_number=assignment.version_number,
                window_ms=assignment.window_ms,
            )
        case "job_ended":
            return _ended_from_pb(message.job_ended)
        case "jobs_ended":
            ended = _few(message.jobs_ended.jobs, ENDED_AT_ONCE, "jobs")
            return messages.JobsEnded(tuple(map(_ended_from_pb, ended)))
        case None:
            raise WireInvalid("a message with nothing in it; the coordinator's software may be newer than this")
        case kind:
            payload = getattr(message, kind)
            return AttemptMessage(_attempt(payload.ref), _coordinator_payload(message))


def _ended_to_pb(ended: messages.JobEnded) -> pb.JobEnded:
    return pb.JobEnded(job=ended.job, reason=ended.reason, final_version=ended.final_version)


def _ended_from_pb(ended: pb.JobEnded) -> messages.JobEnded:
    return messages.JobEnded(ended.job, _reason(ended.reason), _digest(ended.final_version, empty=True))


def _coordinator_payload(message: pb.CoordinatorMessage) -> CoordinatorPayload:
    match message.WhichOneof("message"):
        case "attempt_opened":
            return messages.AttemptOpened(_context_from_pb(message.attempt_opened), _log_head(message.attempt_opened))
        case "roster":
            whole = _few(message.roster.advertisements, MAX_MEMBERS, "members")
            return secure_agg.Roster(tuple(map(_advertisement_from_pb, whole)))
        case "digest_roster":
            entries = _few(message.digest_roster.advertisements, MAX_MEMBERS, "members")
            return secure_agg.DigestRoster(tuple(map(_digest_advertisement_from_pb, entries)))
        case "group_roster":
            return _group_roster_from_pb(message.group_roster)
        case "received_dealings":
            return secure_agg.ReceivedDealings(
                tuple(
                    _received_from_pb(dealing)
                    for dealing in _few(message.received_dealings.dealings, MAX_NEIGHBOURS, "dealings")
                )
            )
        case "complaint":
            return _complaint_from_pb(message.complaint)
        case "openings":
            opened = _few(message.openings.openings, 2 * MAX_NEIGHBOURS, "openings")
            return secure_agg.Openings(tuple(map(_opening_from_pb, opened)))
        case "survivors":
            return secure_agg.Survivors(tuple(_few(message.survivors.members, MAX_MEMBERS, "members")))
        case "confirmations":
            signed = _few(message.confirmations.confirmations, MAX_MEMBERS, "confirmations")
            return secure_agg.Confirmations(
                tuple(secure_agg.Confirmation(item.member, item.signature) for item in signed)
            )
        case "attempt_ended":
            ended = message.attempt_ended
            return messages.AttemptEnded(
                published=ended.published,
                reason=_reason(ended.reason),
                detail=ended.detail,
                result=_digest(ended.result, empty=True),
                new_version=_digest(ended.new_version, empty=True),
            )
        case kind:
            raise WireInvalid(f"a message of an unknown kind: {kind}")


def _digest(data: bytes, *, empty: bool = False) -> bytes:
    if len(data) != 32 and not (empty and not data):
        raise WireInvalid("a digest has 32 bytes")
    return data


# ---- parts ----------------------------------------------------------------------------------------------------------


def _advertisement_to_pb(message: secure_agg.Advertisement) -> pb.Advertisement:
    return pb.Advertisement(
        member=message.member,
        certificate=message.certificate,
        keys=message.keys,
        nonce=message.nonce,
        signature=message.signature,
    )


def _advertisement_from_pb(message: pb.Advertisement) -> secure_agg.Advertisement:
    return secure_agg.Advertisement(
        member=message.member,
        certificate=message.certificate,
        keys=message.keys,
        nonce=message.nonce,
        signature=message.signature,
    )


def _digest_advertisement_to_pb(message: secure_agg.DigestAdvertisement) -> pb.DigestAdvertisement:
    return pb.DigestAdvertisement(
        member=message.member,
        certificate_digest=message.certificate_digest,
        keys_digest=message.keys_digest,
        nonce=message.nonce,
        signature=message.signature,
    )


def _digest_advertisement_from_pb(message: pb.DigestAdvertisement) -> secure_agg.DigestAdvertisement:
    return secure_agg.DigestAdvertisement(
        member=message.member,
        certificate_digest=message.certificate_digest,
        keys_digest=message.keys_digest,
        nonce=message.nonce,
        signature=message.signature,
    )


def _group_roster_from_pb(message: pb.GroupRoster) -> secure_agg.GroupRoster:
    names = _few(message.names, MAX_MEMBERS, "members")
    entries = _few(message.advertisements, MAX_GROUP, "members of a group")
    paths = _few(message.paths, MAX_GROUP, "paths")
    return secure_agg.GroupRoster(
        tuple(names), tuple(map(_digest_advertisement_from_pb, entries)), tuple(map(_path_from_pb, paths))
    )


def _path_from_pb(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % 32 or len(joined) > 32 * MAX_ROSTER_PATH:
        raise WireInvalid(f"a path in a roster's tree has at most {MAX_ROSTER_PATH} digests, got {len(joined)} bytes")
    return tuple(joined[at : at + 32] for at in range(0, len(joined), 32))


def _dealt_to_pb(share: secure_agg.DealtShare) -> pb.DealtShare:
    return pb.DealtShare(
        receiver=share.receiver,
        sealed_key=share.sealed_key,
        locked_shares=share.locked_shares,
        key_commitment=share.key_commitment,
        root_commitment=share.root_commitment,
        seed_commitment=share.seed_commitment,
        sealed_pair_seed=share.sealed_pair_seed,
        pair_seed_commitment=share.pair_seed_commitment,
    )


def _dealt_from_pb(share: pb.DealtShare) -> secure_agg.DealtShare:
    return secure_agg.DealtShare(
        receiver=share.receiver,
        sealed_key=share.sealed_key,
        locked_shares=share.locked_shares,
        key_commitment=share.key_commitment,
        root_commitment=share.root_commitment,
        seed_commitment=share.seed_commitment,
        sealed_pair_seed=share.sealed_pair_seed,
        pair_seed_commitment=share.pair_seed_commitment,
    )


def _received_to_pb(dealing: secure_agg.ReceivedDealing) -> pb.ReceivedDealing:
    made = pb.ReceivedDealing()
    _fill_received(made, dealing)
    return made


def _fill_received(made: pb.ReceivedDealing, dealing: secure_agg.ReceivedDealing) -> None:
    made.dealer = dealing.dealer
    made.seed_commitment = dealing.seed_commitment
    made.path.extend(dealing.path)
    made.signature = dealing.signature
    share, given = made.share, dealing.share
    share.receiver = given.receiver
    share.sealed_key = given.sealed_key
    share.locked_shares = given.locked_shares
    share.key_commitment = given.key_commitment
    share.root_commitment = given.root_commitment
    share.seed_commitment = given.seed_commitment
    share.sealed_pair_seed = given.sealed_pair_seed
    share.pair_seed_commitment = given.pair_seed_commitment


def _received_from_pb(dealing: pb.ReceivedDealing) -> secure_agg.ReceivedDealing:
    return secure_agg.ReceivedDealing(
        dealer=dealing.dealer,
        share=_dealt_from_pb(dealing.share),
        seed_commitment=dealing.seed_commitment,
        path=tuple(_few(dealing.path, MAX_PATH, "digests of a path")),
        signature=dealing.signature,
    )


_PARTS = {secure_agg.Part.SHARES: pb.PART_SHARES, secure_agg.Part.PAIR_SEED: pb.PART_PAIR_SEED}


def _part(number: int) -> secure_agg.Part:
    for part, of_part in _PARTS.items():
        if of_part == number:
            return part
    raise WireInvalid("a complaint or an opening is about the shares or the pair's seed; the sender may be newer")


def _complaint_to_pb(complaint: secure_agg.Complaint) -> pb.Complaint:
    return pb.Complaint(
        complainant=complaint.complainant,
        dealer=complaint.dealer,
        part=_PARTS[complaint.part],
        leaf=complaint.leaf,
        signature=complaint.signature,
    )


def _complaint_from_pb(complaint: pb.Complaint) -> secure_agg.Complaint:
    return secure_agg.Complaint(
        complainant=complaint.complainant,
        dealer=complaint.dealer,
        part=_part(complaint.part),
        leaf=complaint.leaf,
        signature=complaint.signature,
    )


def _opening_to_pb(opening: secure_agg.Opening) -> pb.Opening:
    return pb.Opening(
        complainant=opening.complainant,
        dealer=opening.dealer,
        part=_PARTS[opening.part],
        leaf=opening.leaf,
        secret=opening.secret,
        signature=opening.signature,
    )


def _opening_from_pb(opening: pb.Opening) -> secure_agg.Opening:
    return secure_agg.Opening(
        complainant=opening.complainant,
        dealer=opening.dealer,
        part=_part(opening.part),
        leaf=opening.leaf,
        secret=opening.secret,
        signature=opening.signature,
    )


def _revealed_to_pb(share: secure_agg.RevealedShare) -> pb.RevealedShare:
    return pb.RevealedShare(dealer=share.dealer, share=share.share)


def _revealed_from_pb(share: pb.RevealedShare) -> secure_agg.RevealedShare:
    return secure_agg.RevealedShare(dealer=share.dealer, share=share.share)


def _all_revealed(shares: Sequence[pb.RevealedShare]) -> tuple[secure_agg.RevealedShare, ...]:
    return tuple(_revealed_from_pb(share) for share in _few(shares, MAX_NEIGHBOURS, "shares"))


def _context_to_pb(ref: pb.AttemptRef, context: RoundContext) -> pb.AttemptOpened:
    graph, groups = context.sparse, context.grouped
    return pb.AttemptOpened(
        ref=ref,
        federation=context.federation,
        application=context.application,
        model=context.model,
        cohort=context.cohort,
        threshold=context.threshold,
        assumed_corrupt=context.assumed_corrupt,
        values=context.values,
        bits=context.bits,
        sparse_graph=None if graph is None else _graph_to_pb(graph),
        groups=None if groups is None else _groups_to_pb(groups),
    )


def _graph_to_pb(graph: SparseGraph) -> pb.SparseGraph:
    return pb.SparseGraph(
        degree=graph.degree,
        corrupt_millionths=graph.corrupt_millionths,
        lost_millionths=graph.lost_millionths,
        sigma=graph.sigma,
        absent=graph.absent,
    )


def _groups_to_pb(groups: GroupedGraph) -> pb.Groups:
    return pb.Groups(groups=groups.groups, least=groups.least, sigma=groups.sigma, absent=groups.absent)


_NUMBERS = ("cohort", "threshold", "assumed_corrupt", "values", "bits")
_GRAPH_NUMBERS = ("degree", "corrupt_millionths", "lost_millionths", "sigma", "absent")
_GROUPS_NUMBERS = ("groups", "least", "sigma", "absent")


def _context_from_pb(message: pb.AttemptOpened) -> RoundContext | str:
    """The context, or why it is invalid: the member refuses such an attempt, but can read the message."""
    try:
        graph: Graph | SparseGraph | GroupedGraph = Graph.COMPLETE
        numbers = _present(message, _NUMBERS, "the context")
        if message.HasField("sparse_graph"):
            graph = SparseGraph(**_present(message.sparse_graph, _GRAPH_NUMBERS, "its sparse graph"))
        if message.HasField("groups"):
            if message.HasField("sparse_graph"):
                raise ContextInvalid("the context has a sparse graph and groups; an attempt has at most one of the two")
            graph = GroupedGraph(**_present(message.groups, _GROUPS_NUMBERS, "its groups"))
        return RoundContext(
            federation=message.federation,
            job=message.ref.job,
            round=message.ref.round,
            attempt=message.ref.attempt,
            application=message.application,
            model=message.model,
            graph=graph,
            **numbers,
        )
    except ContextInvalid as error:
        return str(error)


def _log_head(message: pb.AttemptOpened) -> SignedHead | str | None:
    """The head of the roster log, or why there is none."""
    if not message.HasField("log_head"):
        return None
    try:
        return head_from_pb(message.log_head, message.federation)
    except HeadInvalid as error:
        return str(error)


def _present(message: Message, names: Iterable[str], what: str) -> dict[str, int]:
    """Reads the numbers by name. Raises ContextInvalid if one is absent: it would read as 0, which may be weaker."""
    missing = [name for name in names if not message.HasField(name)]
    if missing:
        raise ContextInvalid(
            f"{what} leaves out {', '.join(missing)}; the coordinator states every number of an attempt"
        )
    return {name: getattr(message, name) for name in names}


_Item = TypeVar("_Item")


def _few(items: Sequence[_Item], most: int, what: str) -> Sequence[_Item]:
    """Checks the number of items before they are decoded: protobuf packs a million empty ones into two megabytes.

    Raises:
        WireInvalid: there are more than any cohort has.
    """
    if len(items) > most:
        raise WireInvalid(f"{len(items)} {what} in one message; there are at most {most}")
    return items


def _patterns(values: Sequence[str]) -> tuple[str, ...]:
    patterns = tuple(_few(values, _MAX_PATTERNS, "patterns of job names"))
    if "" in patterns:
        raise WireInvalid("a pattern of job names is empty")
    return patterns


def _reason(number: Reason) -> Reason:
    # Newer software may send reasons that this one does not know.
    return number if number in Reason.values() else Reason.REASON_UNSPECIFIED
