"""Accuracy over epsilon of the ways to train on a frozen encoder, and the time that cached features save."""
