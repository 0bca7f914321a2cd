"""The Python interface: what `import tacit` offers, over the same functions as the commands.

This room stands above all others. `tacit` itself is the contract, which every room imports; it looks these names up
only when somebody uses them, so `import tacit` stays light.
"""
