"""Plays nodes: gives pods a place, starts their command as a local process, and says what became of it.

Each pod has an address 127.K.0.x of its own, where K is the cluster's: several clusters may be played on one machine. A
pod's name in the headless service stays at one address, so what a real cluster's DNS does is done by writing that
address in the place of the name. Volumes are folders: a path below a mount is written as the path below its folder.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from everstep.errors import PlatformError
from everstep.platforms.kubernetes.demo import gang_schedulers
from everstep.platforms.kubernetes.demo.api_server import ApiServer
from everstep.platforms.kubernetes.demo.refusals import RefusedRequest
from everstep.platforms.kubernetes.kinds import Gang, Object, name_of
from everstep.platforms.kubernetes.pods import seconds_of, stamp_of
from everstep.platforms.local import before_exec, sweep_group

LOOK_S: Final = 0.1
PODS_MAX: Final = 30
MESSAGE_BYTES: Final = 2048
MESSAGE_LINES: Final = 80
"""So much of the log of a container that failed a kubelet puts into the pod's status."""
_KILL_WAIT_S: Final = 10.0
_HOLD_PORT: Final = 7070
_SERVICE_PORT: Final = re.compile(r"[a-z0-9.-]+\.svc:\d+")


class PodProcess:
    """Is the process of one pod."""

    def __init__(self, process: subprocess.Popen[bytes], uid: str, host: str) -> None:
        self.process, self.uid, self.host = process, uid, host
        self.asked_at = 0.0  # when it was told to leave

    def __repr__(self) -> str:
        return f"<pod process {self.process.pid} at {self.host}>"

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        sweep_group(self.process.pid)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(_KILL_WAIT_S)


