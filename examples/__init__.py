"""Small data written for this project, job files, and the demonstration."""
