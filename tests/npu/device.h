// The queues of the test device: see device.cpp.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace npu {

// A place in the order of one stream: behind its first `number` tasks.
struct Point {
  int queue = 0;
  uint64_t number = 0;
  bool is_reached() const;
  void wait_on_host() const; // and let the stream hurry there
};

// How a task is begun: as soon as its turn comes, or as late as it may be.
enum class Haste { now, late };

c10::DeviceIndex current_device();
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);

Point put(c10::Stream stream, std::function<void()> task, Haste haste);
Point end_of(c10::Stream stream);
void follow(c10::Stream stream, Point point);
void drain(c10::Stream stream);
void synchronize(c10::DeviceIndex device);

// The same memory, as a tensor of the host. `check` finds whether it is still somebody's.
at::Tensor host_view(const at::Tensor& tensor);
void check(const std::vector<at::Tensor>& views, const std::string& who);
void keep_until(const at::Tensor& tensor, c10::Stream stream); // as record_stream

const at::Generator& default_generator(c10::DeviceIndex device);

// What tests switch and ask.
void set_asynchronous(bool is_on);
void set_total(int64_t nbytes); // of each device
void set_delay(double seconds);
std::vector<std::string> faults();
void sleep(double seconds); // of the current stream
int64_t number_of_late_tasks();
void set_has_float64(bool has);
using Watcher = std::function<void(const std::string&)>;
void set_watcher(Watcher watcher); // is told of each wait of the host for the device, in its thread

} // namespace npu
