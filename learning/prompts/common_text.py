"""Everyday sentences, written for this project, whose mean features centre a head (docs/heads.md).

They are questions, requests, opinions, reports and notes about everyday subjects: a public sample of what people type.
No sentence was taken from a data set. The digest of the text is part of every document that uses it, so a change here
changes new bundles and no old one.
"""

__all__ = ["NAME", "common_text"]

NAME = "tacit-common-text-1"

_SUBJECTS = (
    ("bridge", "builders"),
    ("train", "travellers"),
    ("garden", "neighbours"),
    ("river", "fishermen"),
    ("museum", "visitors"),
    ("phone", "customers"),
    ("recipe", "cooks"),
    ("school", "teachers"),
    ("film", "actors"),
    ("account", "owners"),
    ("hospital", "nurses"),
    ("novel", "readers"),
    ("football match", "players"),
    ("storm", "sailors"),
    ("language", "speakers"),
    ("computer", "programmers"),
    ("tax", "citizens"),
    ("planet", "astronomers"),
    ("dog", "children"),
    ("parcel", "drivers"),
)
_FORMS = (
    # Questions.
    "What is a {one}?",
    "Who was the first person to write about the {one}?",
    "Where can I find the oldest {one} in the country?",
    "How many {many} does it take to look after a {one}?",
    "When did the {many} first see the {one}?",
    "Why do {many} care so much about the {one}?",
    "Which {one} do most {many} prefer?",
    "How long does it take to get a new {one}?",
    "What does the abbreviation on the {one} stand for?",
    "Can you tell me how far the {one} is from here?",
    "What do you call a person who repairs a {one}?",
    "In what year was the {one} named after its town?",
    # Requests.
    "I would like to change my {one}, please.",
    "My {one} still has not arrived, and I have been waiting for two weeks.",
    "Please cancel the {one} that I ordered yesterday.",
    "I was charged twice for the same {one}.",
    "The {one} does not work any more; what should I do?",
    "Is there a fee if I use my {one} abroad?",
    "I lost my {one} and need help at once.",
    "Could someone explain to the {many} how this works?",
    # Opinions.
    "A wonderful {one}, warm, funny and full of life.",
    "This is the dullest {one} that I have seen in years.",
    "The {one} is not bad, but the {many} deserved better.",
    "It never quite comes together, although the {many} do their best.",
    "I loved every minute of it and would recommend the {one} to all {many}.",
    "An honest, clever and moving {one}.",
    "The {one} is slow, far too long and hardly worth the money.",
    # Reports.
    "The {many} said on Tuesday that the {one} would open again in spring.",
    "Shares of the company that makes the {one} fell by three per cent.",
    "Two {many} were slightly hurt when the {one} was damaged.",
    "A new study compares how {many} in six countries use the {one}.",
    "The government promised the {many} money for a safer {one}.",
    # Notes and talk.
    "Remember to bring the {one} when we meet the {many} tomorrow.",
    "Thanks, the {one} was exactly what we needed.",
    "The {one} stands near the old market, where the {many} used to gather.",
    "He told the {many} about the {one}, and nobody believed him.",
)


def common_text() -> tuple[str, ...]:
    """The sentences, each with several subjects."""
    return tuple(
        form.format(one=one, many=many)
        for number, form in enumerate(_FORMS)
        # Five subjects a form, each subject with a quarter of the forms.
        for place, (one, many) in enumerate(_SUBJECTS)
        if (place - 3 * number) % 4 == 0
    )
