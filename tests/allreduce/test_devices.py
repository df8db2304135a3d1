"""Groups whose models are on GPUs: what can be said of them on a machine without, and what needs one (marked)."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from device_members import CPU, LONG_S, connected, over, redone_leaves_no_trace, waits
from group_hub import Hub
from groups import Gloo, Member, run_group
from scripts import same, trained
from torch import nn

from everstep.allreduce import device_group, devices
from everstep.allreduce.collective import CollectiveError
from everstep.allreduce.device_group import DeviceCollective
from everstep.allreduce.devices import DevicePlace, Way, choose, device_for, place_of, version_number
from everstep.allreduce.environment import LOCAL_VARIABLE, NCCL_ENVIRONMENT, NCCL_VARIABLE
from everstep.allreduce.gradient_buckets import digest, measure_there, read_digests
from everstep.allreduce.group_buffers import _integers, _words, integers_there, words_there
from everstep.allreduce.group_store import GroupStore
from everstep.allreduce.staged import HostStaged
from everstep.allreduce.state import ReplicaState
from everstep.config.spec import JobSpec
from everstep.errors import PlatformError, ScriptError
from everstep.native import sum_bits
from everstep.net.retry import Deadline


def gpu(identity: int, nccl: int = 22809) -> DevicePlace:
    return DevicePlace("cuda", identity, nccl)


# ---------------------------------------------------------------- which way


@pytest.mark.parametrize(
    ("places", "way", "why"),
    [
        ([DevicePlace(), DevicePlace()], Way.HOST, ""),
        ([gpu(1), gpu(2), gpu(3)], Way.NCCL, ""),
        ([gpu(1), gpu(2), gpu(1)], Way.STAGED, "ranks 0, 2 share one GPU"),
        ([gpu(1), gpu(2, 0)], Way.STAGED, "no NCCL at rank 1"),
        ([gpu(1), gpu(2, 22703)], Way.STAGED, "22703, 22809"),
        ([gpu(1), DevicePlace()], Way.STAGED, "models are on cpu, cuda"),
        ([DevicePlace(devices.SEVERAL), DevicePlace(devices.SEVERAL)], Way.STAGED, "several devices"),
        ([DevicePlace("mps", 1), DevicePlace("mps", 2)], Way.STAGED, "models are on mps"),
    ],
)
def test_all_members_choose_the_same_way(places: list[DevicePlace], way: Way, why: str) -> None:
    chosen = choose(places)
    assert chosen.way is way
    assert why in chosen.why and bool(why) == bool(chosen.why)


def test_models_that_are_cut_differently_are_refused_in_one_line() -> None:
    with pytest.raises(ScriptError, match="one device at rank 1 and on several"):
        choose([DevicePlace(devices.SEVERAL), gpu(1)])


def test_what_a_member_says_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of([]) == place_of([CPU]) == DevicePlace()
    assert place_of([CPU, torch.device("cuda:0")]).kind == devices.SEVERAL
    found = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, "9+cuda13"))
    monkeypatch.setattr(devices, "nccl_backend", lambda: object)
    first = place_of([torch.device("cuda:0")])
    assert first.kind == "cuda" and first.nccl == 22809
    found.uuid = "GPU-2"
    assert place_of([torch.device("cuda:0")]).identity != first.identity  # CUDA_VISIBLE_DEVICES renames them
    monkeypatch.setenv(NCCL_VARIABLE, "0")
    assert place_of([torch.device("cuda:0")]).nccl == 0


def test_tables_on_the_ps_say_nothing_of_where_a_model_is() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(2, 3), "top": nn.Linear(3, 1, device="meta")})
    model["table"].weight.everstep_table = "table"
    assert ReplicaState([model], [], {}).devices() == {torch.device("meta")}


def test_versions_of_nccl_are_compared_as_numbers() -> None:
    assert version_number((2, 28, 9)) == 22809 and version_number((2, 4)) == 20400


def test_workers_of_a_node_take_its_gpus_in_turn() -> None:
    at = [device_for({LOCAL_VARIABLE: str(local)}, 2).index for local in range(4)]
    assert at == [0, 1, 0, 1]
    assert device_for({LOCAL_VARIABLE: "3"}, 0) == CPU
    assert device_for({}, 8) == torch.device("cuda", 0)


# ---------------------------------------------------------------- digests and words, computed there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 2048, 5001])
def test_a_digest_computed_on_the_device_is_that_of_the_host(dtype: torch.dtype, count: int) -> None:
    flat = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    name = str(dtype).removeprefix("torch.")
    for bad in (None, float("nan"), float("-inf")):
        if bad is not None:
            flat[count // 2] = bad
        sums, finite = sum_bits(flat.view(torch.uint8).numpy(), name)
        assert read_digests([measure_there(flat)]) == [digest(flat)] == [(sums & (1 << 62) - 1, finite)]


def test_digests_come_in_their_order_wherever_they_were_computed() -> None:
    tensors = [torch.full((n,), float(n)) for n in (3, 8, 5)]
    mixed = [measure_there(tensors[0]), digest(tensors[1]), measure_there(tensors[2])]
    assert read_digests(mixed) == [digest(f) for f in tensors]


def test_integers_of_buffers_travel_as_on_the_cpu() -> None:
    for kind in (torch.int64, torch.int32, torch.bool):
        numbers = torch.tensor([0, 1, -1, 2**31 - 1, -(2**40)]).to(kind).reshape(5, 1)
        words = words_there(numbers)
        assert words.equal(_words(numbers))
        assert integers_there(words).equal(_integers(words))
        assert integers_there(words).to(kind).equal(numbers.reshape(-1))


# ---------------------------------------------------------------- by way of the host's memory


class Late:
    """An event of a device that is not over before somebody waits for it."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


