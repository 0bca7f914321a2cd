"""Text in, token ids out: labelled data, tokenizers, vocabularies, embedding tables, cloze templates."""
