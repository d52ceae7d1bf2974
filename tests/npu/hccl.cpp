// Collectives of the test device: gloo's, on the memory of its tensors. As on one communicator of
// NCCL, all calls of a group run in the order of the calls, in one stream: a receive at its head keeps
// every later send of this rank waiting. Calls between startCoalescing and endCoalescing run together.

#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/stl.h>

#include <memory>
#include <mutex>

namespace npu {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
// Begins a call; null if it has been finished meanwhile.
using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;

// What has gone wrong in a task that belongs to a work.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr error;
};

class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(int rank, OpType kind, std::vector<std::pair<c10::Stream, Point>> ends,
             std::shared_ptr<Outcome> outcome, Tensors held, Tensors outputs)
      : Work(rank, kind), ends_(std::move(ends)), outcome_(std::move(outcome)),
        held_(std::move(held)), outputs_(std::move(outputs)) {}

  ~QueuedWork() override {
    for (auto& tensor : held_) {
      for (auto& [stream, point] : ends_) {
        keep_until(tensor, stream);
      }
    }
  }

  bool isCompleted() override {
    for (auto& [stream, point] : ends_) {
      if (!point.is_reached()) {
        return false;
      }
    }
    return true;
  }

  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(outcome_->mutex);
    return !outcome_->error;
  }

  std::exception_ptr exception() const override {
    std::lock_guard<std::mutex> lock(outcome_->mutex);
    return outcome_->error;
  }

  // The host goes on; the current stream waits.
  bool wait(std::chrono::milliseconds) override {
    for (auto& [stream, point] : ends_) {
      if (opType_ == OpType::BARRIER) {
        point.wait_on_host();
      }
      follow(current_stream(stream.device_index()), point);
    }
    if (isCompleted() && !isSuccess()) {
      std::rethrow_exception(exception());
    }
    held_.clear();
    return true;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  void blockCurrentStream() {
    wait(kNoTimeout);
  }

  std::vector<at::Tensor> result() override {
    return outputs_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto stream = ends_.back().first;
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<c10::Device>{stream.device()});
    auto before = exchange_stream(stream); // what follows it, follows this stream
    future->markCompleted(c10::IValue(outputs_));
    exchange_stream(before);
    return future;
  }

 private:
  std::vector<std::pair<c10::Stream, Point>> ends_;
  std::shared_ptr<Outcome> outcome_;
  Tensors held_, outputs_;
};