class StagedGloo(Gloo):
    """All gradients by way of other memory, though they are on the CPU."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        super().__init__(rank, size, store)
        self.staged = HostStaged(super().allreduce, super().send, super().recv)

    def allreduce(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        return self.staged.allreduce(tensor, op)

    def send(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.staged.send(tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> Any:
        return self.staged.recv(tensor, peer)


@pytest.mark.parametrize("parts", [0, 4])
def test_staged_gradients_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    n = 3 if parts else 2  # (two members would all-reduce their parts)
    spec = JobSpec(workers=n, logical_workers=parts)
    direct = run_group(n, spec, lambda m: trained(m, norm=True))
    monkeypatch.setattr("groups.Gloo", StagedGloo)
    # Copies that come late: gloo begins where somebody waits, in order all the same.
    monkeypatch.setattr("everstep.allreduce.staged._event", lambda tensor: Late())

    def script(member: Member) -> Any:
        member.session.break_at = {1} if not parts else set()
        return trained(member, norm=True), [what for _, _, _, what in member.session.log]

    for state, log in run_group(n, spec, script, redo=frozenset({2})):
        same(state, direct[0])
        assert log.count("broken") == (not parts)


def test_a_staged_tensor_is_written_when_its_wait_is_over_and_memory_is_used_again() -> None:
    begun: list[torch.Tensor] = []

    class Half:
        def wait(self, timeout_s: float | None = None) -> None:
            if broken:
                raise CollectiveError("broken")

    def halve(memory: torch.Tensor, op: str) -> Half:
        begun.append(memory)
        memory.mul_(0.5)
        return Half()

    def none(memory: torch.Tensor, peer: int) -> Half:
        raise AssertionError

    broken = False
    staged = HostStaged(halve, none, none)
    tensor = torch.full((3,), 8.0)
    work = staged.allreduce(tensor)
    assert tensor.tolist() == [8.0] * 3
    work.wait()
    assert tensor.tolist() == [4.0] * 3
    staged.allreduce(tensor).wait()
    assert begun[0] is begun[1] and tensor.tolist() == [2.0] * 3
    broken = True
    work = staged.allreduce(tensor)
    with pytest.raises(CollectiveError):
        work.wait()
    assert tensor.tolist() == [2.0] * 3
    staged.allreduce(tensor)
    assert begun[3] is not begun[2]  # gloo may still write into what broke


# ---------------------------------------------------------------- over NCCL, or what stands in for it


class FakeWork:
    def __init__(self, group: FakeNccl, number: int) -> None:
        self.group, self.number = group, number

    def is_completed(self) -> bool:
        return self.group.aborted or len(self.group.given(self.number)) == self.group.size

    def wait(self) -> None:
        """As NCCL's: orders a stream, and raises what was met with; it does not wait."""
        if self.group.fails:
            raise RuntimeError("NCCL error: remote process exited\nand more")
        if not self.group.aborted:
            tensors = self.group.given(self.number)
            tensors[self.group.rank].copy_(torch.stack(self.group.copies[self.number]).sum(0))


class FakeNccl:
    """What ``NcclGroup`` uses of torch's ProcessGroupNCCL. All in one process, found by the unique id."""

    groups: ClassVar[dict[bytes, dict[int, dict[int, torch.Tensor]]]] = {}
    refused: ClassVar[set[int]] = set()  # ranks that cannot connect
    made: ClassVar[list[FakeNccl]] = []
    copies: ClassVar[dict[int, list[torch.Tensor]]] = {}  # what was given, by all

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options.config.blocking == 0  # an abort could not end the connecting
        self.store, self.rank, self.size = store, rank, size
        self.aborted = self.fails = False
        self.count = 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.rank == 0:
            self.store.set("0", bytes([255, 0, len(self.made)]) * 40)
        self.id = self.store.get("0")
        if self.rank in self.refused:
            raise RuntimeError("NCCL error: unhandled system error")

    def allreduce(self, tensors: list[torch.Tensor], op: Any, timeout: Any) -> FakeWork:
        self.count += 1
        self.copies.setdefault(self.count, []).append(tensors[0].clone())
        self.given(self.count)[self.rank] = tensors[0]
        return FakeWork(self, self.count)

    def given(self, number: int) -> dict[int, torch.Tensor]:
        return self.groups.setdefault(self.id, {}).setdefault(number, {})

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    for name, value in (("groups", {}), ("refused", set()), ("made", []), ("copies", {})):
        monkeypatch.setattr(FakeNccl, name, value)
    identities = iter(range(100))
    monkeypatch.setattr(device_group, "place_of", lambda known: gpu(next(identities)))
    monkeypatch.setattr(device_group, "nccl_backend", lambda: FakeNccl)
    monkeypatch.setattr(devices, "_given_up", [])
    for name in NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "1")  # put back at the end
    return FakeNccl


