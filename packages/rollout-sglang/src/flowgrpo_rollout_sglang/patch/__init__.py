"""The SGLang patch: what it inserts, which files it knows, and the copy of SGLang that carries it.

Importing this package imports neither torch nor sglang: the engine runs `copy.ensure` before each start.
Read in this order: `insertions`, `copy`, `command`.
"""
