"""The values that rounds, services and storage share: plain frozen dataclasses, and rules that are pure.

It imports nothing else of the coordinator.
"""
