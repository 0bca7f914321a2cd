"""Privacy accounting: events, their Rényi divergence, the spent epsilon, and noise calibrated to a budget. No torch."""
