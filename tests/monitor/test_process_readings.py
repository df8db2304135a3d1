"""What /proc and cgroups of both versions say; where they say nothing, nothing is read."""

from __future__ import annotations

from pathlib import Path

from everstep.monitor.process_readings import ProcessReadings, clean_hardware, hardware_class, parse_cpu_stat

V2 = "usage_usec 100\nnr_periods 50\nnr_throttled 7\nthrottled_usec 2500000\n"
V1 = "nr_periods 50\nnr_throttled 7\nthrottled_time 2500000000\n"


def test_both_versions_of_cgroups_say_the_same() -> None:
    assert parse_cpu_stat(V1) == parse_cpu_stat(V2) == {"throttled": 7.0, "throttled_s": 2.5}
    assert parse_cpu_stat("nr_throttled x\n\n") == {}


def test_the_file_of_the_own_cgroup_is_found(tmp_path: Path) -> None:
    for cgroup, folder, text in (("0::/job/a\n", "job/a", V2), ("4:cpu,cpuacct:/job\n", "cpu,cpuacct/job", V1)):
        proc, cgroups = tmp_path / folder / "proc", tmp_path / folder / "cgroups"
        (cgroups / folder).mkdir(parents=True)
        proc.mkdir(parents=True)
        (cgroups / folder / "cpu.stat").write_text(text)
        (proc / "cgroup").write_text(cgroup)
        (proc / "statm").write_text("100 10 5 1 0 1 0\n")
        readings = ProcessReadings(proc, cgroups).readings()
        assert readings["throttled_s"] == 2.5 and readings["rss_bytes"] > 0


def test_without_these_files_there_are_fewer_readings(tmp_path: Path) -> None:
    assert set(ProcessReadings(tmp_path, tmp_path).readings()) == {"cpu_s", "rss_bytes", "cores"}
    assert hardware_class(tmp_path) == ""


def test_this_machine_has_a_class_and_one_line_of_it(tmp_path: Path) -> None:
    readings = ProcessReadings().readings()
    assert readings["peak_bytes"] >= readings["rss_bytes"] > 2**20
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU  @ 3GHz\n")
    assert hardware_class(tmp_path).startswith("Some CPU @ 3GHz x")
    gpu = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t NVIDIA H200\n")
    assert hardware_class(tmp_path) == "NVIDIA H200 x1"
    assert clean_hardware("a\x1b[31m\nb" + "x" * 500).startswith("a [31m b") and len(clean_hardware("x" * 500)) == 80
