// What metal-cpp uses of IOSurface: the name of a type.
#pragma once

using IOSurfaceRef = struct __IOSurface*;
