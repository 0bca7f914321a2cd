"""What the coordinator answers on the wire: one module for one service, and who may call it."""
