"""The table of meaning: what training scripts do, in each mode, compared with plain PyTorch on one process.

``python tests/meaning`` computes cells, records them in ``results.json`` and writes ``docs/compatibility.md``.
"""
