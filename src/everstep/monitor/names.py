"""Every metric of the master's endpoint: name, kind, labels, meaning. ``docs/monitoring.md`` has the same table."""

from __future__ import annotations

from typing import Literal

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """``kind``: as in Prometheus; a counter's name ends in ``_total``, others in their unit where there is one."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    formerly: str = ""
    """Its old name, under which the endpoint shows it once more until the next version."""


_MEMBER = ("role", "slot")

METRICS: tuple[Metric, ...] = (
    Metric("everstep_samples_total", "counter", (), "Samples trained."),
    Metric("everstep_throughput_samples_per_second", "gauge", (), "Samples trained in a second, all workers together."),
    Metric("everstep_group_steps_total", "counter", (), "Committed steps of the group (mode allreduce)."),
    Metric("everstep_members", "gauge", ("role", "state"), "Workers and ps by state."),
    Metric("everstep_members_wanted", "gauge", ("role",), "How many workers and ps the job wants."),
    Metric(
        "everstep_member_info",
        "gauge",
        (*_MEMBER, "incarnation", "node", "hardware"),
        "1; where a member that is up runs.",
    ),
    Metric("everstep_failures_total", "counter", ("role",), "Processes and nodes that were lost, and survived."),
    Metric("everstep_batches_retried_total", "counter", (), "Batches or steps that were computed again."),
    Metric("everstep_shards", "gauge", ("state",), "Shards of the newest epochs: todo or doing."),
    Metric("everstep_master_incarnation", "gauge", (), "How many masters this job has had."),
    Metric("everstep_reported", "gauge", ("name",), "Newest values that the script reported (job.report)."),
    Metric("everstep_worker_samples_total", "counter", ("slot",), "Samples whose own compute a worker process did."),
    Metric("everstep_worker_compute_seconds_total", "counter", ("slot",), "Own compute of a worker process."),
    Metric(
        "everstep_worker_phase_seconds_total", "counter", ("slot", "phase"), "Time of its training thread by phase."
    ),
    Metric(
        "everstep_worker_bytes_total", "counter", ("slot", "direction"), "Bytes of rows: in (pulled) and out (pushed)."
    ),
    Metric(
        "everstep_worker_sample_compute_seconds", "gauge", ("slot",), "Median own compute of a sample, short window."
    ),
    Metric("everstep_ps_requests_total", "counter", ("slot",), "Pulls and pushes that a ps process answered."),
    Metric("everstep_ps_service_seconds_total", "counter", ("slot",), "Own time of these, without waiting for others."),
    Metric("everstep_ps_service_seconds", "gauge", ("slot",), "Median own time of a request, short window."),
    Metric("everstep_ps_queue_requests", "gauge", ("slot",), "Requests at a ps at a time, mean of the short window."),
    Metric("everstep_ps_bytes_total", "counter", ("slot", "direction"), "Bytes of rows: in (pushed) and out (pulled)."),
    Metric("everstep_ps_rows", "gauge", ("slot",), "Rows that a ps holds."),
    Metric("everstep_ps_partitions", "gauge", ("slot",), "Partitions that a ps owns.", "everstep_ps_buckets"),
    Metric("everstep_slowness_ratio", "gauge", _MEMBER, "Times the median of its hardware class; see everstep top."),
    Metric("everstep_process_cpu_seconds_total", "counter", _MEMBER, "Processor time of a member's process."),
    Metric("everstep_process_resident_memory_bytes", "gauge", _MEMBER, "Resident memory of a member's process."),
    Metric("everstep_process_throttled_seconds_total", "counter", _MEMBER, "Its cgroup was kept from running so long."),
    Metric("everstep_process_throttled_periods_total", "counter", _MEMBER, "Periods in which that happened."),
    Metric(
        "everstep_protection_partitions",
        "gauge",
        ("level",),
        "Partitions by the losses they survive: full, less, none.",
        "everstep_protection_buckets",
    ),
    Metric("everstep_unconfirmed_bytes", "gauge", (), "Changes that mirrors do not have yet."),
    Metric("everstep_checkpoint_newest", "gauge", (), "Number of the newest checkpoint; 0: none."),
    Metric("everstep_checkpoint_timestamp_seconds", "gauge", (), "When it was taken (since 1970)."),
    Metric("everstep_drills", "gauge", (), "Drills that run (everstep chaos)."),
    Metric("everstep_readings_dropped_total", "counter", ("reason",), "Readings that were wrong: NaN, negative, ..."),
)

BY_NAME = {m.name: m for m in METRICS}
