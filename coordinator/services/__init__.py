"""The coordinator's gRPC services, one module each, and the rules about who may call them."""
