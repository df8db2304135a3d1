"""Settings: precedence, origins, and every mistake as one line with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.config.load import (
    FORMAT,
    check_policy_module,
    check_script,
    check_spec,
    load_spec,
    new_run_dir,
    parse_host_port,
    read_origins,
    read_spec,
    save_spec,
)
from everstep.config.spec import JobSpec
from everstep.errors import ConfigError, EverstepError, PlatformError


def yaml_of(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def refused(path: Path | None, flags: dict[str, Any], env: dict[str, str], *words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_spec(path, flags, env)
    text = str(error.value)
    assert error.value.exit_code == 2 and "\n" not in text
    for word in words:
        assert word in text, text


def test_defaults() -> None:
    spec, origins = load_spec(None, {}, {"PATH": "/bin", "EVERSTEP_DEBUG": "1", "EVERSTEP_RUN_DIR": "/x"})
    assert spec == JobSpec()
    assert set(origins) == set(JobSpec.__struct_fields__) and set(origins.values()) == {"default"}


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "# a job\nworkers: 2\nps: 2\nseed: 2\n")
    env = {"EVERSTEP_WORKERS": "3", "EVERSTEP_PS": "3"}
    spec, origins = load_spec(path, {"workers": 4, "name": None}, env)
    assert (spec.workers, spec.ps, spec.seed, spec.partitions) == (4, 3, 2, 64)
    assert origins["workers"] == "--workers"
    assert origins["ps"] == "EVERSTEP_PS"
    assert origins["seed"] == f"{path} line 4"
    assert origins["partitions"] == "default"


def test_every_type_from_every_place(tmp_path: Path) -> None:
    path = yaml_of(
        tmp_path,
        "name: a.b-c\nargs: [--epochs, 3]\nlease_s: 2m\nsuspect_after_s: 1\nlost_after_s: 2.5\n"
        "skip_quarantined: true\nnonfinite: skip\nbind: '[::1]:0'\n",
    )
    spec, _ = load_spec(path, {"preload": ("a", "b")}, {"EVERSTEP_MAX_RESTARTS": " 5 "})
    assert spec.args == ("--epochs", "3") and spec.lease_s == 120.0 and spec.lost_after_s == 2.5
    assert spec.skip_quarantined and spec.preload == ("a", "b") and spec.max_restarts == 5
    env = {"EVERSTEP_ARGS": "--name 'two words'", "EVERSTEP_SKIP_QUARANTINED": "no", "EVERSTEP_LEASE_S": "7500ms"}
    spec, _ = load_spec(path, {}, env)
    assert spec.args == ("--name", "two words") and not spec.skip_quarantined and spec.lease_s == 7.5


def test_steps_of_mode_ps_can_be_divided(tmp_path: Path) -> None:
    spec, _ = load_spec(yaml_of(tmp_path, "policy: exclusive\nconsistency: sync:1\nworkers: 3\n"), {}, {})
    assert (spec.mode, spec.policy) == ("ps", "exclusive")


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_all_defaults(text: str, tmp_path: Path) -> None:
    assert load_spec(yaml_of(tmp_path, text), {}, {})[0] == JobSpec()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workers: 2\nwokers: 3\n", ("line 2", "'wokers'", "did you mean 'workers'")),
        ("zzzz: 1\n", ("line 1", "'zzzz'", "known: name")),
        ("\nworkers: two\n", ("line 2", "workers = 'two'", "whole number")),
        ("workers: 2.5\n", ("workers = 2.5", "whole number")),
        ("workers: true\n", ("workers = True", "whole number")),
        ("workers:\n", ("workers = None", "whole number")),
        ("workers: [1]\n", ("workers = [1]", "whole number")),
        ("lease_s: soon\n", ("lease_s = 'soon'", "seconds")),
        ("lease_s: 3 parsecs\n", ("lease_s", "parsecs")),
        ("args: --epochs 3\n", ("args", "list of texts")),
        ("args: [{a: 1}]\n", ("args", "list of texts")),
        ("name: 7\n", ("name = 7", "a text")),
        ("skip_quarantined: maybe\n", ("skip_quarantined", "true or false")),
        ("consistency: chaos\n", ("consistency = 'chaos'", "line 1", "expected async, bounded:S")),
        ("consistency: bounded:x\n", ("consistency = 'bounded:x'", "a whole number of batches")),
        ("consistency: bounded:0\n", ("consistency = 'bounded:0'", "use sync")),
        ("consistency: bounded\n", ("consistency = 'bounded'", "such as bounded:4")),
        ("consistency: async:1\n", ("consistency = 'async:1'", "expected async")),
        ("workers: 4\nconsistency: sync:4\n", ("consistency = 'sync:4'", "wait for nobody", "at most sync:3")),
        ("mode: allreduce\nconsistency: sync\n", ("consistency = 'sync'", "for mode ps", "leave consistency out")),
        ("policy: exclusive\n", ("policy = 'exclusive'", "has none", "set consistency to sync")),
        ("policy: exclusive\nconsistency: bounded:2\n", ("policy = 'exclusive'", "set consistency to sync")),
        ("policy: auto\n", ("policy = 'auto'", "needs a bound; give max_workers")),
        ("policy: auto+shared\nmax_workers: 4\n", ("policy = 'auto+shared'", "give max_ps")),
        ("policy: auto+auto\nmax_workers: 4\nmax_ps: 2\n", ("auto twice; name it once",)),
        ("policy: auto+none\nmax_workers: 4\nmax_ps: 2\n", ("none does nothing; leave it out",)),
        ("policy: auto+sharde\nmax_workers: 4\nmax_ps: 2\n", ("no such policy; did you mean 'shared'?",)),
        ("optimize: cost\n", ("optimize = 'cost'", "needs policy: auto")),
        ("optimize: speed\n", ("optimize = 'speed'", "expected 'time' or 'waste' or 'cost'")),
        ("policy: backup\nconsistency: bounded:2\n", ("policy = 'backup'", "consistency sync", "bounded:2")),
        ("nonfinite: ignore\n", ("nonfinite", "'raise' or 'skip'")),
        ("nonfinite: [raise]\n", ("nonfinite", "'raise' or 'skip'")),
        ("workers: 1\nps: 1\nworkers: 2\n", ("line 3", "given in line 1")),
        ("- workers\n", ("line 1", "expected lines such as")),
        ("just text\n", ("line 1", "expected lines such as")),
        ("workers: [1\nps: 2\n", ("no valid YAML", "line")),
        ("workers: 1\n\tps: 2\n", ("no valid YAML", "line 2")),
        ("name: a\x01b\n", ("no valid YAML", "special characters")),
        ("a: 1\n---\nb: 2\n", ("no valid YAML", "line")),
        ("seed: !!python/object/apply:os.system ['true']\n", ("no valid YAML", "line 1")),
    ],
)
def test_mistakes_in_the_file(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    refused(yaml_of(tmp_path, text), {}, {}, "job.yaml", *words)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    refused(tmp_path / "no.yaml", {}, {}, "no.yaml", "does not exist")
    refused(tmp_path, {}, {}, "cannot be read")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path / "b.yaml", {}, {}, "cannot be read")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workers": 0}, ("workers = 0", "(--workers)", "from 1")),
        ({"ps": 0}, ("ps = 0",)),
        ({"ps": -1}, ("ps = -1",)),
        ({"seed": -1}, ("seed = -1",)),
        ({"partitions": 4097}, ("partitions = 4097", "4096")),
        ({"partitions": 2, "ps": 3}, ("ps = 3", "partitions = 2")),
        ({"lease_s": float("nan")}, ("lease_s",)),
        ({"suspect_after_s": 5.0, "lost_after_s": 5.0}, ("lost_after_s", "suspect_after_s = 5.0")),
        ({"name": "../up"}, ("name = '../up'",)),
        ({"name": ""}, ("name = ''",)),
        ({"bind": "nohost"}, ("bind = 'nohost'", "HOST:PORT")),
        ({"bind": "h:70000"}, ("HOST:PORT", "65535")),
        ({"bind": ":80"}, ("HOST:PORT",)),
        ({"wrokers": 1}, ("--wrokers", "did you mean 'workers'")),
        ({"run_dirr": 1}, ("--run-dirr", "did you mean 'run_dir'")),
    ],
)
def test_values_out_of_range(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(None, flags, {}, *words)


def test_mistakes_in_the_environment() -> None:
    refused(None, {}, {"EVERSTEP_WORKERS": "many"}, "EVERSTEP_WORKERS", "'many'", "whole number")
    refused(None, {}, {"EVERSTEP_ARGS": "'open"}, "EVERSTEP_ARGS")
    refused(None, {}, {"EVERSTEP_PS": "0"}, "ps = 0", "EVERSTEP_PS")


def test_host_and_port() -> None:
    assert parse_host_port("10.0.0.1:7000", "x") == ("10.0.0.1", 7000)
    assert parse_host_port("[::1]:0", "x") == ("::1", 0)
    for text in ["", "a", "a:", "a:b", "::1:80", "a:1:2", "a: 80"]:
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_host_port(text, "--join")


# ---- scripts -------------------------------------------------------------------------------------------------


def test_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "wrong.py").write_text("x = 1\ndef f(:\n")
    monkeypatch.chdir(tmp_path)
    assert check_script("train.py") == tmp_path / "train.py"
    for script, words in [
        ("", "no training script"),
        ("trian.py", "did you mean 'train.py'"),
        ("nowhere/x.py", "does not exist"),
        (str(tmp_path), "is a directory"),
        ("binary.py", "no Python"),
        ("wrong.py", r"'wrong.py', line 2: invalid syntax"),
    ]:
        with pytest.raises(ConfigError, match=words) as error:
            check_script(script)
        assert "\n" not in str(error.value)


# ---- run directories -----------------------------------------------------------------------------------------


def test_a_spec_comes_back(tmp_path: Path) -> None:
    spec = JobSpec(name="x", workers=3, args=("--a", "b c"), lease_s=7.5, preload=("numpy",))
    save_spec(tmp_path, spec, {"workers": "--workers"})
    assert read_spec(tmp_path) == spec and read_origins(tmp_path) == {"workers": "--workers"}
    assert [p.name for p in tmp_path.iterdir()] == ["job.json"]
    save_spec(tmp_path, JobSpec(), {})
    assert read_spec(tmp_path) == JobSpec()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no run directory"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "has no version"),
        (json.dumps({"version": FORMAT, "spec": {"workers": "two"}}), "is damaged"),
        (json.dumps({"version": FORMAT, "spec": {"wrokers": 2}}), "is damaged"),
        (json.dumps({"version": FORMAT}), "is damaged"),
        (json.dumps({"version": FORMAT + 1, "package": "9.9.9", "spec": {}}), "9.9.9"),
        (json.dumps({"version": "old", "spec": {}}), "format 'old'"),
    ],
)
def test_directories_that_are_no_runs_of_ours(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "job.json").write_text(content)
    with pytest.raises(ConfigError, match=words) as error:
        read_spec(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_run_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_spec(tmp_path / "no")


def test_new_run_directories_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = [new_run_dir("job") for _ in range(5)]
    assert len(set(made)) == 5 and all(p.is_dir() and p.parent == tmp_path / "runs" for p in made)
    assert new_run_dir("job", tmp_path / "other").parent == tmp_path / "other"


def test_no_place_for_a_run_directory(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(PlatformError, match="cannot create a run directory"):
        new_run_dir("job", tmp_path / "runs")
    with pytest.raises(EverstepError, match="cannot write"):
        save_spec(tmp_path / "gone", JobSpec(), {})


def test_parity_needs_as_many_ps_as_a_stripe_is_wide() -> None:
    refused(None, {"parity": "4+1", "ps": 3}, {}, "parity = '4+1' (--parity)", "at least 5 ps", "set ps to 5")
    for bad in ("4", "17+1", "4+3", "4+0", "x"):
        refused(None, {"parity": bad, "ps": 30}, {}, f"parity = {bad!r} (--parity)")
    refused(None, {"protect": "later"}, {}, "protect = 'later'", "'acked' or 'eager' or 'lag'")
    assert load_spec(None, {"parity": "4+1", "ps": 5}, {})[0].parity == "4+1"


def test_mirrors_that_may_lag() -> None:
    lag = {"parity": "1+1", "ps": 2, "protect": "lag"}
    assert load_spec(None, lag, {})[0].protect_lag == "4s"
    assert load_spec(None, {**lag, "protect_lag": "1m", "consistency": "bounded:2"}, {})[0].protect_lag == "1m"
    for bad in ("x", "", "-1s", "2 weeks"):
        refused(None, {**lag, "protect_lag": bad}, {}, f"protect_lag = {bad!r} (--protect-lag)", "such as '2s'")
    for bad in ("0s", "10ms", "2h"):
        refused(
            None, {**lag, "protect_lag": bad}, {}, f"protect_lag = {bad!r} (--protect-lag)", "from 0.05 s to 3600 s"
        )
    refused(None, {"protect": "lag"}, {}, "protect = 'lag' (--protect)", "no mirrors", "parity K+M")
    refused(None, {"protect_lag": "3s"}, {}, "protect_lag = '3s' (--protect-lag)", "needs protect: lag")
    for consistency in ("sync", "sync:1"):
        said: list[str] = []
        flags = {**lag, "workers": 3, "consistency": consistency, "protect_lag": "9s"}
        spec, _ = load_spec(None, flags, {}, said.append)
        assert (spec.protect, spec.protect_lag) == ("acked", "4s")
        (line,) = said
        assert "protect = 'lag' (--protect)" in line and f"consistency {consistency}" in line and "acked" in line
        with pytest.raises(ConfigError, match="use acked"):
            check_spec(JobSpec(**flags))
    hybrid = {**lag, "mode": "allreduce", "workers": 2}
    assert load_spec(None, hybrid, {})[0].protect == "lag"
    refused(None, {**hybrid, "protect": "eager"}, {}, "protect = 'eager' (--protect)", "not in mode allreduce", "lag")
    often = {**lag, "protect_lag": "20s", "checkpoint_every": "10s"}
    refused(None, often, {}, "protect_lag = '20s' (--protect-lag)", "checkpoint_every = '10s'", "at most 10 s")
    assert load_spec(None, {**often, "checkpoint_every": "20s"}, {})[0].protect_lag == "20s"


def test_the_share_of_a_rebuild() -> None:
    assert load_spec(None, {}, {})[0].rebuild_share == 0.1
    assert load_spec(None, {"rebuild_share": "0.5"}, {})[0].rebuild_share == 0.5
    assert load_spec(None, {}, {"EVERSTEP_REBUILD_SHARE": "1"})[0].rebuild_share == 1.0
    for bad in ("0", "-0.1", "1.5", "nan", "inf"):
        refused(None, {"rebuild_share": bad}, {}, "rebuild_share = ", "(--rebuild-share)", "from 0.01 to 1.0")
    for bad in ("much", "20%", ""):
        refused(None, {"rebuild_share": bad}, {}, f"rebuild_share = {bad!r}", "a number")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def choose(seen, state): ...\n", ""),
        ("from mine_too import other as choose\n", ""),
        ("if True:\n    choose = print\n", ""),
        ("from mine_too import *\n", ""),
        ("def chose(seen, state): ...\n", "mine.py has no 'choose'; did you mean 'chose'?"),
        ("x = 1\ndef choose(:\n", "mine.py, line 2: "),
        ("\0", "mine.py"),
    ],
)
def test_a_policy_of_ones_own_is_looked_for_before_the_job_begins(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    if not words:
        check_policy_module("mine:choose", tmp_path)
        return
    with pytest.raises(ConfigError) as error:
        check_policy_module("mine:choose", tmp_path)
    assert words in str(error.value) and "'mine:choose'" in str(error.value) and "\n" not in str(error.value)
