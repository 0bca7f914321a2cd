"""Valid and invalid corpora: every rule, wherever the bytes are split."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import corpus_rules
from coordinator.corpus_rules import MAX_CHARACTERS, CorpusInvalid, RowsCheck, check_size, check_statement
from tacit.corpus import CorpusOrder, LabelCount, signed_bytes
from tacit.identity import sign
from tacit.mechanism import NoMechanism
from tacit.model import RvaeModel
from tests.support import party
from tests.support.ordered_corpora import corpus_file, ordering_job, statement_of

FEDERATION = bytes([9]) * 32
JOB = ordering_job(order=CorpusOrder(texts=4, max_bytes=1000))
FILE = corpus_file([("good", "a"), ("bad", "b"), ("worse", "b")])
SAID = statement_of(FILE, JOB, federation=FEDERATION, member="north")


def looked_at(data, *, most=4, piece=1_000_000, statement=SAID, labels=("a", "b")):
    check = RowsCheck(labels, most)
    for at in range(0, len(data), piece):
        check.take(data[at : at + piece])
    check.finish(statement)
    return check


def refusal(data, **how):
    with pytest.raises(CorpusInvalid) as refused:
        looked_at(data, **how)
    return str(refused.value)


# ---- rows


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_a_file_is_valid_wherever_it_is_split(piece):
    check = looked_at(FILE, piece=piece)
    assert (check.rows, check.counts, check.digest) == (3, {"a": 1, "b": 2}, SAID.corpus)


def row(**keys):
    return json.dumps(keys).encode() + b"\n"


SECRET = "a secret of somebody"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (row(text=SECRET, label="c"), "has a label that the job does not have"),
        (row(text=SECRET), "is not an object with exactly text and label"),
        (row(text=SECRET, label="a", more=1), "is not an object with exactly text and label"),
        (row(label="a"), "is not an object with exactly text and label"),
        (b'{"text": "x", "text": "%s", "label": "a"}\n' % SECRET.encode(), "is not an object with exactly"),
        (b'{"text": "x", "text": "y"}\n', "is not an object with exactly"),
        (b'[["text", "x"], ["label", "a"]]\n', "is not an object with exactly"),
        (b"[]\n", "is not an object with exactly"),
        (b'"%s"\n' % SECRET.encode(), "is not an object with exactly"),
        (b"null\n", "is not an object with exactly"),
        (b"\n", "is not JSON"),
        (b"%s\n" % SECRET.encode(), "is not JSON"),
        (b'{"text": "x", "label": "a"} {"text": "x", "label": "a"}\n', "is not JSON"),
        (b"[" * 50_000 + b"\n", "is not JSON"),
        (b'{"text": "a\tb", "label": "a"}\n', "is not JSON"),
        (b'{"text": NaN, "label": "a"}\n', "has a text or a label that is not a string"),
        (row(text=3, label="a"), "has a text or a label that is not a string"),
        (row(text=["x"], label="a"), "has a text or a label that is not a string"),
        (row(text={"text": "x", "label": "a"}, label="a"), "has a text or a label that is not a string"),
        (row(text="x", label=None), "has a text or a label that is not a string"),
        (b'{"text": "\xff", "label": "a"}\n', "is not UTF-8"),
        (b'\xef\xbb\xbf{"text": "x", "label": "a"}\n', "is not JSON"),
        (row(text="", label="a"), "has no text"),
        (row(text=" \u3000", label="a"), "has no text"),
        (row(text="x" * (MAX_CHARACTERS + 1), label="a"), "has a text of 10001 characters, more than 10000"),
        (row(text="x" * 200_000, label="a"), "is longer than a row may be"),
        *(
            (row(text=f"x{each}y", label="a"), "has control characters in its text")
            for each in ("\x00", "\n", "\t", "\r", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\ud800")
        ),
    ],
    ids=lambda each: repr(each)[:50],
)
@pytest.mark.parametrize("piece", [3, 1_000_000])
def test_a_refusal_names_the_line_and_quotes_nothing(line, says, piece):
    told = refusal(corpus_file([("good", "a")]) + line, piece=piece)
    assert told.startswith("line 2 " + says)
    assert SECRET not in told


def test_the_longest_texts_are_valid_in_every_encoding():
    text = "\U0001f600" * MAX_CHARACTERS
    data = row(text=text, label="a")
    assert len(data) > 12 * MAX_CHARACTERS
    statement = statement_of(data, JOB, federation=FEDERATION, member="north")
    for piece in (1000, 1_000_000):
        assert looked_at(data, statement=statement, piece=piece).rows == 1


def test_the_first_row_beyond_the_order_is_refused():
    many = corpus_file([("x", "a")] * 5)
    assert refusal(many).startswith("line 5 is beyond the 4 rows that the job orders")
    check = RowsCheck(("a",), 4)
    with pytest.raises(CorpusInvalid):
        check.take(many + b"this is never looked at\n")
    assert check.rows == 4


def test_an_endless_line_takes_no_memory():
    check = RowsCheck(("a",), 4)
    taken = 0
    with pytest.raises(CorpusInvalid, match="line 1 is longer than a row may be"):  # noqa: PT012  whichever it is
        while taken < 10_000_000:
            check.take(b"x" * 10_000)
            taken += 10_000
    assert taken < 150_000


def test_a_file_that_ends_within_a_row_is_invalid():
    assert refusal(FILE[:-1]) == "line 3 is incomplete: the file ends within it"


@pytest.mark.parametrize(
    "data",
    [b"", corpus_file([("good", "a"), ("bad", "b")]), corpus_file([("good", "a"), ("bad", "a"), ("worse", "b")])],
)
def test_rows_must_match_the_statement(data):
    assert "make the statement again" in refusal(data)


TEXTS = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=30).filter(str.strip)


@given(
    rows=st.lists(st.tuples(TEXTS, st.sampled_from(["a", "b", "\u00e4 label"])), min_size=1, max_size=8),
    piece=st.integers(1, 50),
    ascii_only=st.booleans(),
)
def test_any_text_counts_exactly_once(rows, piece, ascii_only):
    data = b"".join(
        json.dumps({"text": text, "label": label}, ensure_ascii=ascii_only).encode() + b"\n" for text, label in rows
    )
    counted = Counter(label for _, label in rows)
    statement = SAID.model_copy(
        update={
            "rows": len(rows),
            "labels": tuple(LabelCount(label=label, rows=number) for label, number in counted.items()),
        }
    )
    check = looked_at(data, most=8, piece=piece, statement=statement, labels=("a", "b", "\u00e4 label"))
    assert check.counts == counted


@given(data=st.binary(max_size=300), piece=st.integers(1, 40))
def test_any_bytes_are_accepted_or_refused(data, piece):
    with pytest.raises(CorpusInvalid):
        looked_at(data + b"\x00\n", piece=piece)


# ---- size and statement


def test_the_order_bounds_the_size():
    order = CorpusOrder(max_bytes=10)
    for size in (1, 10):
        check_size(order, size)
    for size in (0, 11, 2**63):
        with pytest.raises(CorpusInvalid, match=r"1 to 10 bytes \(corpus.max_bytes\)"):
            check_size(order, size)


def checked(statement=SAID, *, job=JOB, key=0, signed=None, data=None, **how):
    given = statement.canonical() if data is None else data
    known = {"federation": FEDERATION, "member": "north", "corpus": SAID.corpus, "size": len(FILE)} | how
    signature = sign(party.key(0), signed_bytes(statement)) if signed is None else signed
    return check_statement(given, signature, job=job, document=job.digest(), key=party.key(key).public_key(), **known)


def test_an_honest_statement_is_accepted():
    assert checked() == SAID


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"federation": bytes(32)}, "federation does not match this upload"),
        ({"job": "other"}, "job does not match"),
        ({"job_document": bytes(32)}, "job_document does not match"),
        ({"member": "south"}, "member does not match"),
        ({"corpus": bytes(32)}, "corpus does not match"),
        ({"bytes": 5}, "bytes does not match"),
        ({"mechanism": "none"}, "mechanism does not match"),
        ({"variant": "published"}, "variant does not match"),
        ({"histogram": "noised"}, "labels follow a noised histogram, but the job orders none"),
        ({"rows": 5, "labels": (LabelCount(label="a", rows=5),)}, "has 5 rows, but the job orders at most 4"),
        ({"labels": (LabelCount(label="c", rows=3),)}, "a label that the job does not have"),
        ({"labels": (LabelCount(label="a", rows=2), LabelCount(label="a", rows=1))}, "counts a label twice"),
        ({"labels": (LabelCount(label="a", rows=2),)}, "do not add up"),
        ({"labels": ()}, "do not add up"),
    ],
    ids=str,
)
def test_a_statement_about_something_else_is_refused(changes, says):
    with pytest.raises(CorpusInvalid, match=says):
        checked(SAID.model_copy(update=changes))


@pytest.mark.parametrize(
    "job",
    [
        ordering_job(mechanism=NoMechanism()),
        ordering_job(mechanism=NoMechanism(), model=RvaeModel(variant="published")),
    ],
    ids=["without a mechanism", "published"],
)
def test_no_promise_is_accepted_if_nothing_is_charged(job):
    assert isinstance(job.model, RvaeModel)
    told = {"job_document": job.digest(), "mechanism": "none", "variant": job.model.variant}
    with pytest.raises(CorpusInvalid, match="promises differential privacy, but nothing was charged"):
        checked(SAID.model_copy(update=told), job=job)
    weaker = SAID.model_copy(update=told | {"promise": "none"})
    assert checked(weaker, job=job).promise == "none"


def test_a_member_may_promise_less_and_use_an_ordered_noised_histogram():
    job = ordering_job(order=CorpusOrder(histogram_std=2))
    said = SAID.model_copy(update={"job_document": job.digest(), "promise": "none", "histogram": "noised"})
    assert checked(said, job=job) == said


def test_only_the_members_signature_over_this_statement_is_valid():
    for wrong in (
        b"",
        sign(party.key(0), SAID.canonical()),
        sign(party.key(0), signed_bytes(SAID.model_copy(update={"made_ms": 6}))),
    ):
        with pytest.raises(CorpusInvalid, match="did not sign the statement"):
            checked(signed=wrong)
    with pytest.raises(CorpusInvalid, match="did not sign the statement"):
        checked(key=1)


def test_an_unreadable_statement_is_refused_and_not_quoted(monkeypatch):
    for data in (b"", b"{}", b"[1]", b'{"schema":1,"%s":2}' % SECRET.encode(), b"[" * 100_000):
        with pytest.raises(CorpusInvalid, match="this software cannot read the statement") as refused:
            checked(data=data)
        assert SECRET not in str(refused.value)
    with pytest.raises(CorpusInvalid, match="canonical form"):
        checked(data=SAID.canonical() + b" ")
    monkeypatch.setattr(corpus_rules, "MAX_STATEMENT", 100)
    with pytest.raises(CorpusInvalid, match="more than 100"):
        checked()
