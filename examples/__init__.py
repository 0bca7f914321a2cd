"""Job files, small data sets written for this project, and the demonstration."""
