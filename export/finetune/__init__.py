"""`coordinator finetune`: a classifier from synthetic corpora."""
