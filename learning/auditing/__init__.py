"""Attacks on a job's own training, and the lower bounds on epsilon that they prove."""
