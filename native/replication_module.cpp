// The Python face of replication_sender.h, replication_receiver.h and wire.h: everstep/protect/replication_sender.py.
// Whatever waits does so without the GIL.
#include "replication_module.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>

#include "replication_sender.h"
#include "replication_receiver.h"

namespace everstep {
namespace {

using free_gil = nb::call_guard<nb::gil_scoped_release>;
using Target = std::tuple<PeerKey, int64_t, int64_t>;  // streams.SyncTarget

SyncTarget target_of(const Target& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

// A copy of bytes that Python has.
OutItem item_of(int64_t partition, int64_t seq, int kind, int64_t mirror, int64_t sync, nb::handle blob) {
  Py_buffer view;
  if (PyObject_GetBuffer(blob.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
  auto held = std::make_shared<std::vector<uint8_t>>(static_cast<uint8_t*>(view.buf),
                                                     static_cast<uint8_t*>(view.buf) + view.len);
  PyBuffer_Release(&view);
  OutItem item;
  item.partition = uint32_t(partition);
  item.seq = seq;
  item.kind = kind;
  item.mirror = mirror;
  item.sync = sync;
  item.data = held->data();
  item.bytes = held->size();
  item.hold = std::move(held);
  return item;
}

nb::object batch(ReplicationSender& c, PeerKey peer, size_t max_bytes, size_t max_items) {
  ReplicationSender::Batch b;
  if (!c.batch(peer, max_bytes, max_items, b)) return nb::none();
  nb::list items;
  for (const OutItem& i : b.items) {
    auto* held = new std::shared_ptr<const void>(i.hold);
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<const void>*>(p); });
    nb::ndarray<nb::numpy, uint8_t> data(const_cast<uint8_t*>(i.data), {i.bytes}, owner);
    items.append(nb::make_tuple(i.ticket, i.partition, i.seq, i.kind, i.mirror, i.sync, data, i.bytes));
  }
  return nb::make_tuple(b.stream, b.first, items, b.confirmed);
}

nb::list events_of(const std::vector<ReplicationSender::Event>& events) {
  nb::list out;
  for (const ReplicationSender::Event& e : events)
    out.append(nb::make_tuple(e.peer, int(e.kind), e.first, nb::bytes(e.payload.data(), e.payload.size())));
  return out;
}

nb::tuple carry(ReplicationSender& c, int64_t before, int64_t after, double timeout_s) {
  std::vector<ReplicationSender::Event> events;
  ReplicationSender::Outcome outcome;
  {
    nb::gil_scoped_release free;
    outcome = c.carry(before, after, timeout_s, events);
  }
  return nb::make_tuple(int(outcome), events_of(events));
}

nb::list flight(ReplicationSender& c, PeerKey peer, double timeout_s) {
  std::vector<ReplicationSender::Event> events;
  {
    nb::gil_scoped_release free;
    c.flight(peer, timeout_s, events);
  }
  return events_of(events);
}

std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t> counts(ReplicationSender& c) {
  const ReplicationSender::Counts n = c.counts();
  return {n.done_ticket, n.refused_ticket, n.next_ticket, n.sync_bytes, n.waiting_bytes, n.levelling};
}

// One connection of a ps: its frames, but for the messages that go without saying, which are applied and answered.
class ReceiverConnection {
 public:
  ReceiverConnection(ReplicationReceiver& receiver, int fd, const nb::bytes& ahead)
      : receiver_(receiver), socket_(fd), reader_(socket_, bytes_of(ahead)) {}

  // (kind, flags, header, body); None: the peer closed the connection. Broken.
  nb::object next() {
    {
      nb::gil_scoped_release free;
      for (;;) {
        if (!reader_.next(frame_, [] {})) {
          closed_ = true;
          break;
        }
        if (frame_.kind != wire::kAppend || !receiver_.follow(frame_, codes_)) break;
        const wire::Preamble start = wire::preamble(wire::kAppended, codes_.data(), codes_.size(), 0);
        std::vector<iovec> parts{{const_cast<wire::Preamble*>(&start), sizeof(start)}};
        if (!codes_.empty()) parts.push_back({codes_.data(), codes_.size()});
        socket_.send(parts, [] {});
      }
    }
    if (closed_) return nb::none();
    nb::bytes header(frame_.header.data(), frame_.header.size());
    nb::ndarray<nb::numpy, uint8_t> body(frame_.body, {frame_.body_bytes}, nb::find(this));
    return nb::make_tuple(int(frame_.kind), int(frame_.flags), header, body);
  }

 private:
  ReplicationReceiver& receiver_;
  wire::Socket socket_;
  wire::Reader reader_;
  wire::Frame frame_;
  std::vector<uint8_t> codes_;
  bool closed_ = false;
};

void enter(ReplicationReceiver& i) {
  if (i.gate().try_enter()) return;
  nb::gil_scoped_release free;
  i.gate().enter();
}

}  // namespace

void bind_replication(nb::module_& m) {
  // NOLINTNEXTLINE(bugprone-unused-raii,bugprone-throw-keyword-missing): its constructor adds it to the module
  nb::exception<Broken>(m, "Broken");
  nb::class_<ReplicationReceiver>(m, "ReplicationReceiver")
      .def(nb::init<Store&>(), nb::arg("store"), nb::keep_alive<1, 2>())
      .def("enter", &enter)
      .def("leave", [](ReplicationReceiver& i) { i.gate().leave(); })
      .def(
          "enter_alone", [](ReplicationReceiver& i) { i.gate().enter_alone(); }, free_gil())
      .def("leave_alone", [](ReplicationReceiver& i) { i.gate().leave_alone(); })
      .def(
          "publish",
          [](ReplicationReceiver& i, int64_t version,
             const std::vector<std::tuple<uint32_t, PeerKey, std::vector<uint64_t>, bool>>& sources) {
            std::unordered_map<uint32_t, ReplicationReceiver::Source> by_partition;
            for (auto& [partition, sender, mirrors, several] : sources)
              by_partition[partition] = ReplicationReceiver::Source{sender, mirrors, several};
            i.publish(version, std::move(by_partition));
          },
          nb::arg("version"), nb::arg("sources"))
      .def(
          "retain",
          [](ReplicationReceiver& i, uint32_t partition, int64_t seq, nb::handle blob) {
            const OutItem kept = item_of(partition, seq, 0, 0, 0, blob);
            i.retain(partition, seq, kept.data, kept.bytes);
          },
          nb::arg("partition"), nb::arg("seq"), nb::arg("blob"))
      .def("confirm_retained", &ReplicationReceiver::confirm_retained, nb::arg("partition"), nb::arg("seq"))
      .def(
          "retained_after",
          [](ReplicationReceiver& i, uint32_t partition, int64_t seq) {
            nb::list out;
            for (auto& [at, blob] : i.retained_after(partition, seq))
              out.append(nb::make_tuple(at, nb::bytes(blob->data(), blob->size())));
            return out;
          },
          nb::arg("partition"), nb::arg("seq"))
      .def("drop_retained", &ReplicationReceiver::drop_retained, nb::arg("partition"))
      .def("drop_all_retained", &ReplicationReceiver::drop_all_retained)
      .def("received", &ReplicationReceiver::received, nb::arg("sender"))
      .def("set_received", &ReplicationReceiver::set_received, nb::arg("sender"), nb::arg("next"))
      .def("forget", &ReplicationReceiver::forget, nb::arg("sender"))
      .def("senders", &ReplicationReceiver::senders)
      .def(
          "lock", [](ReplicationReceiver& i, PeerKey sender) { i.one_at_a_time(sender).lock(); }, nb::arg("sender"),
          free_gil())
      .def(
          "unlock", [](ReplicationReceiver& i, PeerKey sender) { i.one_at_a_time(sender).unlock(); },
          nb::arg("sender"));
  nb::class_<ReceiverConnection>(m, "ReceiverConnection")
      .def(nb::init<ReplicationReceiver&, int, nb::bytes>(), nb::arg("receiver"), nb::arg("fd"), nb::arg("ahead"),
           nb::keep_alive<1, 2>())
      .def("next", &ReceiverConnection::next);
  nb::class_<ReplicationSender>(m, "ReplicationSender")
      .def(
          "__init__",
          [](ReplicationSender* self, Store& store, PeerKey me) { new (self) ReplicationSender(store, me); },
          nb::arg("store"), nb::arg("me"), nb::keep_alive<1, 2>())
      .def("set_route", &ReplicationSender::set_route, nb::arg("partition"), nb::arg("peers"), free_gil())
      .def("set_version", &ReplicationSender::set_version, nb::arg("version"), free_gil())
      .def(
          "sync",
          [](ReplicationSender& c, uint32_t partition, int64_t from_ticket, const std::vector<Target>& targets) {
            std::vector<SyncTarget> all;
            all.reserve(targets.size());
            for (const Target& t : targets) all.push_back(target_of(t));
            c.sync(partition, from_ticket, all);
          },
          nb::arg("partition"), nb::arg("from_ticket"), nb::arg("targets"))
      .def(
          "widen",
          [](ReplicationSender& c, uint32_t partition, int64_t from_ticket, const Target& t) {
            c.widen(partition, from_ticket, target_of(t));
          },
          nb::arg("partition"), nb::arg("from_ticket"), nb::arg("target"))
      .def("end_syncs", &ReplicationSender::end_syncs, nb::arg("partition"))
      .def(
          "some", [](ReplicationSender& c, uint32_t partition, const Target& t) { c.some(partition, target_of(t)); },
          nb::arg("partition"), nb::arg("target"))
      .def(
          "append",
          [](ReplicationSender& c, int64_t first, const nb::list& entries) {
            std::vector<OutItem> items;
            for (nb::handle e : entries)
              items.push_back(
                  item_of(nb::cast<int64_t>(e[0]), nb::cast<int64_t>(e[1]), nb::cast<int>(e[2]), 0, 0, e[3]));
            return c.append(first, items);
          },
          nb::arg("first_ticket"), nb::arg("entries"))
      .def(
          "send",
          [](ReplicationSender& c, PeerKey peer, int64_t partition, int64_t seq, int kind, int64_t mirror, int64_t sync,
             nb::handle blob) { c.send(peer, item_of(partition, seq, kind, mirror, sync, blob)); },
          nb::arg("peer"), nb::arg("partition"), nb::arg("seq"), nb::arg("kind"), nb::arg("mirror"), nb::arg("sync"),
          nb::arg("blob"))
      .def("batch", &batch, nb::arg("peer"), nb::arg("max_bytes"), nb::arg("max_items"))
      .def("waits", &ReplicationSender::waits, nb::arg("peer"))
      .def(
          "answered",
          [](ReplicationSender& c, PeerKey peer, int64_t first, const nb::bytes& codes) {
            std::vector<std::pair<int64_t, int64_t>> out;
            for (auto& pair : c.answered(peer, first, bytes_of(codes))) out.emplace_back(pair);
            return out;
          },
          nb::arg("peer"), nb::arg("first"), nb::arg("codes"))
      .def("live", &ReplicationSender::live, nb::arg("peers"), nb::arg("version"))
      .def("peers", &ReplicationSender::peers)
      .def("owes", &ReplicationSender::owes, nb::arg("partition"))
      .def("counts", &counts)
      .def("link", &ReplicationSender::link, nb::arg("peer"), nb::arg("fd"), nb::arg("told"))
      .def("told", &ReplicationSender::told, nb::arg("peer"), nb::arg("tables"))
      .def("unlink", &ReplicationSender::unlink, nb::arg("peer"))
      .def("claim", &ReplicationSender::claim, nb::arg("peer"))
      .def("release", &ReplicationSender::release, nb::arg("peer"))
      .def("poke", &ReplicationSender::poke, nb::arg("peer"))
      .def("poke_all", &ReplicationSender::poke_all)
      .def("wait", &ReplicationSender::wait, nb::arg("peer"), nb::arg("timeout_s"), free_gil())
      .def("forget", &ReplicationSender::forget, nb::arg("peer"))
      .def("stop", &ReplicationSender::stop)
      .def("drain", &ReplicationSender::drain, nb::arg("tell"), free_gil())
      .def("drain_idle", &ReplicationSender::drain_idle, nb::arg("time_s"), nb::arg("idle_s"), free_gil())
      .def("carry", &carry, nb::arg("before"), nb::arg("after"), nb::arg("timeout_s"))
      .def("flight", &flight, nb::arg("peer"), nb::arg("timeout_s"))
      .def("room", &ReplicationSender::room, nb::arg("limit"), nb::arg("timeout_s"), free_gil());
}

}  // namespace everstep