def test_members_connect_over_gloo_and_reduce(fake: type[FakeNccl]) -> None:
    with connected(3) as group:
        assert [c.chosen.way for c in group] == [Way.NCCL] * 3
        assert {name: os.environ[name] for name in NCCL_ENVIRONMENT} == NCCL_ENVIRONMENT
        assert not any(c.host_sums for c in group)
        tensors = [torch.full((2,), float(c.rank + 1)) for c in group]
        works = [over(c).allreduce(t) for c, t in zip(group, tensors, strict=True)]
        for work in works:
            work.wait(LONG_S)
        assert [t.tolist() for t in tensors] == [[6.0, 6.0]] * 3
        host = torch.ones(1)  # what is on the CPU stays with gloo
        for work in [c.allreduce(t) for c, t in zip(group, [host, torch.ones(1), torch.ones(1)], strict=True)]:
            work.wait(LONG_S)
        assert host.tolist() == [3.0] and fake.made[0].count == 2
    assert all(made.aborted for made in fake.made)  # an open communicator's destructor may wait for ever


@pytest.mark.parametrize("who", [0, 1])
def test_who_waits_in_nccl_is_freed_when_the_group_is_given_up_here_or_at_a_peer(
    fake: type[FakeNccl], who: int
) -> None:
    with connected() as group:
        thread, raised = waits(group[0])
        group[who].abort("given up by the test")
        thread.join(LONG_S)
        assert len(raised) == 1 and ("given up by the test" if who == 0 else "a member has left") in str(raised[0])
        with pytest.raises(CollectiveError):
            over(group[0]).allreduce(torch.ones(2))


def test_an_error_of_nccl_breaks_the_group_for_all(fake: type[FakeNccl]) -> None:
    with connected() as group:
        thread, _ = waits(group[0])
        failing = next(made for made in fake.made if made.rank == 1)
        work = over(group[1]).allreduce(torch.ones(2))
        failing.fails = True
        with pytest.raises(CollectiveError, match="remote process exited"):
            work.wait(LONG_S)
        thread.join(LONG_S)
        with pytest.raises(CollectiveError):
            group[0].vote([1])


def test_what_an_aborted_kernel_left_is_not_a_result(fake: type[FakeNccl]) -> None:
    with connected() as group:
        work = over(group[0]).allreduce(torch.ones(2))
        group[0].abort("a member is lost")  # the kernel ends by this, and the work counts as over
        with pytest.raises(CollectiveError, match="a member is lost"):
            work.wait(LONG_S)


def test_where_nccl_does_not_connect_at_one_the_next_attempt_is_without(
    fake: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.refused.add(1)
    with pytest.raises(CollectiveError), connected():
        pass
    identities = iter(range(100))
    assert devices._given_up  # what ``place_of`` says from now on:
    monkeypatch.setattr(device_group, "place_of", lambda known: gpu(next(identities), 0))
    with connected() as group:
        assert [c.chosen.way for c in group] == [Way.STAGED] * 2
        assert "by way of the host's memory" in group[0].describe()


def test_a_member_that_is_lost_while_nccl_connects_is_nothing_against_nccl(
    fake: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(made: FakeNccl, device: torch.device) -> None:
        if made.rank == 1:
            group[1].abort("killed")
        else:
            made.store.set("0", b"id")
            until = Deadline(LONG_S)
            while not group[0].parted():
                until.check()
                time.sleep(0.001)
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(fake, "eager_connect_single_device", lost)
    hub = Hub()
    group = [DeviceCollective(rank, 2, "127.0.0.1", "1.0", [CPU]) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        stores = [GroupStore(hub, 1, 0, "127.0.0.1", 2, LONG_S) for _ in group]
        for attempt in [pool.submit(c.connect, store, LONG_S) for c, store in zip(group, stores, strict=True)]:
            with pytest.raises(CollectiveError):
                attempt.result()
    assert not devices._given_up


def test_a_gpu_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(known: Any) -> DevicePlace:
        raise RuntimeError("CUDA error: device-side assert triggered\nand advice")

    monkeypatch.setattr(device_group, "place_of", broken)
    collective = DeviceCollective(0, 2, "127.0.0.1", "1.0", [torch.device("cuda", 1)])
    with pytest.raises(PlatformError, match=r"cuda:1 of this worker does not answer: .* triggered$"):
        collective.connect(GroupStore(Hub(), 1, 0, "127.0.0.1", 2, LONG_S), LONG_S)


def test_a_group_on_the_cpu_has_nothing_of_it() -> None:
    with connected() as group:
        assert [(c.chosen.way, c._nccl) for c in group] == [(Way.HOST, None)] * 2


def test_a_redone_step_leaves_no_trace_and_state_is_loaded_again() -> None:
    redone_leaves_no_trace(CPU)
