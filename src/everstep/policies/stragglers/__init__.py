"""Has the policies about stragglers: pure functions ``(observations, state) -> (plan or None, state)``.

``state`` is whatever the policy returned last, None at first. The shipped ones are built to the stated goals of AntDT's
solutions for clusters that others use too (``shared``, there *non-dedicated*) and that nobody else uses
(``exclusive``, there *dedicated*); their algorithms are ours.
"""