class PodRunner:
    """Plays ``nodes`` until ``close``. It writes to the server as the scheduler and the kubelets do."""

    def __init__(
        self,
        server: ApiServer,
        folder: Path,
        nodes: tuple[str, ...],
        env: Mapping[str, str],
        gang: Gang = Gang.NONE,
        pods_max: int = PODS_MAX,
    ) -> None:
        """Make nodes, of ``pods_max`` pods each. ``folder``: for volumes and logs. ``env``: of pods, below what they
        say themselves. ``gang``: the scheduler that the cluster has beside its own."""
        self._server, self._folder, self._env = server, folder, dict(env)
        self._gang, self._pods_max = gang, pods_max
        self._running: dict[tuple[str, str], PodProcess] = {}
        self._hosts: dict[str, str] = {}
        self._dead: set[str] = set()
        self._over = threading.Event()
        self._net, self._net_held = _own_net()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name in nodes:
            self.add_node(name)
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<nodes with {len(self._running)} pods>"

    # ------------------------------------------------------------ nodes

    def add_node(self, name: str, labels: Mapping[str, str] = {}) -> None:
        """Add a node that is ready."""
        of = self._server.of("nodes")
        meta = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
        self._server.create(of, "", {"metadata": meta, "spec": {}})
        self._say_node(name, "True")

    def _say_node(self, name: str, ready: str) -> None:
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": stamp_of(time.time())}
        status = {"status": {"conditions": [condition]}}
        self._server.merge(self._server.of("nodes"), "", name, status, part="status")

    def taint(self, name: str, key: str, effect: str = "NoSchedule") -> None:
        """Put a taint on a node, as clouds do before they take it."""
        with self._server.store.lock:
            node = self._server._there(self._server.of("nodes"), "", name)
            taints = [*(node["spec"].get("taints") or []), {"key": key, "effect": effect}]
            self._server.merge(self._server.of("nodes"), "", name, {"spec": {"taints": taints}})

    def drain(self, name: str) -> list[str]:
        """Close a node and take its pods off it, as kubectl drain does; return pods that a budget protects for now."""
        self._server.merge(self._server.of("nodes"), "", name, {"spec": {"unschedulable": True}})
        left = []
        for pod in self._server.store.all("pods"):
            if pod["spec"].get("nodeName") == name and not pod["metadata"].get("deletionTimestamp"):
                try:
                    self._server.evict(pod["metadata"]["namespace"], name_of(pod))
                except RefusedRequest:
                    left.append(name_of(pod))
        return left

    def kill_node(self, name: str) -> None:
        """A node is gone without a word: its processes end at once; its pods stay listed, and are marked."""
        self._dead.add(name)
        for key, one in list(self._running.items()):
            pod = self._server.store.get("pods", *key)
            if pod is not None and pod["spec"].get("nodeName") == name:
                one.kill()
                self._running.pop(key, None)  # (the nodes' own thread may have seen it end)
        self._say_node(name, "Unknown")
        self._server.merge(self._server.of("nodes"), "", name, {"spec": {"unschedulable": True}})
        for pod in self._server.store.all("pods"):
            if pod["spec"].get("nodeName") == name and pod["status"].get("phase") in ("Running", "Failed"):
                conditions = [{"type": "Ready", "status": "False"}]
                pod["status"]["conditions"] = conditions
                self._server.disrupt(pod, "DeletionByTaintManager")
                self._server.delete(self._server.of("pods"), pod["metadata"]["namespace"], name_of(pod), "", 1)

    def remove_node(self, name: str) -> None:
        """Take a node off the list, as a cloud's controller does with a machine that is gone: its pods go with it."""
        self._server.delete(self._server.of("nodes"), "", name)
        for pod in self._server.store.all("pods"):
            if pod["spec"].get("nodeName") == name:
                self._drop(pod)

    def kill_pod(self, namespace: str, name: str) -> None:
        """A pod's process is killed."""
        self._running[namespace, name].kill()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(RefusedRequest):
                self.look()

    def look(self) -> None:
        """Do what is to be done now."""
        for pod in self._server.store.all("pods"):
            key, phase = (pod["metadata"]["namespace"], name_of(pod)), (pod.get("status") or {}).get("phase", "Pending")
            one, leaving = self._running.get(key), bool(pod["metadata"].get("deletionTimestamp"))
            if pod["spec"].get("nodeName") in self._dead:
                continue  # (nobody is there who would say that it has ended)
            if one is not None:
                self._look_at(key, pod, one, leaving)
            elif leaving:
                self._drop(pod)
            elif phase == "Pending" and not leaving:
                self._start(key, pod)
        for key, one in list(self._running.items()):
            there = self._server.store.get("pods", *key)
            if there is None or there["metadata"]["uid"] != one.uid:
                one.kill()  # (it was deleted by force)
                self._running.pop(key, None)

    def _drop(self, pod: Object) -> None:
        with contextlib.suppress(RefusedRequest):
            meta = pod["metadata"]
            self._server.delete(self._server.of("pods"), meta["namespace"], meta["name"], meta["uid"], 0)

    def _look_at(self, key: tuple[str, str], pod: Object, one: PodProcess, leaving: bool) -> None:
        code = one.process.poll()
        if code is not None:
            sweep_group(one.process.pid)
            self._running.pop(key, None)
            self._say_ended(pod, code)
            if leaving:
                self._drop(pod)
        elif leaving and not one.asked_at:
            one.asked_at = time.monotonic()
            one.process.send_signal(signal.SIGTERM)
        elif leaving and time.time() > seconds_of(pod["metadata"]["deletionTimestamp"]):
            one.process.kill()

    def _say_ended(self, pod: Object, code: int) -> None:
        shown = 128 - code if code < 0 else code
        ended = {"exitCode": shown, "finishedAt": stamp_of(time.time()), "reason": "Error" if shown else "Completed"}
        container = pod["spec"]["containers"][0]
        if shown and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            end = self.logs(pod["metadata"]["namespace"], name_of(pod)).encode()[-MESSAGE_BYTES:]
            ended["message"] = "".join(end.decode(errors="ignore").splitlines(keepends=True)[-MESSAGE_LINES:])
        statuses = [{"name": container["name"], "state": {"terminated": ended}}]
        status = {"phase": "Failed" if shown else "Succeeded", "containerStatuses": statuses}
        status["conditions"] = [{"type": "Ready", "status": "False", "reason": "PodCompleted"}]
        with contextlib.suppress(RefusedRequest):
            meta = pod["metadata"]
            self._server.merge(
                self._server.of("pods"), meta["namespace"], meta["name"], {"status": status}, part="status"
            )

    # ------------------------------------------------------------ starting

    def _start(self, key: tuple[str, str], pod: Object) -> None:
        node = self._place(pod) if self._may_start(pod) else None
        if node is None:
            return
        spec, namespace = pod["spec"], key[0]
        name = f"{spec.get('hostname') or key[1]}.{spec.get('subdomain') or 'pods'}.{namespace}.svc"
        if any(one.host == self._hosts.get(name) for one in self._running.values()):
            return  # its address is still in use
        host = self._host_of(name)
        env = self._env_of(pod, node, host)
        if env is None:
            return  # its Secret is not there yet
        container, mounts = spec["containers"][0], self._mounts(pod)
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        argv = [self._local(_expanded(str(word), env), mounts) for word in words]
        env = {k: self._local(v, mounts) for k, v in env.items()}
        if not argv:
            argv = ["everstep", "--version"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        log = self._folder / "logs" / f"{namespace}.{key[1]}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**self._env, "PATH": path, **env},
                cwd=container.get("workingDir") or None,
                preexec_fn=before_exec(os.getpid()),
            )
        self._running[key] = PodProcess(process, pod["metadata"]["uid"], host)
        bound = copy.deepcopy(pod)
        bound["spec"]["nodeName"] = node
        conditions = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
        bound["status"] = {"phase": "Running", "podIP": host, "conditions": conditions}
        bound["status"]["startTime"] = stamp_of(time.time())
        self._server.store.put("pods", bound)

    def _may_start(self, pod: Object) -> bool:
        """Return whether a scheduler of this cluster would place a pod now: its group is placed as a whole."""
        if pod["spec"].get("schedulerName", gang_schedulers.DEFAULT) not in gang_schedulers.schedulers(self._gang):
            return False
        name = gang_schedulers.group_name(pod, self._gang)
        if name is None:
            return True
        namespace = pod["metadata"]["namespace"]
        pods = self._server.store.all("pods", namespace)
        more: dict[str, int] = {}
        for each in gang_schedulers.of_group(pods, name, self._gang):
            leaves = each["metadata"].get("deletionTimestamp")
            if not each["spec"].get("nodeName") and not leaves and (node := self._place(each, more)) is not None:
                more[node] = more.get(node, 0) + 1
        groups = gang_schedulers.by_name(self._server.store.all("podgroups", namespace))
        return gang_schedulers.may_start(pod, pods, groups, self._gang, sum(more.values()))

    def _place(self, pod: Object, more: Mapping[str, int] = {}) -> str | None:
        """Return the node for a pod: of those that take it, the one with the fewest pods like it. ``more``: so many
        pods count as on a node beside those that are."""
        pods = self._server.store.all("pods")
        tolerated = {t.get("key") for t in pod["spec"].get("tolerations") or []}
        best: list[tuple[int, int, str]] = []
        for node in self._server.store.all("nodes"):
            spec, labels = node.get("spec") or {}, node["metadata"].get("labels") or {}
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
            here = [
                p for p in pods if p["spec"].get("nodeName") == name_of(node) and p["status"].get("phase") == "Running"
            ]
            hard = [
                t for t in spec.get("taints") or [] if t["effect"] != "PreferNoSchedule" and t["key"] not in tolerated
            ]
            wants = pod["spec"].get("nodeSelector") or {}
            fits = all(labels.get(k) == v for k, v in wants.items())
            room = self._pods_max - len(here) - more.get(name_of(node), 0)
            if ready and fits and not hard and not spec.get("unschedulable") and room > 0:
                role = "everstep.io/role"
                like = sum(p["metadata"]["labels"].get(role) == pod["metadata"]["labels"].get(role) for p in here)
                best.append((like, len(here), name_of(node)))
        return min(best)[2] if best else None

    def _host_of(self, name: str) -> str:
        if name not in self._hosts:
            n = len(self._hosts) + 1
            self._hosts[name] = f"127.{self._net}.{n // 250}.{1 + n % 250}"
        return self._hosts[name]

    def _env_of(self, pod: Object, node: str, host: str) -> dict[str, str] | None:
        import base64

        fields = {
            "metadata.name": name_of(pod),
            "metadata.namespace": pod["metadata"]["namespace"],
            "status.podIP": host,
            "spec.nodeName": node,
        }
        out: dict[str, str] = {}
        for each in pod["spec"]["containers"][0].get("env") or []:
            source: dict[str, Any] = each.get("valueFrom") or {}
            if "fieldRef" in source:
                out[each["name"]] = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                key = source["secretKeyRef"]
                found = self._server.store.get("secrets", pod["metadata"]["namespace"], key["name"])
                if found is None or key["key"] not in (found.get("data") or {}):
                    return None
                out[each["name"]] = base64.b64decode(found["data"][key["key"]]).decode()
            else:
                out[each["name"]] = _expanded(each.get("value", ""), out)
        return out

    def _mounts(self, pod: Object) -> dict[str, Path]:
        """Return mount path -> folder here."""
        folders = {}
        for volume in pod["spec"].get("volumes") or []:
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            namespace = pod["metadata"]["namespace"]
            own = Path("claims", namespace, claim) if claim else Path("pods", namespace, name_of(pod), volume["name"])
            folders[volume["name"]] = self._folder / own
            folders[volume["name"]].mkdir(parents=True, exist_ok=True)
        container = pod["spec"]["containers"][0]
        return {m["mountPath"]: folders[m["name"]] for m in container.get("volumeMounts") or []}

    def _local(self, text: str, mounts: Mapping[str, Path]) -> str:
        for path, folder in mounts.items():
            if text == path or text.startswith(f"{path}/"):
                return f"{folder}{text[len(path) :]}"
        if _SERVICE_PORT.fullmatch(text):
            name, _, port = text.rpartition(":")
            return f"{self._host_of(name)}:{port}"
        return text

    # ------------------------------------------------------------ the end

    def logs(self, namespace: str, name: str) -> str:
        """Return what a pod has printed."""
        path = self._folder / "logs" / f"{namespace}.{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self) -> None:
        """End all nodes and what runs on them."""
        self._over.set()
        self._thread.join(30)
        for one in self._running.values():
            one.kill()
        self._running.clear()
        self._net_held.close()


def _own_net() -> tuple[int, socket.socket]:
    """Return a number K whose addresses 127.K.x.y no other cluster has, and a socket that holds it while it is open."""
    for k in range(1, 255):
        held = socket.socket()
        try:
            held.bind((f"127.{k}.255.254", _HOLD_PORT))
        except OSError:
            held.close()
            continue
        return k, held
    raise PlatformError(
        f"no addresses are left for this cluster: port {_HOLD_PORT} of all of 127.1 to 127.254 is in use"
    )


def _expanded(text: str, env: Mapping[str, str]) -> str:
    for name, value in env.items():
        text = text.replace(f"$({name})", value)
    return text
