"""Policies about stragglers: pure functions ``(observations, state) -> (plan or None, state)``.

``state`` is whatever the policy returned last, None at first. The shipped ones are built to the stated goals of AntDT's
solutions for clusters that are shared (*non-dedicated*) and not (*dedicated*); their algorithms are ours.
"""
