"""Audits of whole jobs: what they find, and what they cost."""
