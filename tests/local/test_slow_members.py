"""Faults in a real job: who is made slow is seen to be, with the reason, and not any more once it is healed."""

from __future__ import annotations

import json
import re
import urllib.request

import pytest
from local_jobs import Run, until

from everstep.model.member import Role


def judged(run: Run) -> dict[str, tuple[float, str]]:
    """By member: how slow, and why."""
    code, text = run.everstep("top", str(run.run_dir), "--json")
    assert code == 0, text
    return {j["member"]: (j["slowness"], j["why"]) for j in json.loads(text)["judged"]}


@pytest.mark.processes
def test_slow_members_are_seen_healed_killed_and_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_WINDOW_S", "1.5")
    run.write(rows=60_000, epochs=50, pause_s=0.02, batch=50)
    run.start("--workers", "2", "--ps", "2", "--metrics", "127.0.0.1:0")
    run.alive(Role.WORKER, 0)
    run.alive(Role.WORKER, 1)
    where = str(run.run_dir)
    slowed = {
        "worker:1": (("--factor", "9", "--for", "1h"), r"compute [\d.]+x the median of its class.*fault: 9 times"),
        "ps:0": (("--factor", "30"), r"service [\d.]+x the median of its class.*fault: 30 times slower"),
    }
    for member, (flags, why) in slowed.items():
        code, text = run.everstep("chaos", where, "--slow", member, *flags)
        assert code == 0 and "slow" in text, text

        def seen(member: str = member, why: str = why) -> bool:
            slowness, words = judged(run)[member]
            return slowness > 2 and re.match(why, words) is not None

        until(seen, why=run.story)
    assert "worker:1" in run.everstep("top", where, "--once")[1]

    match = re.search(r"metrics: (http://127.0.0.1:\d+/metrics)", run.text())
    assert match is not None
    with urllib.request.urlopen(match[1], timeout=120) as page:
        text = page.read().decode()
    assert "everstep_faults 2\n" in text and 'everstep_ps_service_seconds{slot="0"}' in text

    assert run.everstep("chaos", where, "--heal")[0] == 0
    until(lambda: judged(run)["worker:1"][0] < 2, why=run.story)
    schedule = run.folder / "drill.txt"
    schedule.write_text("0, stop ps:0 for=100ms\n100ms, kill worker:1  # and it comes back\n")
    code, text = run.everstep("chaos", where, "--schedule", str(schedule))
    assert code == 0 and "stop ps:0" in text and "kill worker:1" in text, text
    run.alive(Role.WORKER, 1, at_least=2)
    code, text = run.everstep("chaos", where, "--slow", "worker:7")
    assert code == 2 and "worker:7" in text
    assert "fault" in (run.run_dir / "events.jsonl").read_text()
    assert (run.run_dir / "members.jsonl").read_text().count("worker:1") >= 1
