// Devices for Python: which there are, and single launches for tests. No logic here.
#include "python/device_module.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include "device/device.h"
#include "kvfuse/error.h"

namespace py = pybind11;

namespace {

// Runs one kernel: arrays go up, are arguments in their order, and come back changed in place; bytes are passed by
// value.
void Launch(const std::string& device_name, const std::string& kernel, const py::list& arguments,
            const std::vector<uint32_t>& groups, uint32_t threads, const std::map<int, int32_t>& constants) {
  kvfuse::Device& device = kvfuse::GetDevice(device_name);
  kvfuse::Dispatch dispatch;
  dispatch.kernel = kernel;
  dispatch.constants.assign(constants.begin(), constants.end());
  dispatch.threads = threads;
  if (groups.empty() || groups.size() > 3)
    kvfuse::Fail("[launch] expected 1 to 3 numbers of groups; found ", groups.size());
  std::copy(groups.begin(), groups.end(), dispatch.groups);
  struct Loan {
    std::shared_ptr<kvfuse::DeviceBuffer> buffer;
    py::array array;
  };
  std::vector<Loan> loans;
  std::vector<std::string> values;
  values.reserve(arguments.size());
  for (const py::handle& argument : arguments) {
    kvfuse::Dispatch::Argument passed;
    if (py::isinstance<py::bytes>(argument)) {
      values.push_back(argument.cast<std::string>());
      passed.bytes = values.back().data();
      passed.byte_count = static_cast<int64_t>(values.back().size());
    } else {
      auto array = argument.cast<py::array>();
      if ((array.flags() & py::array::c_style) == 0) kvfuse::Fail("[launch] expected arrays in C order; found another");
      loans.push_back({device.Allocate(array.nbytes()), array});
      device.Upload(*loans.back().buffer, 0, array.data(), array.nbytes());
      passed.buffer = loans.back().buffer.get();
    }
    dispatch.arguments.push_back(passed);
  }
  {
    py::gil_scoped_release release;
    device.Launch(dispatch);
    device.Wait();
  }
  for (Loan& loan : loans)
    if (loan.array.writeable()) device.Download(loan.array.mutable_data(), *loan.buffer, 0, loan.array.nbytes());
}

}  // namespace

void AddDevices(py::module_& module) {
  module.def("device_choices", [] {
    std::vector<std::pair<std::string, std::string>> choices;
    for (const kvfuse::DeviceChoice& choice : kvfuse::DeviceChoices()) choices.emplace_back(choice.name, choice.reason);
    return choices;
  });
  module.def("device_launch", &Launch, py::arg("device"), py::arg("kernel"), py::arg("arguments"), py::arg("groups"),
             py::arg("threads"), py::arg("constants") = std::map<int, int32_t>{});
}
