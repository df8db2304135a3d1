"""Runs ``python -m everstep.cli``: the same as ``everstep``."""

from everstep.cli.main import main

main()
