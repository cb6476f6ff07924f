// The pybind11 module parallel_ext._C: what is not a tensor op. Importing it registers the ops.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <torch/version.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <string>

#include "base/kernel_choice.h"
#include "base/layout.h"
#include "base/workspace.h"
#include "comm/comm.h"
#include "comm/lost_ranks.h"
#include "comm/profiler_range.h"
#include "comm/shared_memory.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  info["cxx_standard"] = static_cast<int64_t>(__cplusplus);
  info["multiversion"] = PARALLEL_EXT_HAS_MULTIVERSION;
  info["cuda_kernels"] = parallel_ext::kWithCudaKernels;
  return info;
}

// Starts the write of a file's pages to the disk, so that fsync has little left to do.
void start_writeback(int fd, int64_t offset, int64_t num_bytes) {
  py::gil_scoped_release no_gil;
  sync_file_range(fd, offset, num_bytes, SYNC_FILE_RANGE_WRITE);  // a hint: fsync reports errors
}

// Lets two paths of a file system change places at once.
void exchange_paths(const std::string& one, const std::string& other) {
  if (syscall(SYS_renameat2, AT_FDCWD, one.c_str(), AT_FDCWD, other.c_str(), RENAME_EXCHANGE)) {
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, other.c_str());
    throw py::error_already_set();
  }
}

std::vector<py::bytes> exchange_bytes(const std::string& record, int64_t group_size,
                                      const std::string& group_name, double timeout_s) {
  std::vector<std::string> records;
  {
    py::gil_scoped_release no_gil;
    records = parallel_ext::exchange_bytes(record, {group_size, group_name}, timeout_s);
  }
  return {records.begin(), records.end()};
}

using Buffers = std::vector<std::vector<py::buffer>>;

std::vector<std::vector<parallel_ext::Span>> spans_of(const char* name, const Buffers& buffers,
                                                      int64_t group_size, bool writable) {
  if (static_cast<int64_t>(buffers.size()) != group_size) {
    throw py::value_error("swap_bytes: " + std::string(name) + " has lists for " +
                          std::to_string(buffers.size()) + " ranks in a group of " +
                          std::to_string(group_size));
  }
  std::vector<std::vector<parallel_ext::Span>> spans;
  for (const auto& of_rank : buffers) {
    auto& own = spans.emplace_back();
    for (const py::buffer& buffer : of_rank) {
      const py::buffer_info info = buffer.request(writable);
      if (!PyBuffer_IsContiguous(info.view(), 'C')) {
        throw py::value_error("swap_bytes: a buffer of " + std::string(name) +
                              " is not contiguous; pass a contiguous copy");
      }
      own.push_back({info.ptr, static_cast<int64_t>(info.size * info.itemsize)});
    }
  }
  return spans;
}

void swap_bytes(const Buffers& outgoing, const Buffers& incoming, int64_t group_size,
                const std::string& group_name, double timeout_s) {
  const auto out = spans_of("outgoing", outgoing, group_size, /*writable=*/false);
  const auto in = spans_of("incoming", incoming, group_size, /*writable=*/true);
  py::gil_scoped_release no_gil;
  parallel_ext::swap_bytes("swap_bytes", out, in, {group_size, group_name}, timeout_s);
}

// A profiler's range of an exchange that Python starts, as a context.
struct ExchangeRange {
  std::string kind;
  int64_t bytes;
  parallel_ext::Group group;
  std::unique_ptr<parallel_ext::ProfilerRange> range;

  void enter() {
    range = std::make_unique<parallel_ext::ProfilerRange>(kind.c_str(), bytes, group);
  }
};

// Lets Ctrl-C, and every other signal with a handler in Python, end a wait for other ranks. Python
// runs handlers in the main thread only.
void check_signals() {
  if (syscall(SYS_gettid) != getpid()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Asks Python's function who is missing; its reference is kept to the end of the process, since the
// interpreter ends before it.
py::object* lost_ranks_in_python = nullptr;

std::string lost_ranks(const std::string& group_name) {
  const py::gil_scoped_acquire gil;
  return py::cast<std::string>((*lost_ranks_in_python)(group_name));
}

void set_lost_ranks(const py::object& function) {
  lost_ranks_in_python = new py::object(function);
  parallel_ext::set_lost_ranks(&lost_ranks);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  parallel_ext::SharedMemory::set_interrupt_check(&check_signals);
  m.def("build_info", &build_info, "What this module was compiled with.");
  m.def("split", &parallel_ext::split, py::arg("n"), py::arg("parts"), py::arg("multiple_of") = 1,
        "Boundaries of the parts; see csrc/base/layout.h.");
  m.def("start_writeback", &start_writeback, py::arg("fd"), py::arg("offset"), py::arg("num_bytes"),
        "Begin to write pages of a file to the disk, without waiting.");
  m.def("exchange_paths", &exchange_paths, py::arg("one"), py::arg("other"),
        "Lets two paths change places at once; raises OSError where the file system cannot.");
  m.def("exchange_bytes", &exchange_bytes, py::arg("record"), py::arg("group_size"),
        py::arg("group_name"), py::arg("timeout_s"),
        "Equal-sized records of all ranks of a group, in rank order.");
  m.def("swap_bytes", &swap_bytes, py::arg("outgoing"), py::arg("incoming"), py::arg("group_size"),
        py::arg("group_name"), py::arg("timeout_s"),
        "Brings the buffers that are listed for each rank to that rank.");
  py::class_<ExchangeRange>(m, "ExchangeRange", "A context that profilers see as an exchange.")
      .def(py::init([](std::string kind, int64_t bytes, int64_t group_size, std::string name) {
             return ExchangeRange{std::move(kind), bytes, {group_size, std::move(name)}, nullptr};
           }),
           py::arg("kind"), py::arg("bytes"), py::arg("group_size"), py::arg("group_name"))
      .def("__enter__", &ExchangeRange::enter)
      .def("__exit__", [](ExchangeRange& self, const py::args&) { self.range.reset(); });
  m.def("collective_counts", &parallel_ext::collective_counts);
  m.def("reset_collective_counts", &parallel_ext::reset_collective_counts);
  m.def("order_check", &parallel_ext::order_check);
  m.def("set_order_check", &parallel_ext::set_order_check, py::arg("on"));
  m.def("set_lost_ranks", &set_lost_ranks, py::arg("function"),
        "Let errors of gloo begin with what the function returns for the name of a group.");
  m.def("set_shared_memory", &parallel_ext::set_shared_memory, py::arg("on"));
  m.def("release_workspaces", &parallel_ext::release_workspaces);
  m.def("aten_path_on_cpu", &parallel_ext::aten_path_on_cpu);
  m.def("set_aten_path_on_cpu", &parallel_ext::set_aten_path_on_cpu, py::arg("on"));
}
