"""Local training and evaluation. Importing this package imports torch."""
