"""Institutional federated learning on TREC (Zhu et al. 2020)."""
