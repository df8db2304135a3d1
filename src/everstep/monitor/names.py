"""Names every metric of the master's endpoint: name, kind, labels, meaning. ``docs/monitoring.md`` has the same
table."""

from __future__ import annotations

from typing import Literal

import msgspec


class Metric(msgspec.Struct, frozen=True):
    """Is one metric.

    ``field``: of the read model (``model.job_view``), where its values come from, as a path from ``JobView``:

    - ``group.step``: a field of a field; there is no value where one of them is None.
    - ``members[]``: each element; labels are fields of the element. ``[ps]``: only of that role, and only those up.
      A path that ends so counts the elements, by labels.
    - ``failures{role}``: each value of a dict; its key is the label ``role``.
    - ``bytes_{direction:in|out}``: ``bytes_in`` and ``bytes_out``, with the label ``direction``.

    ``omit_zero``: 0 means that there is no reading. ``formerly``: its old name, under which the endpoint shows it once
    more until the next version."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    field: str
    omit_zero: bool = False
    formerly: str = ""


_MEMBER = ("role", "slot")

METRICS: tuple[Metric, ...] = (
    Metric("everstep_samples_total", "counter", (), "Samples trained.", "samples_total"),
    Metric(
        "everstep_throughput_samples_per_second",
        "gauge",
        (),
        "Samples trained in a second, all workers together.",
        "samples_per_s",
    ),
    Metric("everstep_group_steps_total", "counter", (), "Committed steps of the group (mode allreduce).", "group.step"),
    Metric(
        "everstep_job_state_seconds_total",
        "counter",
        ("state",),
        "How long the job has been pending, waiting, running, suspended.",
        "supervision.seconds{state}",
    ),
    Metric("everstep_job_suspensions_total", "counter", (), "How often it was suspended.", "supervision.suspensions"),
    Metric("everstep_cost_usd_total", "counter", (), "Spent so far, by --prices.", "cost.usd"),
    Metric("everstep_cost_usd_per_hour", "gauge", (), "What the machines cost that it has now.", "cost.usd_per_hour"),
    Metric("everstep_cost_budget_usd", "gauge", (), "What it may spend; 0: any sum.", "cost.budget"),
    Metric("everstep_members", "gauge", ("role", "state"), "Workers and ps by state.", "members[]"),
    Metric(
        "everstep_members_wanted", "gauge", ("role",), "How many workers and ps the job wants.", "members_wanted{role}"
    ),
    Metric(
        "everstep_member_info",
        "gauge",
        (*_MEMBER, "incarnation", "node", "hardware"),
        "1; where a member that is up runs.",
        "members[worker|ps]",
    ),
    Metric(
        "everstep_failures_total",
        "counter",
        ("role",),
        "Processes and nodes that were lost, and survived.",
        "failures{role}",
    ),
    Metric(
        "everstep_batches_retried_total", "counter", (), "Batches or steps that were computed again.", "batches_retried"
    ),
    Metric(
        "everstep_shards",
        "gauge",
        ("state",),
        "Shards of the newest epochs: todo, doing or done.",
        "shards.{state:todo|doing|done}",
    ),
    Metric("everstep_master_incarnation", "gauge", (), "How many masters this job has had.", "master_incarnation"),
    Metric(
        "everstep_reported",
        "gauge",
        ("name",),
        "Newest values that the script reported (job.report).",
        "reported{name}",
    ),
    Metric(
        "everstep_worker_samples_total",
        "counter",
        ("slot",),
        "Samples whose own compute a worker process did.",
        "speed.counters[worker].samples",
    ),
    Metric(
        "everstep_worker_compute_seconds_total",
        "counter",
        ("slot",),
        "Own compute of a worker process.",
        "speed.counters[worker].compute_s",
    ),
    Metric(
        "everstep_worker_phase_seconds_total",
        "counter",
        ("slot", "phase"),
        "Time of its training thread by phase.",
        "speed.counters[worker].phase_s{phase}",
    ),
    Metric(
        "everstep_worker_bytes_total",
        "counter",
        ("slot", "direction"),
        "Bytes of rows: in (pulled) and out (pushed).",
        "speed.counters[worker].bytes_{direction:in|out}",
    ),
    Metric(
        "everstep_worker_sample_compute_seconds",
        "gauge",
        ("slot",),
        "Median own compute of a sample, short window.",
        "speed.seen.workers[].short.per_sample_s",
        True,
    ),
    Metric(
        "everstep_ps_requests_total",
        "counter",
        ("slot",),
        "Pulls and pushes that a ps process answered.",
        "speed.counters[ps].requests",
    ),
    Metric(
        "everstep_ps_service_seconds_total",
        "counter",
        ("slot",),
        "Own time of these, without waiting for others.",
        "speed.counters[ps].service_s",
    ),
    Metric(
        "everstep_ps_service_seconds",
        "gauge",
        ("slot",),
        "Median own time of a request, short window.",
        "speed.seen.servers[].service_s",
        True,
    ),
    Metric(
        "everstep_ps_queue_requests",
        "gauge",
        ("slot",),
        "Requests at a ps at a time, mean of the short window.",
        "speed.seen.servers[].queue",
    ),
    Metric(
        "everstep_ps_bytes_total",
        "counter",
        ("slot", "direction"),
        "Bytes of rows: in (pushed) and out (pulled).",
        "speed.counters[ps].bytes_{direction:in|out}",
    ),
    Metric("everstep_ps_rows", "gauge", ("slot",), "Rows that a ps holds.", "speed.counters[ps].rows"),
    Metric(
        "everstep_ps_partitions",
        "gauge",
        ("slot",),
        "Partitions that a ps owns.",
        "members[ps].partitions",
        formerly="everstep_ps_buckets",
    ),
    Metric(
        "everstep_slowness_ratio",
        "gauge",
        _MEMBER,
        "Times the median of its hardware class; see everstep top.",
        "speed.judged[].slowness",
        True,
    ),
    Metric(
        "everstep_process_cpu_seconds_total",
        "counter",
        _MEMBER,
        "Processor time of a member's process.",
        "speed.counters[].cpu_s",
    ),
    Metric(
        "everstep_process_resident_memory_bytes",
        "gauge",
        _MEMBER,
        "Resident memory of a member's process.",
        "speed.counters[].resident_memory_bytes",
    ),
    Metric(
        "everstep_process_throttled_seconds_total",
        "counter",
        _MEMBER,
        "Its cgroup was kept from running so long.",
        "speed.counters[].throttled_s",
    ),
    Metric(
        "everstep_process_throttled_periods_total",
        "counter",
        _MEMBER,
        "Periods in which that happened.",
        "speed.counters[].throttled_periods",
    ),
    Metric(
        "everstep_protection_partitions",
        "gauge",
        ("level",),
        "Partitions by the losses they survive: full, less, none.",
        "protection.{level:full|less|none}",
        formerly="everstep_protection_buckets",
    ),
    Metric(
        "everstep_lost_with_machine_partitions",
        "gauge",
        (),
        "Partitions that would be lost with the worst machine, the master's apart.",
        "protection.lost_with_machine",
    ),
    Metric(
        "everstep_unconfirmed_bytes",
        "gauge",
        (),
        "Changes that mirrors do not have yet.",
        "protection.unconfirmed_bytes",
    ),
    Metric(
        "everstep_protection_behind_seconds",
        "gauge",
        (),
        "Age of the oldest change that some mirror lacks (protect: lag).",
        "protection.behind_s",
    ),
    Metric(
        "everstep_protection_pushes_waiting",
        "gauge",
        (),
        "Pushes that wait until mirrors have caught up.",
        "protection.pushes_waiting",
    ),
    Metric(
        "everstep_protection_pushes_waited_seconds",
        "gauge",
        (),
        "Time that pushes have waited for that at the running ps, together.",
        "protection.pushes_waited_s",
    ),
    Metric(
        "everstep_contents_bytes",
        "gauge",
        (),
        "Contents that the running ps took in for rebuilds, new mirrors and moves.",
        "protection.contents_bytes",
    ),
    Metric(
        "everstep_contents_busy_seconds",
        "gauge",
        (),
        "Time that the running ps spent on sending contents, without pauses (rebuild_share).",
        "protection.contents_busy_s",
    ),
    Metric("everstep_checkpoint_newest", "gauge", (), "Number of the newest checkpoint; 0: none.", "checkpoint.newest"),
    Metric("everstep_checkpoint_timestamp_seconds", "gauge", (), "When it was taken (since 1970).", "checkpoint.at"),
    Metric(
        "everstep_faults",
        "gauge",
        (),
        "Faults on purpose that last (everstep chaos).",
        "speed.faults[]",
        formerly="everstep_drills",
    ),
    Metric(
        "everstep_module_forward_seconds",
        "gauge",
        ("module",),
        "Forward of a module in a sampled step, mean (everstep graph).",
        "graph.modules[].forward_s",
    ),
    Metric(
        "everstep_module_own_seconds",
        "gauge",
        ("module",),
        "Of this, outside of modules that it calls.",
        "graph.modules[].own_s",
    ),
    Metric(
        "everstep_module_backward_seconds",
        "gauge",
        ("module",),
        "Backward of a module in a sampled step, mean; 0: not known.",
        "graph.modules[].backward_s",
    ),
    Metric(
        "everstep_module_parameter_bytes",
        "gauge",
        ("module",),
        "Parameters of a module, with modules in it.",
        "graph.modules[].parameter_bytes",
    ),
    Metric(
        "everstep_module_output_bytes",
        "gauge",
        ("module",),
        "Tensors that a module returns in a sampled step.",
        "graph.modules[].output_bytes",
    ),
    Metric(
        "everstep_table_rows",
        "gauge",
        ("table",),
        "Rows of a table, all ps together.",
        "graph.tables[].rows",
    ),
    Metric(
        "everstep_table_bytes",
        "gauge",
        ("table",),
        "Of these rows, with their optimizer's state.",
        "graph.tables[].bytes",
    ),
    Metric(
        "everstep_table_rows_per_second",
        "gauge",
        ("table",),
        "Rows by which a table grows, lately.",
        "graph.tables[].rows_per_s",
    ),
    Metric(
        "everstep_table_hit_share",
        "gauge",
        ("table",),
        "Pushed keys that had a row, of sampled pushes; -1: none.",
        "graph.tables[].hit_share",
    ),
    Metric(
        "everstep_table_admitted_share",
        "gauge",
        ("table",),
        "Of the others, that got one; -1: there were none.",
        "graph.tables[].admitted_share",
    ),
    Metric(
        "everstep_table_unique_share",
        "gauge",
        ("table",),
        "Different keys among the ids of a sampled batch; -1: none.",
        "graph.tables[].unique_share",
    ),
    Metric(
        "everstep_table_update_norm",
        "gauge",
        ("table",),
        "Mean length of a row's change by a sampled push.",
        "graph.tables[].update_norm",
    ),
    Metric(
        "everstep_ps_cold_bytes",
        "gauge",
        ("slot",),
        "Rows of a ps that are on disk alone (cold_dir).",
        "members[ps].cold_bytes",
    ),
    Metric(
        "everstep_ps_cold_hit_share",
        "gauge",
        ("slot",),
        "Of rows pulled from it, that were in memory; -1: no cold_dir.",
        "members[ps].cold_hit_share",
    ),
    Metric(
        "everstep_partition_rows_per_second",
        "gauge",
        ("partition", "ps"),
        "Rows that one of the hottest partitions is asked for.",
        "placement.hottest[].rows_per_s",
    ),
    Metric(
        "everstep_partition_requests_per_second",
        "gauge",
        ("partition", "ps"),
        "Pulls and pushes that touch it.",
        "placement.hottest[].requests_per_s",
    ),
    Metric(
        "everstep_partition_bytes_per_second",
        "gauge",
        ("partition", "ps"),
        "Bytes of these rows and their keys.",
        "placement.hottest[].bytes_per_s",
    ),
    Metric(
        "everstep_partition_service_share",
        "gauge",
        ("partition", "ps"),
        "Time of its ps that these take, in a second.",
        "placement.hottest[].service_share",
    ),
    Metric(
        "everstep_partition_held_bytes",
        "gauge",
        ("partition", "ps"),
        "What a move of it has to send.",
        "placement.hottest[].held_bytes",
    ),
    Metric(
        "everstep_binding_share",
        "gauge",
        ("resource",),
        "Share of the time that each resource costs: workers, shared, ps.",
        "speed.binding.binding_share{resource}",
    ),
    Metric(
        "everstep_readings_dropped_total",
        "counter",
        ("reason",),
        "Readings that were wrong: NaN, negative, ...",
        "speed.dropped{reason}",
    ),
)

BY_NAME = {m.name: m for m in METRICS}
