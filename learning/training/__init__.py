"""Local training and evaluation. Importing this package imports torch; the modules below say what they do."""