class Hccl final : public c10d::Backend {
 public:
  explicit Hccl(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "hccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return count_;
  }
  void startCoalescing() override {
    joins_ = true;
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    joins_ = false;
    auto starts = std::exchange(joined_, {});
    return queue(OpType::COALESCED, std::exchange(joined_tensors_, {}), {}, [starts = std::move(starts)] {
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (auto& start : starts) {
        works.push_back(start());
      }
      for (auto& work : works) {
        if (work) {
          work->wait();
        }
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return begin(OpType::BROADCAST, tensors, tensors, [this, v = views(tensors), options = options]() mutable {
      gloo_->broadcast(v, options)->wait();
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return begin(OpType::ALLREDUCE, tensors, tensors, [this, v = views(tensors), options = options]() mutable {
      bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
      bool scales = is_mean && is_short(v[0]);
      options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
      divide(v, scales);
      gloo_->allreduce(v, options)->wait();
      divide(v, is_mean && !scales);
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      Tensors& tensors, const c10d::ReduceOptions& options) override {
    return begin(OpType::REDUCE, tensors, tensors, [this, v = views(tensors), options = options]() mutable {
      gloo_->reduce(v, options)->wait();
    });
  }

  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto outs = views(outputs);
    return begin(OpType::ALLGATHER, inputs, joined(outputs),
                 [this, outs, v = views(inputs), options = options]() mutable {
                   gloo_->allgather(outs, v, options)->wait();
                 });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return begin(OpType::_ALLGATHER_BASE, {input}, {output},
                 [this, out = host_view(output), in = host_view(input), options = options]() mutable {
                   gloo_->_allgather_base(out, in, options)->wait();
                 });
  }

  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto outs = views(outputs);
    return begin(OpType::GATHER, inputs, joined(outputs),
                 [this, outs, v = views(inputs), options = options]() mutable {
                   gloo_->gather(outs, v, options)->wait();
                 });
  }

  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto ins = views(inputs);
    return begin(OpType::SCATTER, joined(inputs), outputs,
                 [this, ins, v = views(outputs), options = options]() mutable {
                   gloo_->scatter(v, ins, options)->wait();
                 });
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    auto out = host_view(outputs.at(0));
    auto ins = views(inputs.at(0));
    return begin(OpType::REDUCE_SCATTER, inputs.at(0), outputs, [this, out, ins, options = options]() mutable {
      auto whole = at::cat(flat(ins));
      auto mine = at::empty({out.numel()}, out.options());
      reduce_scatter_now(mine, whole, options);
      out.copy_(mine.view(out.sizes()));
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return begin(OpType::_REDUCE_SCATTER_BASE, {input}, {output},
                 [this, out = host_view(output), in = host_view(input), options = options]() mutable {
                   reduce_scatter_now(out, in, options);
                 });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return begin(OpType::ALLTOALL_BASE, {input}, {output},
                 [this, out = host_view(output), in = host_view(input), output_sizes, input_sizes,
                  options = options]() mutable {
                   gloo_->alltoall_base(out, in, output_sizes, input_sizes, options)->wait();
                 });
  }

  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return begin(OpType::ALLTOALL, inputs, outputs,
                 [this, outs = views(outputs), ins = views(inputs), options = options]() mutable {
                   auto in = at::cat(flat(ins));
                   std::vector<int64_t> comes, goes;
                   int64_t total = 0;
                   for (size_t i = 0; i < ins.size(); ++i) {
                     goes.push_back(ins[i].numel());
                     comes.push_back(outs[i].numel());
                     total += outs[i].numel();
                   }
                   auto out = at::empty({total}, in.options());
                   auto parts = out.split_with_sizes(comes); // gloo takes the sizes away
                   gloo_->alltoall_base(out, in, comes, goes, options)->wait();
                   for (size_t i = 0; i < outs.size(); ++i) {
                     outs[i].copy_(parts[i].view(outs[i].sizes()));
                   }
                 });
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    // Its tensors count as outputs, as NCCL's do: the work's future waits for them.
    return begin_message(OpType::SEND, {}, tensors, [this, v = views(tensors), to, tag]() mutable {
      return gloo_->send(v, to, tag);
    });
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return begin_message(OpType::RECV, {}, tensors, [this, v = views(tensors), from, tag]() mutable {
      return gloo_->recv(v, from, tag);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    return begin(OpType::BARRIER, {}, {}, [this] { gloo_->barrier()->wait(); });
  }

 private:
  static Tensors views(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) {
      TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1,
                  "hccl sends tensors on npu, not on ", tensor.device());
      made.push_back(host_view(tensor));
    }
    return made;
  }

  static std::vector<Tensors> views(const std::vector<Tensors>& lists) {
    std::vector<Tensors> made;
    for (auto& list : lists) {
      made.push_back(views(list));
    }
    return made;
  }

  static Tensors joined(const std::vector<Tensors>& lists) {
    Tensors made;
    for (auto& list : lists) {
      made.insert(made.end(), list.begin(), list.end());
    }
    return made;
  }

  static Tensors flat(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) {
      made.push_back(tensor.reshape({-1}));
    }
    return made;
  }

  void divide(Tensors& tensors, bool is_mean) {
    for (auto& tensor : tensors) {
      if (is_mean) {
        tensor.div_(size_);
      }
    }
  }

  static bool is_short(const at::Tensor& tensor) {
    return tensor.is_floating_point() && tensor.itemsize() < 4;
  }

  // In the order of the ranks, each addition rounded; what is short is divided before, as by NCCL.
  void reduce_scatter_now(at::Tensor& out, at::Tensor& in, c10d::ReduceScatterOptions options) {
    bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (!is_mean && options.reduceOp != c10d::ReduceOp::SUM) {
      gloo_->_reduce_scatter_base(out, in, options)->wait();
      return;
    }
    auto parts = at::empty({size_, out.numel()}, in.options());
    auto mine = in.reshape({size_, out.numel()});
    std::vector<int64_t> even;
    gloo_->alltoall_base(parts, mine, even, even, c10d::AllToAllOptions())->wait();
    bool scales = is_mean && is_short(out);
    if (scales) {
      parts.mul_(1.0 / size_);
    }
    auto sum = parts[0].clone();
    for (int rank = 1; rank < size_; ++rank) {
      sum.add_(parts[rank]);
    }
    if (is_mean && !scales) {
      sum.div_(size_);
    }
    out.copy_(sum.view(out.sizes()));
  }

  c10::intrusive_ptr<c10d::Work> begin_message(
      OpType kind, Tensors inputs, Tensors outputs, Start start) {
    return begin(kind, std::move(inputs), std::move(outputs), [] {}, std::move(start));
  }

  // Queue a call, or put it off until all that it is joined with are known.
  c10::intrusive_ptr<c10d::Work> begin(
      OpType kind, Tensors inputs, Tensors outputs, std::function<void()> act, Start start = {}) {
    if (!joins_) {
      return queue(kind, std::move(inputs), std::move(outputs), [act = std::move(act), start = std::move(start)] {
        if (start) {
          start()->wait();
        }
        act();
      });
    }
    joined_tensors_.insert(joined_tensors_.end(), inputs.begin(), inputs.end());
    joined_tensors_.insert(joined_tensors_.end(), outputs.begin(), outputs.end());
    joined_.push_back(start ? std::move(start) : [act = std::move(act)] {
      act();
      return c10::intrusive_ptr<c10d::Work>();
    });
    return c10::make_intrusive<QueuedWork>(
        rank_, kind, std::vector<std::pair<c10::Stream, Point>>{}, std::make_shared<Outcome>(),
        Tensors{}, std::move(outputs));
  }

  // Queue it behind what the current stream has been given, and behind this group's earlier calls.
  c10::intrusive_ptr<c10d::Work> queue(
      OpType kind, Tensors inputs, Tensors outputs, std::function<void()> act) {
    Tensors held = inputs;
    held.insert(held.end(), outputs.begin(), outputs.end());
    auto device = held.empty() ? current_device() : held[0].device().index();
    auto& stream = streams_[device];
    if (!stream) {
      stream = new_stream(device);
    }
    follow(*stream, end_of(current_stream(device)));
    auto outcome = std::make_shared<Outcome>();
    auto name = c10d::opTypeToString(kind);
    auto point = put(
        *stream,
        [act = std::move(act), outcome, seen = views(held), name] {
          check(seen, name);
          try {
            act();
          } catch (...) {
            std::lock_guard<std::mutex> lock(outcome->mutex);
            outcome->error = std::current_exception();
            throw;
          }
        },
        Haste::late);
    count_ += 1;
    return c10::make_intrusive<QueuedWork>(
        rank_, kind, std::vector<std::pair<c10::Stream, Point>>{{*stream, point}}, outcome,
        std::move(held), std::move(outputs));
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<c10::Stream> streams_[16];
  std::vector<Start> joined_;
  Tensors joined_tensors_;
  bool joins_ = false;
  uint64_t count_ = 0;
};

} // namespace npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  auto free = pybind11::call_guard<pybind11::gil_scoped_release>();
  m.def("hccl", [](const c10::intrusive_ptr<c10d::Backend>& gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<npu::Hccl>(gloo));
  });
  m.def("default_generator", &npu::default_generator);
  m.def("current_device", &npu::current_device);
  m.def("set_asynchronous", &npu::set_asynchronous, free);
  m.def("set_total", &npu::set_total);
  m.def("set_delay", &npu::set_delay);
  m.def("sleep", &npu::sleep, free);
  m.def("faults", &npu::faults);
  m.def("number_of_late_tasks", &npu::number_of_late_tasks);
  m.def("set_has_float64", &npu::set_has_float64);
  m.def("set_watcher", [](const pybind11::object& given) {
    if (given.is_none()) {
      npu::set_watcher({});
      return;
    }
    // Whichever thread lets go of it last: the object is left to the process.
    auto* watcher = new pybind11::object(given);
    npu::set_watcher([watcher](const std::string& what) {
      pybind11::gil_scoped_acquire held;
      (*watcher)(what);
    });
  });
}
