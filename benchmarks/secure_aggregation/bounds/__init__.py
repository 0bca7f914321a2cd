"""A prototype: members prove to the coordinator that their masked vectors are short (decision 43)."""
