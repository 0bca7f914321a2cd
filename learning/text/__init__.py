"""Turns text into token ids: labelled data, tokenizers, vocabularies, embedding tables, cloze templates."""
