"""Alembic migrations. `database.open_database` runs them. Each is written by hand and reviewed, and a test compares
what they build with `coordinator.storage.models`.
"""
