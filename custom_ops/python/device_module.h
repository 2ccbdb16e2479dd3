#pragma once

#include <pybind11/pybind11.h>

// Adds device_choices() and device_launch(…) to the module.
void AddDevices(pybind11::module_& module);
