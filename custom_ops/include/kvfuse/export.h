// Marks what libkvfuse_ops shows to the outside; everything else is hidden.
#pragma once

#if defined(_WIN32)
#if defined(KVFUSE_BUILDING_LIBRARY)
#define KVFUSE_EXPORT __declspec(dllexport)
#else
#define KVFUSE_EXPORT __declspec(dllimport)
#endif
#else
#define KVFUSE_EXPORT __attribute__((visibility("default")))
#endif
