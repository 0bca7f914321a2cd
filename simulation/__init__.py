"""Simulates a federation in one process: virtual members over the product's training, clipping, noise and encoding.

`partitions` deals public rows to members, `rounds` plays rounds with every member, and `virtual_members` plays them
with many members of which some train. What the coordinator does with a sum is handed in (`server`), so this room does
not import the coordinator, whose `job try` uses it.
"""
