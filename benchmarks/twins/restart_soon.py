"""``nondedicated`` for short jobs of benchmarks: a restart is taken for what it costs there, not for 20 s."""

from __future__ import annotations

from functools import partial

from everstep.policies.stragglers.shared import Settings, shared

choose = partial(shared, settings=Settings(restart_s=3.0, cooldown_s=30.0))
