"""Values that rounds, services and storage share (plain frozen dataclasses), and rules that are pure.

This package imports nothing else of the coordinator.
"""
