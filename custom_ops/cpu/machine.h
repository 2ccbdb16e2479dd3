// Which instruction sets this compiler can make: the files of the others are empty.
#pragma once

#if defined(__x86_64__) && !defined(_MSC_VER)
#define KVFUSE_X86
#elif defined(__aarch64__) && !defined(_MSC_VER)
#define KVFUSE_ARM64
#endif
