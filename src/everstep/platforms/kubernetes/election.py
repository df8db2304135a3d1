"""Chooses the operator that acts, by a Lease. Times of others are not believed: a Lease that has not changed for its
duration, by our own clock, is free."""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from everstep.platforms.kubernetes.api_client import ApiReason, ApiServerError, ClusterClient
from everstep.platforms.kubernetes.kinds import Kind, Object

LEASE: Final = "everstep-operator"
DURATION_S: Final = 15.0
RENEW_S: Final = 4.0


class LeaseWatch:
    """Knows since when a Lease is as it is. Pure."""

    def __init__(self) -> None:
        self._version, self._since = "", 0.0

    def __repr__(self) -> str:
        return f"<lease at {self._version}>"

    def is_free(self, lease: Object, me: str, now_s: float) -> bool:
        """Return whether ``me`` may take the Lease, or has it."""
        version = str(lease["metadata"].get("resourceVersion", ""))
        if version != self._version:
            self._version, self._since = version, now_s
        holder = (lease.get("spec") or {}).get("holderIdentity") or ""
        return holder in ("", me) or now_s - self._since > DURATION_S


class Election:
    """Holds the Lease while it can. ``leads``: whether this operator may act now."""

    def __init__(self, client: ClusterClient, namespace: str, say: Callable[[str], None]) -> None:
        self._client, self._namespace, self._say = client, namespace, say
        self.me = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._watch = LeaseWatch()
        self._until = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    def __repr__(self) -> str:
        return f"<{self.me}{' leads' if self.leads() else ''}>"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def leads(self) -> bool:
        """Return whether the Lease is held, with time to spare."""
        return time.monotonic() < self._until

    def close(self) -> None:
        """Give the Lease back."""
        self._over.set()
        self._thread.join(10)
        if self.leads():
            self._until = 0.0
            try:
                lease = self._client.get(Kind.LEASE, self._namespace, LEASE)
                self._write(lease, "")
            except ApiServerError:
                pass  # it runs out

    def _run(self) -> None:
        while not self._over.is_set():
            led = self.leads()
            try:
                self._try()
            except ApiServerError as error:
                if not error.passing and error.reason is not ApiReason.CONFLICT:
                    self._say(f"{error}; without its Lease the operator only waits")
            if self.leads() and not led:
                self._say(f"{self.me} leads")
            self._over.wait(RENEW_S if self.leads() else RENEW_S / 4)

    def _try(self) -> None:
        began = time.monotonic()
        try:
            lease = self._client.get(Kind.LEASE, self._namespace, LEASE)
        except ApiServerError as error:
            if error.reason is not ApiReason.NOT_FOUND:
                raise
            meta = {"name": LEASE, "namespace": self._namespace}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": Kind.LEASE.value, "metadata": meta}
            self._client.create(Kind.LEASE, self._namespace, {**body, "spec": self._spec(self.me)})
            self._until = began + DURATION_S - RENEW_S
            return
        if self._watch.is_free(lease, self.me, began):
            self._write(lease, self.me)
            self._until = began + DURATION_S - RENEW_S

    def _write(self, lease: Object, holder: str) -> None:
        meta = {"resourceVersion": lease["metadata"]["resourceVersion"]}
        self._client.patch(Kind.LEASE, self._namespace, LEASE, {"metadata": meta, "spec": self._spec(holder)})

    def _spec(self, holder: str) -> Object:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {"holderIdentity": holder, "leaseDurationSeconds": int(DURATION_S), "renewTime": now}
