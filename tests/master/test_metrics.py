"""The endpoint of metrics: what Prometheus reads, and nothing to anyone else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import pytest

from everstep.ids import Incarnation, NodeId, Slot
from everstep.master.metrics import REQUEST_MAX_BYTES, TOKEN_FILE, MetricsServer, is_loopback
from everstep.master.readings import METRICS_FILE, MetricsLine, Readings
from everstep.model.job_view import GroupView, JobView, MemberView, ProtectionView, ShownState
from everstep.model.member import Role
from everstep.model.observation import Observations, Pace, ServerSeen, WorkerSeen
from everstep.monitor.names import METRICS
from everstep.monitor.prometheus import Key, MetricsPage, number
from everstep.monitor.viewer import make_speed_view
from everstep.monitor.windows import Windows

DOCS = Path(__file__).parents[2] / "docs" / "monitoring.md"
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


def job() -> MetricsPage:
    """All of a small job."""
    windows = Windows()
    for at in (0.0, 1.0):
        readings = {"computed": 100 * at, "compute_s": at, "per_sample_s": 0.01, "phase.forward": at, "cpu_s": at}
        readings["bytes_out"] = 8 * at
        windows.take("worker:0", 1, readings, at)
        windows.take("ps:0", 1, {"requests": at, "bytes_in": 10 * at, "rows": 5.0, "rss_bytes": 1e6}, at)
    worker = WorkerSeen(
        slot=Slot(0), incarnation=Incarnation(1), node=NodeId("node0"), short=Pace(samples=100, per_sample_s=0.01)
    )
    ps = ServerSeen(slot=Slot(0), incarnation=Incarnation(1), node=NodeId("node0"), service_s=0.002, queue=1.5)
    seen = Observations(at=1.0, workers=(worker,), servers=(ps,))
    one, home = Incarnation(1), NodeId("node0")
    view = JobView(
        job="a job",
        phase="training",
        at=1.0,
        started_at=0.0,
        master_incarnation=Incarnation(2),
        members=(
            MemberView(Role.WORKER, Slot(0), one, home, 7, ShownState.ALIVE),
            MemberView(Role.PS, Slot(0), one, home, 8, ShownState.ALIVE, partitions=64),
            MemberView(Role.PS, Slot(1), one, home, 0, ShownState.LOST),
        ),
        members_wanted={"worker": 1, "ps": 2},
        epochs=(),
        samples_done=90,
        samples_total=100,
        samples_per_s=50.0,
        batches_retried=0,
        failures={"worker": 3},
        reported={'odd "name"\n': float("nan")},
        protection=ProtectionView("1+1", "acked", full=64),
        group=GroupView(1, 1, 0, 42, 1.0, "elastic"),
        speed=make_speed_view(seen, windows.newest, {"not a number": 2}, ()),
    )
    page = MetricsPage()
    page.fill(view)
    return page


def test_every_line_is_what_prometheus_reads() -> None:
    text = job().text()
    sample = re.compile(r'[a-z_]+(\{[a-z]+="(\\.|[^"\\\n])*"(,[a-z]+="(\\.|[^"\\\n])*")*\})? (NaN|[-+]?[0-9.e+-]+)')
    for line in text.splitlines():
        assert line.startswith(("# HELP everstep_", "# TYPE everstep_")) or sample.fullmatch(line), line
    assert 'everstep_worker_samples_total{slot="0"} 100\n' in text
    assert 'everstep_worker_phase_seconds_total{slot="0",phase="forward"} 1\n' in text
    assert 'everstep_worker_bytes_total{slot="0",direction="out"} 8\n' in text
    assert 'everstep_ps_bytes_total{slot="0",direction="in"} 10\n' in text
    assert 'everstep_ps_queue_requests{slot="0"} 1.5\n' in text
    assert 'everstep_reported{name="odd \\"name\\"\\n"} NaN\n' in text
    assert "everstep_samples_total 100\n" in text and "everstep_group_steps_total 42\n" in text
    assert "everstep_faults 0\n" in text and 'everstep_members{role="ps",state="lost"} 1\n' in text
    assert text.count("\neverstep_ps_partitions{") == 1, "of ps that are up"
    for old, new, values in (
        ("ps_buckets", "ps_partitions", '{slot="0"} 64'),
        ("protection_buckets", "protection_partitions", '{level="full"} 64'),
    ):
        assert f"everstep_{old}{values}\n" in text and f"everstep_{new}{values}\n" in text
    assert 'everstep_member_info{role="ps",slot="0",incarnation="1",node="node0",hardware=""} 1\n' in text


def test_names_follow_the_conventions_and_are_in_the_docs() -> None:
    docs = DOCS.read_text()
    for m in METRICS:
        assert re.fullmatch(r"everstep(_[a-z]+)+", m.name)
        assert m.name.endswith("_total") == (m.kind == "counter"), m.name
        assert f"`{m.name}`" in docs, f"{m.name} is not in docs/monitoring.md"
    assert len({m.name for m in METRICS}) == len(METRICS)


def test_a_renamed_metric_is_shown_under_both_names() -> None:
    page = MetricsPage()
    page.set("everstep_ps_partitions", 32, 1)
    text = page.text()
    for name in ("everstep_ps_partitions", "everstep_ps_buckets"):
        assert f'# TYPE {name} gauge\n{name}{{slot="1"}} 32\n' in text
    assert "# HELP everstep_ps_buckets everstep_ps_buckets is now everstep_ps_partitions; the old name works" in text


def test_counters_of_the_job_never_go_back() -> None:
    counted: dict[Key, float] = {}
    for done, told in ((100, 100), (40, 100), (120, 120)):  # (a checkpoint was gone back to)
        page = MetricsPage(counted)
        page.set("everstep_samples_total", done)
        page.set("everstep_worker_samples_total", done, 0)
        assert f"everstep_samples_total {told}\n" in page.text()
        assert f'everstep_worker_samples_total{{slot="0"}} {done}\n' in page.text(), "a new process begins anew"


def test_a_new_master_goes_on_with_what_the_last_one_told(tmp_path: Path) -> None:
    told = [
        MetricsLine(at=t, samples_done=n, samples_per_s=9.0, workers=1, todo=1, doing=1) for t, n in ((1, 90), (3, 70))
    ]
    told[-1].values, told[-1].retried = {"loss": 0.5}, {"0.1": 3}
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in told) + b'{"at":5.0,"samp'
    (tmp_path / METRICS_FILE).write_bytes(b'ples_done":7}\n' + text)  # both ends cut
    readings = Readings(tmp_path)
    assert (readings.samples_reported, readings.values, readings.batches_retried) == (90, {"loss": 0.5}, 3)


@pytest.mark.parametrize(("value", "text"), [(1.0, "1"), (0.5, "0.5"), (float("inf"), "+Inf"), (1e300, "1e+300")])
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def server(where: str, folder: Path) -> MetricsServer:
    return MetricsServer(where, folder, lambda: "everstep_samples_total 1\n")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (GET, b"200"),
        (b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../../secret HTTP/1.1\r\n\r\n", b"404"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\xff\xfe\r\n\r\n", b"400"),
    ],
)
def test_answers(head: bytes, status: bytes, tmp_path: Path) -> None:
    assert server("127.0.0.1:0", tmp_path).answer(head).split()[1] == status


def test_elsewhere_only_with_the_token(tmp_path: Path) -> None:
    there = server("0.0.0.0:0", tmp_path)
    file = tmp_path / TOKEN_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip().encode()
    assert there.answer(GET).split()[1] == b"401"
    for given, status in ((token, b"200"), (b"x" + token, b"401"), (b"", b"401"), (b"\xff", b"401")):
        head = b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer " + given + b"\r\n\r\n"
        assert there.answer(head).split()[1] == status
    assert server("0.0.0.0:0", tmp_path)._token.encode() == token  # the next master keeps it
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1", "evil.localhost.x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_over_a_real_socket_and_requests_are_bounded(tmp_path: Path) -> None:
    async def ask(port: int, head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    async def story() -> None:
        there = server("127.0.0.1:0", tmp_path)
        there.start()
        while not there.port:
            await asyncio.sleep(0.001)
        try:
            assert (await ask(there.port, GET)).endswith(b"\r\n\r\neverstep_samples_total 1\n")
            # (400, or cut off while it still sends)
            with pytest.raises((AssertionError, OSError)):
                answer = await ask(there.port, b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 3 * REQUEST_MAX_BYTES)
                assert answer.split()[1] != b"400"
        finally:
            await there.close()

    asyncio.run(story())


def test_idle_connections_keep_no_scrape_out(tmp_path: Path) -> None:
    """40 that say nothing, and come again when they are dropped."""

    async def story() -> None:
        there = server("127.0.0.1:0", tmp_path)
        there.start()
        while not there.port:
            await asyncio.sleep(0.001)
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        try:
            for _ in range(15):
                while len(idle) < 40:
                    idle.append(await asyncio.open_connection("127.0.0.1", there.port))
                reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
                writer.write(GET)
                assert (await asyncio.wait_for(reader.read(), 30)).split()[1] == b"200"
                writer.close()
                idle = [(r, w) for r, w in idle if not r.at_eof()]
        finally:
            for _, writer in idle:
                writer.close()
            await there.close()

    asyncio.run(story())
