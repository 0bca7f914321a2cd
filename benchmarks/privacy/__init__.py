"""What privacy costs, and attacks on the claims."""
