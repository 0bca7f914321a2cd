"""What protects a member's data on its own machine: the policy it owns."""
