// The part of the Python module for single layer caches.
#pragma once

#include <pybind11/pybind11.h>

void AddDeviceCaches(pybind11::module_& module);
