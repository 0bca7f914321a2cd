"""What running a federation costs and withstands."""
